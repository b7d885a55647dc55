"""Dialogs for restoring original captions, resolving conflicts, and showing recovered edits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QCoreApplication, QItemSelection, QSize, QTimer, Signal
from PySide6.QtGui import QColor, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import (
    QAbstractItemView,
    QCheckBox,
    QDialog,
    QDialogButtonBox,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QListWidget,
    QListWidgetItem,
    QPlainTextEdit,
    QPushButton,
    QTextEdit,
    QVBoxLayout,
    QWidget,
)

from app.core.edits.backups import Backups, Written
from app.core.edits.bulk import SnapshotCaption, Span, add_tags, differences
from app.core.edits.safe_files import refusal
from app.core.edits.save_state import AnyField, Conflict, SaveRequest, SaveState
from app.core.library import Value
from app.core.session import Session
from app.core.tags.splitting import split_tags
from app.core.tasks import handle_only
from app.core.words import full_message
from app.qt.images.captions.preview import ChangeList, ChangeRow
from app.qt.images.captions.text import to_qt_position
from app.qt.theme import colors
from app.qt.widgets import ComboBox, while_alive
from trainer.dataset.caption_files import SUFFIXES
from trainer.errors import DatasetError
from trainer.protocol.reading import read_bytes


class RestoreDialog(QDialog):
    """Dialog that lists a dataset's changed caption files and restores some or all of the originals."""

    message_shown = Signal(str)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.setWindowTitle(self.tr("Restore original captions"))
        self.resize(820, 520)
        self.datasets, self.intro, self.fault = ComboBox(), QLabel(), QLabel()
        self.preview = ChangeList()
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        role = QDialogButtonBox.ButtonRole.ActionRole
        self.chosen = self.buttons.addButton("", role)
        self.all = self.buttons.addButton("", role)
        self._build()
        self.datasets.currentIndexChanged.connect(lambda _: self._on_dataset_changed())
        self.preview.selectionModel().selectionChanged.connect(self._on_selection_changed)
        self.chosen.clicked.connect(lambda: self._restore(self._selected()))
        self.all.clicked.connect(lambda: self._restore(self.preview.list.changes))
        self.buttons.rejected.connect(self.reject)
        self._compare()

    def _build(self) -> None:
        for folder in self._session.datasets.folders:
            self.datasets.addItem(folder.name, str(folder))
        self.datasets.setAccessibleName(self.tr("Dataset"))
        self.intro.setWordWrap(True)
        self.fault.setWordWrap(True)
        self.fault.setProperty("role", "bad")
        self.fault.hide()
        self.preview.setAccessibleName(self.tr("Changed captions"))
        self.preview.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        row = QHBoxLayout()
        row.addWidget(QLabel(self.tr("Dataset")))
        row.addWidget(self.datasets)
        row.addStretch(1)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addLayout(row)
        for widget in (self.intro, self.fault):
            column.addWidget(widget)
        column.addWidget(self.preview, 1)
        column.addWidget(self.buttons)

    @property
    def root(self) -> str:
        """Return the selected dataset's folder."""
        return str(self.datasets.currentData() or "")

    def _on_dataset_changed(self) -> None:
        """Hide the previous dataset's error and compare the selected dataset with its originals."""
        self.fault.hide()
        self._compare()

    def _compare(self) -> None:
        """On a worker, write pending edits, then compare the dataset's files with their originals."""
        self._show([])
        self.intro.setText(self.tr("Comparing…"))
        if not self.root:
            self._on_compared([])
            return
        saver, backups, root = self._session.saver, self._session.backups, self.root

        def compare() -> list[tuple[str, ChangeRow]]:
            saver.flush()
            return _changed(backups, root)

        def done(rows: Sequence[tuple[str, ChangeRow]]) -> None:
            if root == self.root:  # the user may have selected another dataset
                self._on_compared(rows)

        def failed(fault: OSError) -> None:
            if root == self.root:
                self.intro.setText("")
                self._show_error(fault, self.tr("Fix the problem, then open this window again."))

        self._session.tasks.run(compare, while_alive(self, done), handle_only(OSError, while_alive(self, failed)))

    def _on_compared(self, rows: Sequence[tuple[str, ChangeRow]]) -> None:
        words = self.tr("%n caption file(s) changed since the first edit in Impasto.", "", len(rows))
        words += " " + self.tr("Each row shows the current caption above the original.")
        words += " " + self.tr("The current version is kept as a backup.")
        self.intro.setText(words if rows else self.tr("All captions are the same as before the first edit in Impasto."))
        self._show(rows)

    def _show(self, rows: Sequence[tuple[str, ChangeRow]]) -> None:
        self.preview.list.show(rows, lambda pair: pair[1])
        self._on_selection_changed(QItemSelection(), QItemSelection())

    def _on_selection_changed(self, _: QItemSelection, __: QItemSelection) -> None:
        count, chosen = len(self.preview.list.changes), len(self._selected())
        self.all.setText(self.tr("Restore all %n", "", count) if count else self.tr("Restore all"))
        self.all.setEnabled(bool(count))
        self.chosen.setText(self.tr("Restore %n selected", "", chosen) if chosen else self.tr("Restore selected"))
        self.chosen.setEnabled(bool(chosen))

    def _selected(self) -> list[tuple[str, ChangeRow]]:
        rows = self.preview.selectionModel().selectedRows()
        return [self.preview.list.changes[index.row()] for index in rows]

    def _restore(self, rows: Sequence[tuple[str, ChangeRow]]) -> None:
        files = [file for file, _ in rows]
        self._show([])  # nothing can be restored twice
        self.datasets.setEnabled(False)
        self.intro.setText(self.tr("Restoring…"))
        saver, backups, root = self._session.saver, self._session.backups, self.root

        def restore() -> Sequence[Written]:
            saver.flush()
            return backups.restore(root, files)

        def done(written: Sequence[Written]) -> None:
            self._session.rewriter.record(_restored_name(len(written)), Path(root), written)
            self._session.datasets.refresh(whole=True)
            report(len(written))

        report, failed = (
            while_alive(self, self._on_restored),
            handle_only(OSError, while_alive(self, self._on_restore_failed)),
        )
        self._session.history.settle(lambda: self._session.tasks.run(restore, done, failed))

    def _on_restored(self, count: int) -> None:
        self.datasets.setEnabled(True)
        self.message_shown.emit(self.tr("Restored %n caption file(s).", "", count))
        self._on_dataset_changed()

    def _on_restore_failed(self, fault: OSError) -> None:
        """Show the error and the files that still need to be restored."""
        self.datasets.setEnabled(True)
        self._show_error(fault, self.tr("These files still need to be restored. Fix the problem, then try again."))
        self._compare()

    def _show_error(self, fault: OSError, remedy: str) -> None:
        """Show an error with this remedy.

        The remedy given by `refusal` says that Impasto will try again to save, but nothing tries again to restore.
        """
        reason = refusal(fault, Path(self.root))
        self.fault.setText(full_message(DatasetError(reason.code, reason.sentence, remedy)))
        self.fault.show()


