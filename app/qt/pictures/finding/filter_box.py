"""The filter above the pictures: its text, what is wrong with it, how many it finds, and the filters kept."""

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

from app.core.disk.roots import told_apart
from app.core.query.completion import Proposal, QueryCompleter, UnknownTag, unknown_tags
from app.core.query.filtering import SavedFilter
from app.core.query.language import QueryError, QueryProblem, help_text, parse
from app.core.query.terms import Query, Term, literal
from app.core.session import Session
from app.core.words import in_words
from app.qt.actions.commands import Action, Commands
from app.qt.pictures.finding.proposals import ProposalList
from app.qt.theme import colours, set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, until_destroyed

_Buttons = QDialogButtonBox.StandardButton
_ENTER = (Qt.Key.Key_Return, Qt.Key.Key_Enter)
# How long somebody who types pauses before the filter is asked, and before what he is just typing is found wrong.
_PAUSE_MS = 180
_PATIENCE_MS = 900
_RECENT = 10
_BY_KEYS = Qt.TextInteractionFlag.LinksAccessibleByKeyboard
ACTIONS = (
    Action(
        "finding.filter",
        QT_TRANSLATE_NOOP("Action", "Filter pictures"),
        "find",
        "write_filter",
        keys=("Ctrl+F",),
        icon="filter",
    ),
    Action(
        "finding.clear",
        QT_TRANSLATE_NOOP("Action", "Show All Pictures"),
        "find",
        "clear",
        keys=("Ctrl+Shift+A",),
        enabled="is_filtered",
        icon="close",
    ),
    Action(
        "finding.save",
        QT_TRANSLATE_NOOP("Action", "Save Filter…"),
        "find",
        "save",
        enabled="is_filtered",
        icon="bookmark",
    ),
    Action(
        "finding.help",
        QT_TRANSLATE_NOOP("Action", "How Filters Are Written"),
        "find",
        "explain",
        icon="help",
    ),
)


