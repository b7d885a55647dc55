"""The caption editor: shows captions as tag chips, and a single caption also as text; the two stay in sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import QSize, Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.edits.bulk import CanceledError, CaptionSnapshots, SnapshotCaption, add_tags, remove_tags, rename_tag
from app.core.edits.history import Edit
from app.core.library import LibraryChange, LibraryImage, ValueChange
from app.core.session import Session
from app.core.tags.completion import Completion
from app.core.tags.index import Summary, summarize
from app.core.tags.splitting import Lines, TagSpan, find_tags, move_tag, remove_tag, replace_tag, split_tags
from app.core.tasks import handle_only, reraise
from app.qt.actions.commands import Action, Commands
from app.qt.images.captions.chips import ChipBoard, ChipData, chips_of
from app.qt.images.captions.status import EditorTexts, EditTargets, SaveStatusPanel
from app.qt.images.captions.tag_line import TagLine
from app.qt.images.captions.text import LIMITS, CaptionText, TokenCounter
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, until_destroyed

AT_ONCE = 500
"""Maximum number of captions to process on the main thread; larger numbers go to a worker."""
_CHIP_LIMIT = 120
"""Maximum number of chips shown at first; creating one takes about 0.2 ms."""
_TYPING_MS = 1500
"""Milliseconds without typing after which further typing starts a new undo step."""
_GATHER_MS = 40

ACTIONS = (
    Action(
        "captions.type",
        QT_TRANSLATE_NOOP("Action", "Type a tag"),
        "captions",
        "focus_tags",
        keys=("/", "Ctrl+T"),
        enabled="has_images",
        icon="tag",
    ),
    Action(
        "captions.write",
        QT_TRANSLATE_NOOP("Action", "Edit caption as text"),
        "captions",
        "focus_text",
        keys=("Ctrl+E",),
        enabled="has_one",
        icon="caption",
    ),
    Action(
        "captions.next_without",
        QT_TRANSLATE_NOOP("Action", "Next image without caption"),
        "captions",
        "next_without",
        keys=("Ctrl+J",),
        enabled="has_shown",
        icon="right",
    ),
    Action(
        "captions.lines",
        QT_TRANSLATE_NOOP("Action", "Each line is a separate caption"),
        "captions",
        "read_lines",
        checked="are_variants",
        tip=QT_TRANSLATE_NOOP(
            "Action", "Treat each line of a caption file as an alternative caption, as set in the job"
        ),
    ),
    Action(
        "captions.many",
        QT_TRANSLATE_NOOP("Action", "Edit many captions…"),
        "captions",
        "change_many",
        keys=("Ctrl+H",),
        enabled="has_any",
        icon="sort",
    ),
    Action(
        "captions.restore",
        QT_TRANSLATE_NOOP("Action", "Restore original captions…"),
        "captions",
        "restore",
        enabled="has_any",
        icon="refresh",
    ),
    Action(
        "captions.retry",
        QT_TRANSLATE_NOOP("Action", "Try saving again"),
        "captions",
        "retry",
        enabled="has_problems",
        icon="save",
    ),
    Action(
        "captions.conflicts",
        QT_TRANSLATE_NOOP("Action", "Resolve conflicts…"),
        "captions",
        "choose",
        enabled="has_conflicts",
        icon="compare",
    ),
    Action(
        "captions.recovered",
        QT_TRANSLATE_NOOP("Action", "Show recovered edits…"),
        "captions",
        "show_recovered",
        enabled="has_recovered",
        icon="info",
    ),
)


class CaptionEditor(QWidget):
    """Caption editor for the selected images, or for the current image if none is selected.

    Images hidden by a filter are not edited, since the user could not see the change. Every change is an edit in the
    undo history. `message_shown` carries messages for the status bar.
    """

    message_shown = Signal(str)
    focus_returned = Signal()
    """Emitted when the focus should return to the images."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._chosen, self._closing = EditTargets(session), False
        self._chip_limit = _CHIP_LIMIT
        self._pieces: list[TagSpan] = []
        self._typing = False
        self._snapshot: CaptionSnapshots | None = None
        self._words = EditorTexts(self)
        self.title, self.state, self.hint, self.count = (QLabel() for _ in range(4))
        self.line = TagLine(self._complete)
        self.chips, self.more = ChipBoard(), QPushButton()
        self.text = CaptionText()
        self.limit, self.variants = ComboBox(), QCheckBox()
        self.ruler = TokenCounter(session.tasks, self)
        self._pause = self._timer(_TYPING_MS, self._end_typing)
        self._gather = self._timer(_GATHER_MS, self._summarize)
        self._commands = commands
        commands.add(ACTIONS, self)
        self.save_status = SaveStatusPanel(session)
        self._build()
        self._connect_signals()
        self._on_view_changed()

    # --- methods named in the table of actions

    def focus_tags(self) -> None:
        """Focus the tag field."""
        self.line.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.line.selectAll()

    def focus_text(self) -> None:
        """Focus the text field."""
        self.text.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def finish(self) -> None:
        """Add the tags that were typed but not entered, before the window closes."""
        self._closing = True
        if self._chosen:
            self.line.enter()
        self._closing = False

    def next_without(self) -> None:
        """Go to the next shown image that has no caption, wrapping around at the end."""
        view, library = self._session.view, self._session.library.images
        start = view.ids.index(view.current) + 1 if view.current in view.ids else 0
        order = view.ids[start:] + view.ids[:start]
        found = next((number for number in order if not (library[number].caption or "").strip()), None)
        if found is None:
            self.message_shown.emit(self.tr("All shown images have captions."))
        else:
            view.select({found}, found)

    def read_lines(self, variants: bool) -> None:
        """Set whether each line is a separate caption."""
        self._session.target.set("lines", "variants" if variants else "caption")
        self._commands.refresh()

    def change_many(self) -> None:
        """Open the dialog for editing many captions."""
        from app.qt.images.captions.bulk_dialog import BulkDialog

        dialog = BulkDialog(self._session, self._lines, self.window())
        dialog.message_shown.connect(self.message_shown)
        self._open(dialog)

    def restore(self) -> None:
        """Open the dialog that restores original captions."""
        from app.qt.images.captions.recovery_dialogs import RestoreDialog

        dialog = RestoreDialog(self._session, self.window())
        dialog.message_shown.connect(self.message_shown)
        self._open(dialog)

    def retry(self) -> None:
        """Try again to save the edits that failed."""
        self._session.saver.hurry()

    def choose(self) -> None:
        """Open the dialog for resolving conflicts with other programs."""
        from app.qt.images.captions.recovery_dialogs import ConflictsDialog

        self._open(ConflictsDialog(self._session, self.window()))

    def show_recovered(self) -> None:
        """Show the edits recovered after a crash."""
        from app.qt.images.captions.recovery_dialogs import RecoveredDialog

        self._open(RecoveredDialog(self._session, self.window()))

    def has_problems(self) -> bool:
        """Return whether some edits could not be saved."""
        return bool(self._session.saver.now.problems)

    def has_conflicts(self) -> bool:
        """Return whether there are unresolved conflicts."""
        return bool(self._session.saver.now.conflicts)

    def has_recovered(self) -> bool:
        """Return whether edits were recovered after a crash."""
        return bool(self._session.saver.recovered)

    def has_images(self) -> bool:
        """Return whether there is a caption to edit."""
        return bool(self._chosen)

    def has_one(self) -> bool:
        """Return whether exactly one caption is edited."""
        return len(self._chosen) == 1

    def has_shown(self) -> bool:
        """Return whether any image is shown."""
        return bool(self._session.view.ids)

    def has_any(self) -> bool:
        """Return whether any image is open."""
        return bool(self._session.library.images)

    def are_variants(self) -> bool:
        """Return whether each line is a separate caption."""
        return self._lines == "variants"

    @property
    def _lines(self) -> Lines:
        return self._session.target.target.lines

    def _open(self, dialog: QDialog) -> None:
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()

    # --- building

    def _build(self) -> None:
        self.title.setProperty("role", "heading")
        self.title.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.state.setWordWrap(True)
        self.hint.setProperty("role", "muted")
        self.hint.setWordWrap(True)
        self.variants.setText(self.tr("Each line is a separate caption"))
        for limit in LIMITS:
            self.limit.addItem(str(limit), limit)
        self.limit.setAccessibleName(self.tr("Token limit"))
        self.limit.setToolTip(
            self.tr("Maximum caption length in training, in chunks of 75 tokens (kohya: max_token_length)")
        )
        self.count.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        area = QScrollArea()
        area.setWidget(self.chips)
        area.setWidgetResizable(True)
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setAccessibleName(self.tr("Tags"))
        self._area = area
        whole, column = QVBoxLayout(self), QVBoxLayout()
        whole.setContentsMargins(0, 0, 0, 0)
        whole.setSpacing(0)
        whole.addWidget(self.save_status)
        whole.addLayout(column, 1)
        column.setContentsMargins(10, 8, 10, 8)
        column.setSpacing(6)
        column.addLayout(self._row(self.title, self._button("captions.many")))
        for widget, stretch in ((self.state, 0), (self.line, 0), (area, 3), (self.more, 0), (self.hint, 0)):
            column.addWidget(widget, stretch)
        column.addWidget(self.text, 2)
        column.addWidget(self.variants)
        column.addLayout(self._row(self.count, self.limit))
        column.addStretch()  # takes the space that no visible widget needs

    def _row(self, wide: QWidget, small: QWidget) -> QHBoxLayout:
        row = QHBoxLayout()
        row.addWidget(wide, 1)
        row.addWidget(small)
        return row

    def _button(self, command: str) -> QToolButton:
        button = QToolButton()
        button.setDefaultAction(self._commands[command])
        button.setIconSize(QSize(18, 18))
        button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        button.setAccessibleName(self._commands[command].text())
        return button

    def _timer(self, pause: int, work: Callable[[], None]) -> QTimer:
        timer = QTimer(self)
        timer.setSingleShot(True)
        timer.setInterval(pause)
        timer.timeout.connect(work)
        return timer

    def _connect_signals(self) -> None:
        self.line.submitted.connect(self._add)
        self.line.back.connect(lambda: self.chips.choose(len(self.chips.chips) - 1))
        self.line.left.connect(self.focus_returned)
        self.chips.left.connect(self.focus_text)
        self.chips.removed.connect(self._remove)
        self.chips.edited.connect(self._rename)
        self.chips.added.connect(lambda number: self._add(self.chips.chips[number].chip.tag, False))
        self.chips.moved.connect(self._move)
        self.text.edited.connect(self._on_text_edited)
        self.text.paused.connect(self._end_typing)
        self.text.left.connect(self.focus_returned)
        for field in (self.line, self.text):
            field.stepped.connect(self._step)
        self.more.clicked.connect(self._show_more)
        self.limit.activated.connect(lambda _: self._session.target.set("tokens", self.limit.currentData()))
        self.ruler.ready.connect(self._measure)
        self.variants.clicked.connect(self.read_lines)
        self.save_status.retry_requested.connect(self.retry)
        self.save_status.choose_requested.connect(self.choose)
        self.save_status.recovered_requested.connect(self.show_recovered)
        session = self._session
        until_destroyed(
            self,
            session.view.selection.connect(lambda _: self._on_view_changed()),
            session.view.shown.connect(lambda _: self._on_view_changed()),
            session.library.altered.connect(self._on_library_altered),
            session.saver.state.connect(lambda _: self._commands.refresh()),
            session.target.changed.connect(lambda _: self._show()),
        )

    # --- display

    def _on_view_changed(self) -> None:
        if self._chosen.follow():
            self._end_typing()
            self.chips.stop_writing()
            self._chip_limit = _CHIP_LIMIT
            self._show()
        self._update_hint()

    def _on_library_altered(self, altered: LibraryChange) -> None:
        if self._chosen.touched(altered):
            if len(self._chosen) > 1:
                self._gather.start()
            else:
                self._show()
        elif altered.removed:
            self._on_view_changed()

    def _show(self) -> None:
        """Show the captions of the images to edit."""
        self._cancel_summary()
        one = len(self._chosen) == 1
        self.line.setVisible(bool(self._chosen))
        self._area.setVisible(bool(self._chosen))
        self._update_hint()
        for part in (self.text, self.count, self.limit):
            part.setVisible(one)
        if one:
            self._show_one(self._chosen.images[0])
        else:
            self.text.show_text("")
            self.variants.hide()
            if len(self._chosen) > AT_ONCE:
                self._show_chips([], movable=False)
                self._set_header(self._words.title(len(self._chosen), self._chosen.hidden), "", "muted")
                self._gather.start()  # in a later event: selecting many has already taken enough time in this one
            else:
                self._summarize()

    def _update_hint(self) -> None:
        """Update the hint: what the user can do, and how many selected images are hidden."""
        words = self._words.hint(len(self._chosen), self._chosen.hidden)
        self.hint.setText(words)
        self.hint.setVisible(bool(words))

    def _show_one(self, image: LibraryImage) -> None:
        text = image.caption or ""
        self._pieces = find_tags(text, self._lines)
        self.text.show_text(text)
        chips = chips_of(text, self._pieces[: self._chip_limit], self._lines)
        self._show_chips(chips, movable=True, more=len(self._pieces) - len(chips))
        self.variants.setVisible("\n" in text.strip() or self._lines == "variants")
        self.variants.setChecked(self._lines == "variants")
        self._set_header(image.name, *self._words.of_one(image, self._lines))
        self._measure()

    def _summarize(self) -> None:
        """Summarize several captions and show the result; summarize more than `AT_ONCE` captions on a worker."""
        self._cancel_summary()
        if len(self._chosen) < 2:
            self._show_many(Summary(0, (), (), 0, 0))
            return
        captions = self._snapshot = CaptionSnapshots(self._chosen.images)
        lines = self._lines

        def summarize_all() -> Summary:
            return summarize((one.caption for one in captions), lines)

        def done(summary: Summary) -> None:
            if captions is self._snapshot:  # else the selection or a caption has changed since
                self._show_many(summary)

        if len(captions) <= AT_ONCE:
            done(summarize_all())
        else:
            self._session.tasks.run(summarize_all, done, handle_only(CanceledError, lambda _: None))

    def _show_many(self, summary: Summary) -> None:
        count = summary.captions
        chips = [ChipData(tag, have=count, total=count) for tag in summary.common]
        chips += [ChipData(tag, have=have, total=count) for tag, have in summary.mixed]
        self._show_chips(chips[: self._chip_limit], movable=False, more=len(chips) - self._chip_limit)
        self._set_header(
            self._words.title(count, self._chosen.hidden), *self._words.of_many(summary, self._chosen.images)
        )

    def _show_chips(self, chips: Sequence[ChipData], movable: bool, more: int = 0) -> None:
        self.chips.show_chips(chips, movable)
        self.more.setText(self.tr("+%n more tag(s)", "", max(0, more)))
        self.more.setVisible(more > 0)

    def _show_more(self) -> None:
        self._chip_limit *= 2
        self._show()

    def _set_header(self, title: str, state: str, role: str) -> None:
        self.title.setText(self.title.fontMetrics().elidedText(title, Qt.TextElideMode.ElideMiddle, self.width() - 60))
        self.title.setToolTip(title)
        self.state.setText(state)
        self.state.setProperty("role", role)
        self.state.style().polish(self.state)
        self.state.setVisible(bool(state))

    def _measure(self) -> None:
        """If there is a single caption, count its tokens and mark where training truncates it."""
        if len(self._chosen) != 1:
            return
        self.limit.setCurrentIndex(self.limit.findData(self._session.target.target.tokens))
        image, limit = self._chosen.images[0], self.limit.currentData()
        measured = self.ruler.count(image.caption or "", self._lines, limit, image.folder.trigger or "")
        self.text.mark(measured or ())
        words, role = self._words.of_tokens(measured, limit)
        self.count.setText(words)
        self.count.setToolTip(self._words.about_tokens(measured))
        self.count.setProperty("role", role)
        self.count.style().polish(self.count)

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Elide the title to the new width."""
        super().resizeEvent(event)
        title = self.title.toolTip()
        self.title.setText(self.title.fontMetrics().elidedText(title, Qt.TextElideMode.ElideMiddle, self.width() - 60))

    # --- user actions

    def _add(self, text: str, front: bool) -> None:
        tags = split_tags(text, "variants")  # each line of a pasted list is a tag
        at = 0 if front else None
        if tags:  # none if the text is only commas
            self._edit_all(lambda captions: add_tags(captions, tags, at, self._lines), self._words.there_already(tags))

    def _remove(self, number: int) -> None:
        tag = self.chips.chips[number].chip.tag
        if len(self._chosen) == 1:
            text = remove_tag(self._chosen.images[0].caption or "", self._pieces[number])
            self._rewrite(f"Remove {tag} from {self._chosen.images[0].name}", text)
        else:
            self._edit_all(lambda captions: remove_tags(captions, [tag], self._lines))

    def _rename(self, number: int, new: str) -> None:
        old = self.chips.chips[number].chip.tag
        if not new:
            self._remove(number)
        elif len(self._chosen) == 1:
            text = replace_tag(self._chosen.images[0].caption or "", self._pieces[number], new)
            self._rewrite(f"Rename {old} to {new} in {self._chosen.images[0].name}", text)
        else:
            self._edit_all(lambda captions: rename_tag(captions, old, new, self._lines))

    def _move(self, source: int, target: int) -> None:
        text = move_tag(self._chosen.images[0].caption or "", self._pieces, source, target)
        self._rewrite(f"Move {self._pieces[source].tag} in {self._chosen.images[0].name}", text)

    def _on_text_edited(self, text: str) -> None:
        image = self._chosen.images[0]
        name = f"Edit the caption of {image.name}"
        joins, self._typing = self._typing, True
        self._session.history.do(Edit(name, (ValueChange(image.id, "caption", image.caption, text),)), joins=joins)
        self._pause.start()

    def _end_typing(self) -> None:
        self._typing = False
        self._pause.stop()

    def _rewrite(self, name: str, text: str) -> None:
        self._end_typing()
        image = self._chosen.images[0]
        if text != image.caption:
            self._session.history.do(Edit(name, (ValueChange(image.id, "caption", image.caption, text),)))

    def _edit_all(self, make: Callable[[Sequence[SnapshotCaption]], Edit], nothing: str = "") -> None:
        """Make an edit of all captions in the editor and apply it; if it is empty, show the message `nothing`.

        A worker computes edits of more than `AT_ONCE` captions, unless the window is closing.
        """
        self._end_typing()
        captions = CaptionSnapshots(self._chosen.images)

        def done(edit: Edit) -> None:
            if edit:
                self._session.history.do(edit)
                self.message_shown.emit(edit.name)
            elif nothing:
                self.message_shown.emit(nothing)

        if self._closing or len(captions) <= AT_ONCE:
            done(make(captions))
        else:
            self._session.tasks.run(lambda: make(captions), done, reraise)

    def _step(self, by: int) -> None:
        view = self._session.view
        if not view.ids:
            return
        place = view.ids.index(view.current) + by if view.current in view.ids else 0
        number = view.ids[max(0, min(place, len(view.ids) - 1))]
        view.select({number}, number)

    def _complete(self, typed: str) -> Sequence[Completion]:
        one = len(self._chosen) == 1
        present = split_tags(self._chosen.images[0].caption, self._lines) if one else ()
        return self._session.completer.complete(typed, exclude=present)

    def _cancel_summary(self) -> None:
        self._gather.stop()
        if self._snapshot:
            self._snapshot.cancel()
            self._snapshot = None