def _restored_name(count: int) -> str:
    return "Restore 1 original caption" if count == 1 else f"Restore {count} original captions"


def _changed(backups: Backups, root: str) -> list[tuple[str, ChangeRow]]:
    """Return the caption files in a dataset that differ from their originals, each with both texts in a row.

    Raises OSError if a file cannot be read.
    """
    found = []
    for version in backups.originals(root):
        file = Path(root, version.file)
        if file.suffix.lower() in SUFFIXES and (now := _read(file)) != version.data:
            found.append((version.file, ChangeRow(version.file, _text(now), _text(version.data) or "")))
    return found


def _read(file: Path) -> bytes | None:
    try:
        return read_bytes(file, "image")  # masks too
    except FileNotFoundError:
        return None


def _text(data: bytes | None) -> str | None:
    from trainer.dataset.caption_files import NotACaptionError, decode_caption

    if data is None:
        return None
    try:
        return decode_caption(data).text
    except NotACaptionError:
        return data[:200].decode("utf-8", "replace")


def value_text(field: AnyField, value: Value) -> str | None:
    """Return a field's value as text; None if there is no value."""
    if value is None or isinstance(value, str):
        return value
    if field == "rating":
        return _tr("rated {value} of 5").format(value=value)
    if field == "excluded":
        return _tr("excluded") if value else _tr("included")
    if isinstance(value, tuple):
        left, top, right, bottom = (round(100 * edge) for edge in value)
        return _tr("cropped to {left}-{right}% by {top}-{bottom}%").format(
            left=left, top=top, right=right, bottom=bottom
        )
    if field == "regularization":
        return _tr("for regularization") if value else _tr("for training")
    return str(value)


