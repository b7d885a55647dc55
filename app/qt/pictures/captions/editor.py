"""The caption editor: one caption or many, as chips and as text, both always the same words."""

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

from app.core.edits.bulk import CalledOffError, CaptionSnapshots, SnapshotCaption, add_tags, remove_tags, rename_tag
from app.core.edits.history import Edit
from app.core.library import Altered, Picture, ValueChange
from app.core.session import Session
from app.core.tags.completion import Completion
from app.core.tags.index import Summary, summarise
from app.core.tags.splitting import Lines, TagSpan, move_piece, pieces, remove_piece, replace_piece, split_tags
from app.core.tasks import only, raise_again
from app.qt.actions.commands import Commands
from app.qt.pictures.captions.actions import ACTIONS
from app.qt.pictures.captions.chips import ChipBoard, ChipData, chips_of
from app.qt.pictures.captions.status import Chosen, SaveStatusPanel, StateWords
from app.qt.pictures.captions.tag_line import TagLine
from app.qt.pictures.captions.text import LIMITS, CaptionText, Ruler
from app.qt.widgets import ComboBox, until_destroyed

AT_ONCE = 500
"""Captions that are looked at in the window's own thread; more are looked at by a worker."""
_MOST_CHIPS = 120
"""Making one takes some 0.2 ms the first time."""
_TYPING_MS = 1500
"""A pause of typing after which what is typed next is another step to undo."""
_GATHER_MS = 40


