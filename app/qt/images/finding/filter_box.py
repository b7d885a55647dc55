"""The filter above the images: text field, errors, number of matches, and saved filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from pathlib import Path

from PySide6.QtCore import QEvent, QLocale, QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QFocusEvent, QFontDatabase, QHideEvent, QInputMethodEvent, QKeyEvent, QTextCharFormat
from PySide6.QtWidgets import (
    QApplication,
    QDialog,
    QDialogButtonBox,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QMenu,
    QPlainTextEdit,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.disk.roots import unique_name
from app.core.query.completion import Proposal, QueryCompleter, UnknownTag, unknown_tags
from app.core.query.filtering import SavedFilter
from app.core.query.language import QueryError, QueryProblem, help_text, parse
from app.core.query.terms import Query, Term, literal
from app.core.session import Session
from app.core.words import full_message
from app.qt.actions.commands import Action, Commands
from app.qt.images.finding.suggestions import ProposalList
from app.qt.theme import colors, set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, until_destroyed

_Buttons = QDialogButtonBox.StandardButton
_ENTER = (Qt.Key.Key_Return, Qt.Key.Key_Enter)
# Pauses in typing before the filter is applied, and before the word being typed is reported as an error.
_PAUSE_MS = 180
_PATIENCE_MS = 900
_RECENT = 10
_BY_KEYS = Qt.TextInteractionFlag.LinksAccessibleByKeyboard
ACTIONS = (
    Action(
        "finding.filter",
        QT_TRANSLATE_NOOP("Action", "Filter images"),
        "find",
        "write_filter",
        keys=("Ctrl+F",),
        icon="filter",
    ),
    Action(
        "finding.clear",
        QT_TRANSLATE_NOOP("Action", "Show all images"),
        "find",
        "clear",
        keys=("Ctrl+Shift+A",),
        enabled="is_filtered",
        icon="close",
    ),
    Action(
        "finding.save",
        QT_TRANSLATE_NOOP("Action", "Save filter…"),
        "find",
        "save",
        enabled="is_filtered",
        icon="bookmark",
    ),
    Action(
        "finding.help",
        QT_TRANSLATE_NOOP("Action", "Filter syntax"),
        "find",
        "explain",
        icon="help",
    ),
)


class SaveDialog(QDialog):
    """Dialog for saving a filter: asks for its name and whether it is for all datasets or one."""

    def __init__(self, query: str, roots: list[Path], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Save filter"))
        self._name = QLineEdit(query)
        self._name.selectAll()
        self._scope = ComboBox()
        self._scope.addItem(self.tr("All datasets"), None)
        for root in roots:
            self._scope.addItem(self.tr("Only %1").replace("%1", unique_name(root, roots)), root)
        shown = QLabel(query)
        shown.setWordWrap(True)
        self._buttons = QDialogButtonBox(_Buttons.Save | _Buttons.Cancel)
        self._buttons.accepted.connect(self.accept)
        self._buttons.rejected.connect(self.reject)
        self._name.textChanged.connect(self._on_name_changed)
        form = QFormLayout(self)
        form.addRow(self.tr("Filter"), shown)
        form.addRow(self.tr("&Name"), self._name)
        form.addRow(self.tr("&For"), self._scope)
        form.addRow(self._buttons)
        self._scope.setAccessibleName(self.tr("For"))
        self._on_name_changed(query)
        self.setMinimumWidth(400)
        # Otherwise the height would fit the query wrapped at the minimum width.
        self.resize(400, form.totalHeightForWidth(400))

    @property
    def name(self) -> str:
        """Return the entered name."""
        return self._name.text().strip()

    @property
    def root(self) -> Path | None:
        """Return the folder of the dataset that the filter is for; None for all datasets."""
        root: Path | None = self._scope.currentData()
        return root

    def _on_name_changed(self, name: str) -> None:
        self._buttons.button(_Buttons.Save).setEnabled(bool(name.strip()))


class HelpDialog(QDialog):
    """Dialog that describes the filter syntax."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Filter syntax"))
        text = QPlainTextEdit(help_text())
        text.setReadOnly(True)
        text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        text.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        text.setAccessibleName(self.windowTitle())
        buttons = QDialogButtonBox(_Buttons.Close)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        layout.addWidget(text)
        layout.addWidget(buttons)
        longest = max(text.toPlainText().splitlines(), key=len)
        self.resize(text.fontMetrics().horizontalAdvance(longest) + 80, 640)