def _tr(text: str) -> str:
    return QCoreApplication.translate("ValueWords", text)


Keep = Literal["mine", "theirs", "both"]


class ConflictsDialog(QDialog):
    """Dialog that shows the two versions in a conflict side by side; closes when all are resolved."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._conflicts: tuple[Conflict, ...] = ()
        self.setWindowTitle(self.tr("Resolve conflicts"))
        self.resize(860, 460)
        self.list = QListWidget()
        self.mine, self.theirs = QPlainTextEdit(), QPlainTextEdit()
        self.keep_mine = QPushButton(self.tr("Keep mine"))
        self.keep_theirs = QPushButton(self.tr("Keep theirs"))
        self.keep_both = QPushButton(self.tr("Keep both"))
        self.all, self.close_button = QCheckBox(), QPushButton(self.tr("Decide later"))
        self._build()
        self.list.currentRowChanged.connect(self._on_row_changed)
        for button, keep in ((self.keep_mine, "mine"), (self.keep_theirs, "theirs"), (self.keep_both, "both")):
            button.clicked.connect(lambda _, keep=keep: self._keep(keep))
        self.close_button.clicked.connect(self.reject)
        end = session.saver.state.connect(self._on_save_state)
        self.finished.connect(lambda _: end())
        self._on_save_state(session.saver.now)
        if not self._conflicts:  # the last conflict resolved itself before the dialog was opened
            QTimer.singleShot(0, self, self.accept)

    def _build(self) -> None:
        words = self.tr("You and another program changed the same values. Nothing was overwritten.")
        intro = QLabel(words + " " + self.tr("Whatever you choose, the version on disk is kept as a backup."))
        intro.setWordWrap(True)
        self.list.setAccessibleName(self.tr("Conflicts"))
        self.list.setFixedWidth(220)
        grid = QGridLayout()
        sides = ((self.mine, self.tr("Yours")), (self.theirs, self.tr("On disk (other program)")))
        for column, (text, title) in enumerate(sides):
            heading = QLabel(title)
            heading.setProperty("role", "heading")
            text.setReadOnly(True)
            text.setTabChangesFocus(True)
            text.setAccessibleName(title)
            grid.addWidget(heading, 0, column)
            grid.addWidget(text, 1, column)
        self.keep_both.setToolTip(self.tr("Theirs, plus your missing tags"))
        row = QHBoxLayout()
        row.addWidget(self.list)
        row.addLayout(grid, 1)
        buttons = QHBoxLayout()
        buttons.addWidget(self.all)
        buttons.addStretch(1)
        for button in (self.keep_mine, self.keep_theirs, self.keep_both, self.close_button):
            button.setAutoDefault(False)
            buttons.addWidget(button)
        column_ = QVBoxLayout(self)
        column_.setContentsMargins(14, 14, 14, 12)
        column_.setSpacing(12)
        column_.addWidget(intro)
        column_.addLayout(row, 1)
        column_.addLayout(buttons)

    def _on_save_state(self, state: SaveState) -> None:
        if state.conflicts == self._conflicts:
            return
        row = max(0, self.list.currentRow())
        self._conflicts = state.conflicts
        if not state.conflicts:
            self.accept()
            return
        self.list.clear()
        for conflict in state.conflicts:
            item = QListWidgetItem(conflict.path.name, self.list)
            item.setToolTip(str(conflict.path))
            item.setSizeHint(QSize(0, self.fontMetrics().height() + 14))
        self.all.setText(self.tr("Apply to all %n conflicts", "", len(state.conflicts)))
        self.all.setVisible(len(state.conflicts) > 1)
        self.list.setCurrentRow(min(row, len(state.conflicts) - 1))

    def _on_row_changed(self, row: int) -> None:
        if not 0 <= row < len(self._conflicts):
            return
        conflict = self._conflicts[row]
        mine, theirs = (value_text(conflict.field, value) for value in (conflict.mine, conflict.theirs))
        found = differences(mine or "", theirs or "")
        self._fill(self.mine, mine, found.gone)
        self._fill(self.theirs, theirs, found.new)
        self.keep_both.setEnabled(self._can_merge(conflict))

    def _fill(self, field: QPlainTextEdit, text: str | None, marked: Sequence[Span]) -> None:
        field.setPlainText(text or "")
        field.setPlaceholderText(self.tr("No value") if text is None else self.tr("Empty"))
        look = QTextCharFormat()
        look.setForeground(QColor(colors().good))
        look.setFontUnderline(True)
        selections = []
        for span in marked:
            selection = QTextEdit.ExtraSelection()
            cursor = QTextCursor(field.document())
            cursor.setPosition(to_qt_position(text or "", span.start))
            cursor.setPosition(to_qt_position(text or "", span.end), QTextCursor.MoveMode.KeepAnchor)
            selection.cursor, selection.format = cursor, look
            selections.append(selection)
        field.setExtraSelections(selections)

    def _can_merge(self, conflict: Conflict) -> bool:
        return conflict.field == "caption" and self._session.library.at(conflict.path) is not None

    def _keep(self, keep: Keep) -> None:
        row = self.list.currentRow()
        chosen = self._conflicts if self.all.isChecked() else self._conflicts[row : row + 1]
        choices = [(one, _value(one, keep)) for one in chosen if keep != "both" or self._can_merge(one)]
        if choices:
            self._session.history.resolve(choices, _resolved_name(choices, keep))


def _resolved_name(choices: Sequence[tuple[Conflict, Value]], keep: Keep) -> str:
    kind = "caption" if all(conflict.field == "caption" for conflict, _ in choices) else "value"
    count = f"{len(choices):,} {kind}" + "s" * (len(choices) != 1)
    version = {"mine": "my version", "theirs": "the other version", "both": "both versions"}[keep]
    return f"Keep {version} of {count}"


def _value(conflict: Conflict, keep: Keep) -> Value:
    if keep == "both":
        return _merged(conflict)
    return conflict.mine if keep == "mine" else conflict.theirs


def _merged(conflict: Conflict) -> str:
    """Return the other program's version plus the user's tags that are missing from it."""
    theirs = SnapshotCaption(0, str(conflict.theirs or ""))
    edit = add_tags([theirs], split_tags(str(conflict.mine or "")))
    return str(edit.changes[0].after) if edit else theirs.caption or ""


class RecoveredDialog(QDialog):
    """Dialog that lists recovered edits with the old and the new value."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Recovered changes"))
        self.resize(760, 460)
        requests = session.saver.recovered
        words = self.tr(
            "Impasto stopped before it could save %n change(s). Files that have not changed since are saved now.",
            "",
            len(requests),
        )
        intro = QLabel(words + " " + self.tr("If another program changed a file, choose which version to keep."))
        intro.setWordWrap(True)
        self.preview = ChangeList()
        self.preview.setAccessibleName(self.tr("Recovered changes"))
        self.preview.list.show(requests, _row)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addWidget(intro)
        column.addWidget(self.preview, 1)
        column.addWidget(buttons)


def _row(request: SaveRequest) -> ChangeRow:
    before, after = (value_text(request.key.field, value) for value in (request.bases[0], request.desired))
    return ChangeRow(request.key.path.name, before, after or "")