class SaveDialog(QDialog):
    """Asks for a filter's name, and whether it is for all datasets or for one of those that are open."""

    def __init__(self, query: str, roots: list[Path], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Save filter"))
        self._name = QLineEdit(query)
        self._name.selectAll()
        self._scope = ComboBox()
        self._scope.addItem(self.tr("All datasets"), None)
        for root in roots:
            self._scope.addItem(self.tr("Only %1").replace("%1", told_apart(root, roots)), root)
        shown = QLabel(query)
        shown.setWordWrap(True)
        self._buttons = QDialogButtonBox(_Buttons.Save | _Buttons.Cancel)
        self._buttons.accepted.connect(self.accept)
        self._buttons.rejected.connect(self.reject)
        self._name.textChanged.connect(self._check)
        form = QFormLayout(self)
        form.addRow(self.tr("Filter"), shown)
        form.addRow(self.tr("&Name"), self._name)
        form.addRow(self.tr("&For"), self._scope)
        form.addRow(self._buttons)
        self._scope.setAccessibleName(self.tr("For"))
        self._check(query)
        self.setMinimumWidth(400)
        self.resize(400, form.totalHeightForWidth(400))  # else room for a query that breaks in the narrowest dialog

    @property
    def name(self) -> str:
        """The name given."""
        return self._name.text().strip()

    @property
    def root(self) -> Path | None:
        """The dataset that the filter is for, None for all."""
        root: Path | None = self._scope.currentData()
        return root

    def _check(self, name: str) -> None:
        self._buttons.button(_Buttons.Save).setEnabled(bool(name.strip()))


class HelpDialog(QDialog):
    """Shows the description of the language, as the parser keeps it."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("How filters are written"))
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
    """Enter asks, Down and Ctrl+Space propose, Tab takes a proposal, Escape closes the list and then clears."""

    asked = Signal()
    """Enter was pressed, or the field was cleared."""
    settled = Signal()
    """The proposals were closed and none was taken: what is typed is meant as it stands."""
    left = Signal()
    """The keyboard went elsewhere."""
    listed = Signal()
    """Alt+Down: the kept filters are wanted."""

    def __init__(self, propose: Callable[[str, int], list[Proposal]], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._propose = propose
        self.list = ProposalList(self)
        self.list.taken.connect(self.take)
        self.setPlaceholderText(self.tr("Filter, such as tag:cat -tag:dog size:<512"))
        self.setAccessibleName(self.tr("Filter"))
        self.setAccessibleDescription(self.tr("Shows only the pictures that this query finds"))
        self.textEdited.connect(lambda _: self.propose(typing=True))

    def underline(self, faults: Iterable[QueryProblem]) -> None:
        """Draw a wave below these parts of the text, and below no other.

        Formats are no part of a line edit; an input method may give some, so we speak as one (QTBUG-46603).
        """
        wave = QTextCharFormat()
        wave.setUnderlineStyle(QTextCharFormat.UnderlineStyle.WaveUnderline)
        wave.setUnderlineColor(colours().bad)
        kind = QInputMethodEvent.AttributeType.TextFormat
        cursor = self.cursorPosition()
        marks = [QInputMethodEvent.Attribute(kind, f.start - cursor, f.end - f.start, wave) for f in faults]
        QApplication.sendEvent(self, QInputMethodEvent("", marks))

    def propose(self, *, typing: bool = False) -> None:
        """Let the proposals for the word at the cursor drop down; while typing only where something is typed."""
        text, cursor = self.text(), self.cursorPosition()
        wanted = not typing or (cursor > 0 and not text[cursor - 1].isspace())
        self.list.propose(self._propose(text, cursor) if wanted else [])

    def take(self, proposal: Proposal) -> None:
        """Write a proposal in place of the word it is for."""
        text, cursor = proposal.put_into(self.text())
        self.setText(text)
        self.setCursorPosition(cursor)
        self.list.hide()
        self.textEdited.emit(text)

    def event(self, event: QEvent) -> bool:
        """Take Tab for the list while it is there; Qt would move the keyboard on."""
        if event.type() == QEvent.Type.KeyPress and isinstance(event, QKeyEvent) and self.list.isVisible():
            proposal = self.list.chosen or self.list.proposals.proposals[0]
            if event.key() == Qt.Key.Key_Tab:
                self.take(proposal)
                return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """See the class."""
        key, dropped = event.key(), self.list.isVisible()
        if key == Qt.Key.Key_Down and event.modifiers() & Qt.KeyboardModifier.AltModifier:
            self.listed.emit()
        elif key in (Qt.Key.Key_Down, Qt.Key.Key_Up) and dropped:
            self.list.step(1 if key == Qt.Key.Key_Down else -1)
        elif key == Qt.Key.Key_Down or (
            key == Qt.Key.Key_Space and event.modifiers() & Qt.KeyboardModifier.ControlModifier
        ):
            self.propose()
        elif key in _ENTER and dropped and self.list.chosen:
            self.take(self.list.chosen)
        elif key in _ENTER:
            self.list.hide()
            self.asked.emit()
        elif key == Qt.Key.Key_Escape and dropped:
            self.list.hide()
            self.settled.emit()
        elif key == Qt.Key.Key_Escape and self.text():
            self.clear()
            self.asked.emit()
        else:
            super().keyPressEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """Close the list with it."""
        super().focusOutEvent(event)
        if self.list.isVisible():
            self.list.hide()
            self.settled.emit()
        self.left.emit()


class FilterBox(QWidget):
    """The filter box; asks while one types, and at once on Enter."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._filtering = session.filtering
        self._written = self._filtering.text
        completer = QueryCompleter(session.library, session.tags)
        self.field = FilterField(completer.propose)
        self.count = QLabel()
        self.fault = QLabel()
        self.note = QLabel()
        self.kept = QToolButton()
        self._pause = self._timer(_PAUSE_MS, lambda: self._ask(patient=True))
        self._patience = self._timer(_PATIENCE_MS, self._ask)
        self._build()
        self._connect()
        self._commands = commands
        commands.add(ACTIONS, self)
        self._tell_count()

    @property
    def is_filtered(self) -> bool:
        """Whether something is asked for."""
        return bool(self._filtering.text.strip())

    def write_filter(self) -> None:
        """Give the keyboard to the filter."""
        self.field.setFocus()
        self.field.selectAll()

    def clear(self) -> None:
        """Show all pictures."""
        self.write("")

    def write(self, text: str) -> None:
        """Put a query into the box and ask it at once."""
        self.field.setText(text)
        self._ask_at_once()

    def save(self) -> None:
        """Ask for a name and keep the filter under it."""
        dialog = SaveDialog(self._filtering.text, self._roots(), self)
        if dialog.exec():
            saved = SavedFilter(dialog.name, self._filtering.text, dialog.root)
            self._session.filters.save(saved)

    def explain(self) -> None:
        """Show how filters are written."""
        HelpDialog(self).exec()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Ask nothing more that nobody sees."""
        super().hideEvent(event)
        self._pause.stop()
        self._patience.stop()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Give the link of the note the colour of now: Qt keeps the one that it was written in."""
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
        set_icon(self.kept, "bookmark")
        self.kept.setToolTip(self.tr("Kept and recent filters (Alt+Down)"))
        self.kept.setAccessibleName(self.tr("Kept and recent filters"))
        row = QHBoxLayout()
        row.setSpacing(6)
        row.addWidget(self.field, 1)
        row.addWidget(self.kept)
        row.addWidget(self.count)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(8, 6, 8, 6)
        whole.setSpacing(4)
        whole.addLayout(row)
        whole.addWidget(self.fault)
        whole.addWidget(self.note)
        whole.addStretch(1)  # the field stays where it is while reasons come and go below it
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)

    def _connect(self) -> None:
        self.field.textEdited.connect(lambda _: self._edited())
        self.field.textChanged.connect(lambda text: None if text else self._edited())  # the clear button
        self.field.asked.connect(self._ask_at_once)
        self.field.settled.connect(self._edited)
        self.field.left.connect(self._remember)
        self.field.listed.connect(self.show_kept)
        self.kept.clicked.connect(self.show_kept)
        self.note.linkActivated.connect(self.write)
        until_destroyed(self, self._filtering.changed.connect(lambda _: self._follow()))

    def _timer(self, milliseconds: int, run: Callable[[], None]) -> QTimer:
        timer = QTimer(self)
        timer.setSingleShot(True)
        timer.setInterval(milliseconds)
        timer.timeout.connect(run)
        return timer

    def _edited(self) -> None:
        self._patience.stop()
        if self.isVisible():
            self._pause.start()

    def _ask(self, *, patient: bool = False) -> None:
        """Apply what is written, or say what is wrong with it; patient with a word that is still being typed."""
        self._pause.stop()
        self._patience.stop()
        text = self.field.text()
        try:
            if patient and self._is_completed():
                return  # to be asked by Enter, by a proposal, or when the proposals are closed
            if text != self._filtering.text or not patient:
                self._written = text
                self._filtering.apply(text)
            faults: tuple[QueryProblem, ...] = ()
        except QueryError as error:
            faults = error.faults
            self._written = self._filtering.text
        unknown = [] if faults else self._unknown()
        doubts: list[QueryProblem | UnknownTag] = [*faults, *unknown]
        if patient and doubts and all(self._is_typed(doubt) for doubt in doubts):
            self._patience.start()
            return
        self._tell_faults(faults)
        self._tell_unknown(unknown)

    def _ask_at_once(self) -> None:
        self._ask()
        self._remember()

    def _is_typed(self, doubt: QueryProblem | UnknownTag) -> bool:
        return self._is_at_cursor(doubt.start, doubt.end)

    def _is_at_cursor(self, start: int, end: int) -> bool:
        return self.field.hasFocus() and start < self.field.cursorPosition() <= end

    def _is_completed(self) -> bool:
        """Tell whether what is typed finds nothing so far, while proposals say what it may become; or QueryError.

        To ask for it would empty the grid between two letters.
        """
        if not self.field.list.isVisible():
            return False
        typed = [term for term in parse(self.field.text()).terms() if self._is_at_cursor(*term.span)]
        return any(not self._session.finder.find(Query(term)) for term in typed)

    def _unknown(self) -> list[UnknownTag]:
        """Return the tags asked for that explain why nothing is found."""
        if self._session.view.ids or self._session.tags.pending:
            return []
        return unknown_tags(self._filtering.query, self._session.tags)

    def _tell_unknown(self, unknown: list[UnknownTag]) -> None:
        """Say which tags no picture has; a click on the one that may have been meant asks for it instead."""
        text, sentences = self.field.text(), []
        for tag, meant, start, end in unknown:
            sentence = self.tr("No picture has the tag %1.").replace("%1", escape(tag))
            if meant is not None:
                query = f"{text[:start]}{Term('tag', literal(meant))}{text[end:]}"
                link = f'<a href="{escape(query)}">{escape(meant)}</a>'
                sentence = self.tr("%1 Did you mean %2?").replace("%1", sentence).replace("%2", link)
            sentences.append(sentence)
        self.note.setText("<br>".join(sentences))
        self.note.setVisible(bool(sentences))

    def _tell_faults(self, faults: tuple[QueryProblem, ...]) -> None:
        self.field.underline(faults)
        self.fault.setText("\n".join(map(in_words, faults)))
        self.fault.setVisible(bool(faults))
        self.field.setAccessibleDescription(
            self.fault.text() or self.tr("Shows only the pictures that this query finds")
        )

    def _follow(self) -> None:
        """Show the filter in force, should another than this box have changed it; it never undoes what one types."""
        if self._filtering.text != self._written:
            self._written = self._filtering.text
            self.field.setText(self._written)
            self._pause.stop()
            self._tell_faults(())
            self._tell_unknown(self._unknown())
        elif self._session.view.ids:
            self._tell_unknown([])
        self._tell_count()
        self._commands.refresh()

    def _tell_count(self) -> None:
        number = QLocale().toString
        found, total = len(self._session.view.ids), self._filtering.total
        text = self.tr("%1 of %2").replace("%1", number(found)).replace("%2", number(total))
        if not self.is_filtered:
            text = self.tr("%n picture(s)", "", total)
        if self._filtering.pending:
            counting = self.tr("still counting %1").replace("%1", number(self._filtering.pending))
            text = f"{text}, {counting}"
        self.count.setText(text)

    def show_kept(self) -> None:
        """Let the kept filters and the last queries drop down."""
        self._menu().exec(self.kept.mapToGlobal(QPoint(0, self.kept.height())))

    def _menu(self) -> QMenu:
        self._commands.refresh_now()
        menu = QMenu(self)
        menu.addAction(self._commands["finding.save"])
        filters = self._session.filters.of(*self._roots())
        forget = QMenu(self.tr("Forget"), menu)
        if filters:
            _head(menu, self.tr("Kept"))
        for one in filters:
            menu.addAction(_shown(one.name), partial(self.write, one.query)).setToolTip(one.query)
            forget.addAction(_shown(one.name), partial(self._forget, one))
        recent = self._session.filters.recent[:_RECENT]
        if recent:
            _head(menu, self.tr("Recent"))
        for query in recent:
            menu.addAction(_shown(query), partial(self.write, query))
        menu.addSeparator()
        if filters:
            menu.addMenu(forget)
        menu.addAction(self._commands["finding.help"])
        return menu

    def _forget(self, saved: SavedFilter) -> None:
        self._session.filters.remove(saved)

    def _roots(self) -> list[Path]:
        """Return the folders of the open datasets, in their order."""
        return list(dict.fromkeys(picture.folder.root for picture in self._session.library.pictures.values()))

    def _remember(self) -> None:
        """Enter the query in force among the recent ones, if it is what is written."""
        if self.field.text() == self._filtering.text:
            self._session.filters.remember(self._filtering.text)


def _shown(text: str) -> str:
    """Return a text for a menu, in which & means something."""
    return text.replace("&", "&&")


def _head(menu: QMenu, text: str) -> None:
    """Put a heading into a menu; Qt's own sections have none in our style."""
    menu.addSeparator()
    menu.addAction(text).setEnabled(False)