class FilterField(QLineEdit):
    """Filter field with suggestions.

    Enter applies the filter, Down or Ctrl+Space shows suggestions, and Tab accepts one. Escape closes the suggestions
    or, if none are shown, clears the field.
    """

    applied = Signal()
    """Emitted when Enter is pressed or the field is cleared."""
    settled = Signal()
    """Emitted when the suggestions are closed without accepting one; the typed text then counts as final."""
    left = Signal()
    """Emitted when the field loses the focus."""
    saved_requested = Signal()
    """Emitted when the user presses Alt+Down to see the saved filters."""

    def __init__(self, propose: Callable[[str, int], list[Proposal]], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._propose = propose
        self.list = ProposalList(self)
        self.list.accepted.connect(self.accept)
        self.setPlaceholderText(self.tr("Filter, such as tag:cat -tag:dog size:<512"))
        self.setAccessibleName(self.tr("Filter"))
        self.setAccessibleDescription(self.tr("Shows only the images that match this filter"))
        self.textEdited.connect(lambda _: self.propose(typing=True))

    def underline(self, faults: Iterable[QueryProblem]) -> None:
        """Draw a wavy underline below each part of the text that has a problem; remove all earlier underlines.

        QLineEdit has no text formats of its own; only an input method event can set them (QTBUG-46603).
        """
        wave = QTextCharFormat()
        wave.setUnderlineStyle(QTextCharFormat.UnderlineStyle.WaveUnderline)
        wave.setUnderlineColor(colors().bad)
        kind = QInputMethodEvent.AttributeType.TextFormat
        cursor = self.cursorPosition()
        marks = [QInputMethodEvent.Attribute(kind, f.start - cursor, f.end - f.start, wave) for f in faults]
        QApplication.sendEvent(self, QInputMethodEvent("", marks))

    def propose(self, *, typing: bool = False) -> None:
        """Show suggestions for the word at the cursor; with `typing`, show none at the start or after a space."""
        text, cursor = self.text(), self.cursorPosition()
        wanted = not typing or (cursor > 0 and not text[cursor - 1].isspace())
        self.list.show_suggestions(self._propose(text, cursor) if wanted else [])

    def accept(self, proposal: Proposal) -> None:
        """Replace the word at the cursor with a suggestion."""
        text, cursor = proposal.apply_to(self.text())
        self.setText(text)
        self.setCursorPosition(cursor)
        self.list.hide()
        self.textEdited.emit(text)

    def event(self, event: QEvent) -> bool:
        """Accept a suggestion with Tab while any are shown; otherwise let Qt move the focus."""
        if event.type() == QEvent.Type.KeyPress and isinstance(event, QKeyEvent) and self.list.isVisible():
            proposal = self.list.chosen or self.list.proposals.proposals[0]
            if event.key() == Qt.Key.Key_Tab:
                self.accept(proposal)
                return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Handle the keys for the field and its suggestions."""
        key, list_open = event.key(), self.list.isVisible()
        if key == Qt.Key.Key_Down and event.modifiers() & Qt.KeyboardModifier.AltModifier:
            self.saved_requested.emit()
        elif key in (Qt.Key.Key_Down, Qt.Key.Key_Up) and list_open:
            self.list.step(1 if key == Qt.Key.Key_Down else -1)
        elif key == Qt.Key.Key_Down or (
            key == Qt.Key.Key_Space and event.modifiers() & Qt.KeyboardModifier.ControlModifier
        ):
            self.propose()
        elif key in _ENTER and list_open and self.list.chosen:
            self.accept(self.list.chosen)
        elif key in _ENTER:
            self.list.hide()
            self.applied.emit()
        elif key == Qt.Key.Key_Escape and list_open:
            self.list.hide()
            self.settled.emit()
        elif key == Qt.Key.Key_Escape and self.text():
            self.clear()
            self.applied.emit()
        else:
            super().keyPressEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Close the suggestions."""
        super().focusOutEvent(event)
        if self.list.isVisible():
            self.list.hide()
            self.settled.emit()
        self.left.emit()


class FilterBox(QWidget):
    """The filter box; applies the filter while the user types, and at once on Enter."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._filtering = session.filtering
        self._applied_text = self._filtering.text
        completer = QueryCompleter(session.library, session.tags)
        self.field = FilterField(completer.propose)
        self.count = QLabel()
        self.fault = QLabel()
        self.note = QLabel()
        self.saved = QToolButton()
        self._pause = self._timer(_PAUSE_MS, lambda: self._apply(patient=True))
        self._patience = self._timer(_PATIENCE_MS, self._apply)
        self._build()
        self._connect()
        self._commands = commands
        commands.add(ACTIONS, self)
        self._update_count()

    @property
    def is_filtered(self) -> bool:
        """Return whether a filter is applied."""
        return bool(self._filtering.text.strip())

    def write_filter(self) -> None:
        """Focus the filter field."""
        self.field.setFocus()
        self.field.selectAll()

    def clear(self) -> None:
        """Clear the filter and show all images."""
        self.write("")

    def write(self, text: str) -> None:
        """Replace the text with this query and apply it at once."""
        self.field.setText(text)
        self._apply_at_once()

    def save(self) -> None:
        """Ask for a name and save the filter under it."""
        dialog = SaveDialog(self._filtering.text, self._roots(), self)
        if dialog.exec():
            saved = SavedFilter(dialog.name, self._filtering.text, dialog.root)
            self._session.filters.save(saved)

    def explain(self) -> None:
        """Show the filter syntax."""
        HelpDialog(self).exec()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop the timers while hidden."""
        super().hideEvent(event)
        self._pause.stop()
        self._patience.stop()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Set the note's text again when the theme changes, since Qt keeps the old theme's link color."""
        super().changeEvent(event)
        if event.type() in (QEvent.Type.PaletteChange, QEvent.Type.StyleChange) and self.note.text():
            text = self.note.text()
            self.note.clear()
            self.note.setText(text)

    def _build(self) -> None:
        self.field.setClearButtonEnabled(True)
        self.count.setProperty("role", "muted")
        self.count.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Preferred)
        self.fault.setProperty("role", "bad")
        self.fault.setWordWrap(True)
        self.fault.hide()
        self.note.setProperty("role", "muted")
        self.note.setWordWrap(True)
        self.note.setTextFormat(Qt.TextFormat.RichText)
        self.note.setTextInteractionFlags(Qt.TextInteractionFlag.LinksAccessibleByMouse | _BY_KEYS)
        self.note.hide()
        set_icon(self.saved, "bookmark")
        self.saved.setToolTip(self.tr("Saved and recent filters (Alt+Down)"))
        self.saved.setAccessibleName(self.tr("Saved and recent filters"))
        row = QHBoxLayout()
        row.setSpacing(6)
        row.addWidget(self.field, 1)
        row.addWidget(self.saved)
        row.addWidget(self.count)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(8, 6, 8, 6)
        whole.setSpacing(4)
        whole.addLayout(row)
        whole.addWidget(self.fault)
        whole.addWidget(self.note)
        whole.addStretch(1)  # keeps the field in place when messages appear below it
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)

    def _connect(self) -> None:
        self.field.textEdited.connect(lambda _: self._on_text_edited())
        self.field.textChanged.connect(lambda text: None if text else self._on_text_edited())  # the clear button
        self.field.applied.connect(self._apply_at_once)
        self.field.settled.connect(self._on_text_edited)
        self.field.left.connect(self._remember)
        self.field.saved_requested.connect(self.show_saved)
        self.saved.clicked.connect(self.show_saved)
        self.note.linkActivated.connect(self.write)
        until_destroyed(self, self._filtering.changed.connect(lambda _: self._on_filtering_changed()))

    def _timer(self, milliseconds: int, run: Callable[[], None]) -> QTimer:
        timer = QTimer(self)
        timer.setSingleShot(True)
        timer.setInterval(milliseconds)
        timer.timeout.connect(run)
        return timer

    def _on_text_edited(self) -> None:
        self._patience.stop()
        if self.isVisible():
            self._pause.start()

    def _apply(self, *, patient: bool = False) -> None:
        """Apply the filter or show its errors; `patient` delays errors in the word being typed."""
        self._pause.stop()
        self._patience.stop()
        text = self.field.text()
        try:
            if patient and self._is_completed():
                return  # applied on Enter, on accepting a suggestion, or when the suggestions are closed
            if text != self._filtering.text or not patient:
                self._applied_text = text  # set first, so that `_on_filtering_changed` leaves the field as typed
                self._filtering.apply(text)
            faults: tuple[QueryProblem, ...] = ()
        except QueryError as error:
            faults = error.faults
            self._applied_text = self._filtering.text
        unknown = [] if faults else self._unknown()
        doubts: list[QueryProblem | UnknownTag] = [*faults, *unknown]
        if patient and doubts and all(self._is_typed(doubt) for doubt in doubts):
            self._patience.start()
            return
        self._show_errors(faults)
        self._show_unknown_tags(unknown)

    def _apply_at_once(self) -> None:
        self._apply()
        self._remember()

    def _is_typed(self, doubt: QueryProblem | UnknownTag) -> bool:
        return self._is_at_cursor(doubt.start, doubt.end)

    def _is_at_cursor(self, start: int, end: int) -> bool:
        return self.field.hasFocus() and start < self.field.cursorPosition() <= end

    def _is_completed(self) -> bool:
        """Return whether suggestions are shown and the term being typed matches no image yet.

        Applying such a filter would empty the grid between two keystrokes. Raises QueryError if the text is not a valid
        filter.
        """
        if not self.field.list.isVisible():
            return False
        typed = [term for term in parse(self.field.text()).terms() if self._is_at_cursor(*term.span)]
        return any(not self._session.finder.find(Query(term)) for term in typed)

    def _unknown(self) -> list[UnknownTag]:
        """Return the unknown tags in the filter if no image matches it, else an empty list."""
        if self._session.view.ids or self._session.tags.pending:
            return []
        return unknown_tags(self._filtering.query, self._session.tags)

    def _show_unknown_tags(self, unknown: list[UnknownTag]) -> None:
        """Show which tags no image has, with links to similar tags."""
        text, sentences = self.field.text(), []
        for tag, meant, start, end in unknown:
            sentence = self.tr("No image has the tag %1.").replace("%1", escape(tag))
            if meant is not None:
                query = f"{text[:start]}{Term('tag', literal(meant))}{text[end:]}"
                link = f'<a href="{escape(query)}">{escape(meant)}</a>'
                sentence = self.tr("%1 Did you mean %2?").replace("%1", sentence).replace("%2", link)
            sentences.append(sentence)
        self.note.setText("<br>".join(sentences))
        self.note.setVisible(bool(sentences))

    def _show_errors(self, faults: tuple[QueryProblem, ...]) -> None:
        self.field.underline(faults)
        self.fault.setText("\n".join(map(full_message, faults)))
        self.fault.setVisible(bool(faults))
        self.field.setAccessibleDescription(
            self.fault.text() or self.tr("Shows only the images that match this filter")
        )

    def _on_filtering_changed(self) -> None:
        """Show a filter that was set elsewhere, without overwriting what the user is typing."""
        if self._filtering.text != self._applied_text:
            self._applied_text = self._filtering.text
            self.field.setText(self._applied_text)
            self._pause.stop()
            self._show_errors(())
            self._show_unknown_tags(self._unknown())
        elif self._session.view.ids:
            self._show_unknown_tags([])
        self._update_count()
        self._commands.refresh()

    def _update_count(self) -> None:
        number = QLocale().toString
        found, total = len(self._session.view.ids), self._filtering.total
        text = self.tr("%1 of %2").replace("%1", number(found)).replace("%2", number(total))
        if not self.is_filtered:
            text = self.tr("%n image(s)", "", total)
        if self._filtering.pending:
            counting = self.tr("still counting %1").replace("%1", number(self._filtering.pending))
            text = f"{text}, {counting}"
        self.count.setText(text)

    def show_saved(self) -> None:
        """Open the menu of saved and recent filters."""
        self._make_menu().exec(self.saved.mapToGlobal(QPoint(0, self.saved.height())))

    def _make_menu(self) -> QMenu:
        self._commands.refresh_now()
        menu = QMenu(self)
        menu.addAction(self._commands["finding.save"])
        filters = self._session.filters.of(*self._roots())
        delete = QMenu(self.tr("Delete saved filter"), menu)
        if filters:
            _add_heading(menu, self.tr("Saved"))
        for saved in filters:
            menu.addAction(_menu_text(saved.name), partial(self.write, saved.query)).setToolTip(saved.query)
            delete.addAction(_menu_text(saved.name), partial(self._delete, saved))
        recent = self._session.filters.recent[:_RECENT]
        if recent:
            _add_heading(menu, self.tr("Recent"))
        for query in recent:
            menu.addAction(_menu_text(query), partial(self.write, query))
        menu.addSeparator()
        if filters:
            menu.addMenu(delete)
        menu.addAction(self._commands["finding.help"])
        return menu

    def _delete(self, saved: SavedFilter) -> None:
        self._session.filters.remove(saved)

    def _roots(self) -> list[Path]:
        """Return the folders of the datasets that the loaded images belong to, without duplicates."""
        return list(dict.fromkeys(image.folder.root for image in self._session.library.images.values()))

    def _remember(self) -> None:
        """Add the applied filter to the recent filters if the field still shows it."""
        if self.field.text() == self._filtering.text:
            self._session.filters.remember(self._filtering.text)


def _menu_text(text: str) -> str:
    """Return the text with & escaped for a menu."""
    return text.replace("&", "&&")


def _add_heading(menu: QMenu, text: str) -> None:
    """Add a heading to a menu; the Fusion style does not show the text of Qt's own sections."""
    menu.addSeparator()
    menu.addAction(text).setEnabled(False)