class CaptionEditor(QWidget):
    """Edits the captions of the selected pictures, or of the current one where none is selected.

    What a filter hides is not edited: nobody sees what would happen to it. Every change is an edit in the history.
    `said` carries sentences for the status line.
    """

    said = Signal(str)
    left = Signal()
    """The keyboard is to go back to the pictures."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._chosen, self._ending = Chosen(session), False
        self._most = _MOST_CHIPS
        self._pieces: list[TagSpan] = []
        self._typing = False
        self._snapshot: CaptionSnapshots | None = None
        self._words = StateWords(self)
        self.title, self.state, self.hint, self.count = (QLabel() for _ in range(4))
        self.line = TagLine(self._complete)
        self.chips, self.more = ChipBoard(), QPushButton()
        self.text = CaptionText()
        self.limit, self.variants = ComboBox(), QCheckBox()
        self.ruler = Ruler(session.tasks, self)
        self._pause = self._timer(_TYPING_MS, self._end_typing)
        self._gather = self._timer(_GATHER_MS, self._summarise)
        self._commands = commands
        commands.add(ACTIONS, self)
        self.safety = SaveStatusPanel(session)
        self._build()
        self._listen()
        self._choose()

    # --- what the table of actions names

    def type_tag(self) -> None:
        """Go to the line of tags."""
        self.line.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.line.selectAll()

    def write_text(self) -> None:
        """Go to the text."""
        self.text.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def finish(self) -> None:
        """Add what stands in the line of tags without Enter: the window closes, and nothing typed is lost."""
        self._ending = True
        if self._chosen:
            self.line.enter()
        self._ending = False

    def next_without(self) -> None:
        """Go to the next shown picture without caption, round and round."""
        view, library = self._session.view, self._session.library.pictures
        start = view.ids.index(view.current) + 1 if view.current in view.ids else 0
        order = view.ids[start:] + view.ids[:start]
        found = next((number for number in order if not (library[number].caption or "").strip()), None)
        if found is None:
            self.said.emit(self.tr("All pictures shown have a caption."))
        else:
            view.select({found}, found)

    def read_lines(self, variants: bool) -> None:
        """Read lines as alternatives, or as one caption."""
        self._session.target.set("lines", "variants" if variants else "caption")
        self._commands.refresh()

    def change_many(self) -> None:
        """Open the dialog that changes many captions."""
        from app.qt.pictures.captions.bulk_dialog import BulkDialog

        dialog = BulkDialog(self._session, self._lines, self.window())
        dialog.said.connect(self.said)
        self._open(dialog)

    def restore(self) -> None:
        """Open the dialog that brings original captions back."""
        from app.qt.pictures.captions.recovery_dialogs import RestoreDialog

        dialog = RestoreDialog(self._session, self.window())
        dialog.said.connect(self.said)
        self._open(dialog)

    def retry(self) -> None:
        """Try again what could not be saved."""
        self._session.saver.hurry()

    def choose(self) -> None:
        """Open the dialog for what another program changed too."""
        from app.qt.pictures.captions.recovery_dialogs import ConflictsDialog

        self._open(ConflictsDialog(self._session, self.window()))

    def show_recovered(self) -> None:
        """Show what a session that crashed had left unsaved."""
        from app.qt.pictures.captions.recovery_dialogs import RecoveredDialog

        self._open(RecoveredDialog(self._session, self.window()))

    def has_problems(self) -> bool:
        """Tell whether something could not be saved."""
        return bool(self._session.saver.now.problems)

    def has_conflicts(self) -> bool:
        """Tell whether the user has to choose."""
        return bool(self._session.saver.now.conflicts)

    def has_recovered(self) -> bool:
        """Tell whether a session had crashed."""
        return bool(self._session.saver.recovered)

    def has_pictures(self) -> bool:
        """Tell whether there is a caption to edit."""
        return bool(self._chosen)

    def has_one(self) -> bool:
        """Tell whether it is just one."""
        return len(self._chosen) == 1

    def has_shown(self) -> bool:
        """Tell whether any picture is shown."""
        return bool(self._session.view.ids)

    def has_any(self) -> bool:
        """Tell whether there is any picture."""
        return bool(self._session.library.pictures)

    def are_variants(self) -> bool:
        """Tell whether lines are read as alternatives."""
        return self._lines == "variants"

    @property
    def _lines(self) -> Lines:
        return self._session.target.aim.lines

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
        self.variants.setText(self.tr("Each line is a caption of its own"))
        for limit in LIMITS:
            self.limit.addItem(str(limit), limit)
        self.limit.setAccessibleName(self.tr("Tokens that training reads"))
        self.limit.setToolTip(self.tr("How many tokens of a caption training reads: 75 in each row of the encoder"))
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
        whole.addWidget(self.safety)
        whole.addLayout(column, 1)
        column.setContentsMargins(10, 8, 10, 8)
        column.setSpacing(6)
        column.addLayout(self._row(self.title, self._button("captions.many")))
        for widget, stretch in ((self.state, 0), (self.line, 0), (area, 3), (self.more, 0), (self.hint, 0)):
            column.addWidget(widget, stretch)
        column.addWidget(self.text, 2)
        column.addWidget(self.variants)
        column.addLayout(self._row(self.count, self.limit))
        column.addStretch()  # room only while nothing is shown that wants it

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

    def _listen(self) -> None:
        self.line.entered.connect(self._add)
        self.line.back.connect(lambda: self.chips.choose(len(self.chips.chips) - 1))
        self.line.left.connect(self.left)
        self.chips.left.connect(self.write_text)
        self.chips.removed.connect(self._remove)
        self.chips.edited.connect(self._rename)
        self.chips.added.connect(lambda number: self._add(self.chips.chips[number].chip.tag, False))
        self.chips.moved.connect(self._move)
        self.text.edited.connect(self._typed)
        self.text.paused.connect(self._end_typing)
        self.text.left.connect(self.left)
        for field in (self.line, self.text):
            field.stepped.connect(self._step)
        self.more.clicked.connect(self._show_more)
        self.limit.activated.connect(lambda _: self._session.target.set("tokens", self.limit.currentData()))
        self.ruler.ready.connect(self._measure)
        self.variants.clicked.connect(self.read_lines)
        self.safety.retry_asked.connect(self.retry)
        self.safety.choose_asked.connect(self.choose)
        self.safety.recovered_asked.connect(self.show_recovered)
        session = self._session
        until_destroyed(
            self,
            session.view.selection.connect(lambda _: self._choose()),
            session.view.shown.connect(lambda _: self._choose()),
            session.library.altered.connect(self._altered),
            session.saver.state.connect(lambda _: self._commands.refresh()),
            session.target.changed.connect(lambda _: self._show()),
        )

    # --- what is shown

    def _choose(self) -> None:
        if self._chosen.follow():
            self._end_typing()
            self.chips.stop_writing()
            self._most = _MOST_CHIPS
            self._show()
        self._tell_hint()

    def _altered(self, altered: Altered) -> None:
        if self._chosen.touched(altered):
            if len(self._chosen) > 1:
                self._gather.start()
            else:
                self._show()
        elif altered.removed:
            self._choose()

    def _show(self) -> None:
        """Show the pictures' captions as they are now."""
        self._call_off()
        one = len(self._chosen) == 1
        self.line.setVisible(bool(self._chosen))
        self._area.setVisible(bool(self._chosen))
        self._tell_hint()
        for part in (self.text, self.count, self.limit):
            part.setVisible(one)
        if one:
            self._show_one(self._chosen.pictures[0])
        else:
            self.text.show_text("")
            self.variants.hide()
            if len(self._chosen) > AT_ONCE:
                self._show_chips([], movable=False)
                self._tell(self._words.title(len(self._chosen), self._chosen.hidden), "", "muted")
                self._gather.start()  # in an event of its own: taking many in has cost enough of this one
            else:
                self._summarise()

    def _tell_hint(self) -> None:
        """Say what can be done, and which of the chosen pictures are left alone."""
        words = self._words.hint(len(self._chosen), self._chosen.hidden)
        self.hint.setText(words)
        self.hint.setVisible(bool(words))

    def _show_one(self, picture: Picture) -> None:
        text = picture.caption or ""
        self._pieces = pieces(text, self._lines)
        self.text.show_text(text)
        chips = chips_of(text, self._pieces[: self._most], self._lines)
        self._show_chips(chips, movable=True, more=len(self._pieces) - len(chips))
        self.variants.setVisible("\n" in text.strip() or self._lines == "variants")
        self.variants.setChecked(self._lines == "variants")
        self._tell(picture.name, *self._words.of_one(picture, self._lines))
        self._measure()

    def _summarise(self) -> None:
        """Look at many captions: here where they are few, else behind."""
        self._call_off()
        if len(self._chosen) < 2:
            self._show_many(Summary(0, (), (), 0, 0))
            return
        captions = self._snapshot = CaptionSnapshots(self._chosen.pictures)
        lines = self._lines

        def look() -> Summary:
            return summarise((one.caption for one in captions), lines)

        def have(summary: Summary) -> None:
            if captions is self._snapshot:
                self._show_many(summary)

        if len(captions) <= AT_ONCE:
            have(look())
        else:
            self._session.tasks.run(look, have, only(CalledOffError, lambda _: None))

    def _show_many(self, summary: Summary) -> None:
        count = summary.captions
        chips = [ChipData(tag, have=count, total=count) for tag in summary.common]
        chips += [ChipData(tag, have=have, total=count) for tag, have in summary.mixed]
        self._show_chips(chips[: self._most], movable=False, more=len(chips) - self._most)
        self._tell(self._words.title(count, self._chosen.hidden), *self._words.of_many(summary, self._chosen.pictures))

    def _show_chips(self, chips: Sequence[ChipData], movable: bool, more: int = 0) -> None:
        self.chips.show_chips(chips, movable)
        self.more.setText(self.tr("+%n more tag(s)", "", max(0, more)))
        self.more.setVisible(more > 0)

    def _show_more(self) -> None:
        self._most *= 2
        self._show()

    def _tell(self, title: str, state: str, role: str) -> None:
        self.title.setText(self.title.fontMetrics().elidedText(title, Qt.TextElideMode.ElideMiddle, self.width() - 60))
        self.title.setToolTip(title)
        self.state.setText(state)
        self.state.setProperty("role", role)
        self.state.style().polish(self.state)
        self.state.setVisible(bool(state))

    def _measure(self) -> None:
        """Count the tokens of the one caption and mark where training cuts it."""
        if len(self._chosen) != 1:
            return
        self.limit.setCurrentIndex(self.limit.findData(self._session.target.aim.tokens))
        picture, limit = self._chosen.pictures[0], self.limit.currentData()
        measured = self.ruler.measure(picture.caption or "", self._lines, limit, picture.folder.trigger or "")
        self.text.mark(measured or ())
        words, role = self._words.of_tokens(measured, limit)
        self.count.setText(words)
        self.count.setToolTip(self._words.about_tokens(measured))
        self.count.setProperty("role", role)
        self.count.style().polish(self.count)

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Cut the title anew."""
        super().resizeEvent(event)
        title = self.title.toolTip()
        self.title.setText(self.title.fontMetrics().elidedText(title, Qt.TextElideMode.ElideMiddle, self.width() - 60))

    # --- what the user does

    def _add(self, text: str, front: bool) -> None:
        tags = split_tags(text, "variants")  # of a list that was pasted each line is a tag of its own
        at = 0 if front else None
        if tags:  # and not commas alone
            self._do(lambda captions: add_tags(captions, tags, at, self._lines), self._words.there_already(tags))

    def _remove(self, number: int) -> None:
        tag = self.chips.chips[number].chip.tag
        if len(self._chosen) == 1:
            text = remove_piece(self._chosen.pictures[0].caption or "", self._pieces[number])
            self._rewrite(f"Remove {tag} from {self._chosen.pictures[0].name}", text)
        else:
            self._do(lambda captions: remove_tags(captions, [tag], self._lines))

    def _rename(self, number: int, new: str) -> None:
        old = self.chips.chips[number].chip.tag
        if not new:
            self._remove(number)
        elif len(self._chosen) == 1:
            text = replace_piece(self._chosen.pictures[0].caption or "", self._pieces[number], new)
            self._rewrite(f"Rename {old} to {new} in {self._chosen.pictures[0].name}", text)
        else:
            self._do(lambda captions: rename_tag(captions, old, new, self._lines))

    def _move(self, source: int, target: int) -> None:
        text = move_piece(self._chosen.pictures[0].caption or "", self._pieces, source, target)
        self._rewrite(f"Move {self._pieces[source].tag} in {self._chosen.pictures[0].name}", text)

    def _typed(self, text: str) -> None:
        picture = self._chosen.pictures[0]
        name = f"Write the caption of {picture.name}"
        joins, self._typing = self._typing, True
        self._session.history.do(Edit(name, (ValueChange(picture.id, "caption", picture.caption, text),)), joins=joins)
        self._pause.start()

    def _end_typing(self) -> None:
        self._typing = False
        self._pause.stop()

    def _rewrite(self, name: str, text: str) -> None:
        self._end_typing()
        picture = self._chosen.pictures[0]
        if text != picture.caption:
            self._session.history.do(Edit(name, (ValueChange(picture.id, "caption", picture.caption, text),)))

    def _do(self, make: Callable[[Sequence[SnapshotCaption]], Edit], nothing: str = "") -> None:
        """Make an edit of all captions: here where they are few or the window waits for it to close, else behind."""
        self._end_typing()
        captions = CaptionSnapshots(self._chosen.pictures)

        def have(edit: Edit) -> None:
            if edit:
                self._session.history.do(edit)
                self.said.emit(edit.name)
            elif nothing:
                self.said.emit(nothing)

        if self._ending or len(captions) <= AT_ONCE:
            have(make(captions))
        else:
            self._session.tasks.run(lambda: make(captions), have, raise_again)

    def _step(self, by: int) -> None:
        view = self._session.view
        if not view.ids:
            return
        place = view.ids.index(view.current) + by if view.current in view.ids else 0
        number = view.ids[max(0, min(place, len(view.ids) - 1))]
        view.select({number}, number)

    def _complete(self, typed: str) -> Sequence[Completion]:
        one = len(self._chosen) == 1
        besides = split_tags(self._chosen.pictures[0].caption, self._lines) if one else ()
        return self._session.completer.complete(typed, besides=besides)

    def _call_off(self) -> None:
        self._gather.stop()
        if self._snapshot:
            self._snapshot.call_off()
            self._snapshot = None
