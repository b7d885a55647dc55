"""Parts of the caption editor: the panel of save problems, the images to edit, and the status messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.edits.save_state import SaveNotice, SaveProblem, SaveState
from app.core.library import LibraryChange, LibraryImage
from app.core.session import Session
from app.core.tags.index import Summary
from app.core.tags.splitting import Lines
from app.core.words import full_message
from app.qt.images.captions.text import CHUNK, TokenCount
from app.qt.widgets import plain_tip, until_destroyed


class SaveStatusPanel(QFrame):
    """Panel with save problems and conflicts; hidden while there are none.

    `notified` carries a notice to show above the page: a sentence, and (button title, action) or None. `outdated`
    carries the sentence of a notice that is no longer true.
    """

    notified = Signal(str, object)
    outdated = Signal(str)
    retry_requested = Signal()
    choose_requested = Signal()
    recovered_requested = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("notice")
        self.setAccessibleName(self.tr("Unsaved changes"))
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(10, 8, 10, 8)
        self._library = session.library
        self._shown: list[_Row] = []
        self._rows: list[QWidget] = []
        self._open_notices: list[str] = []
        self.hide()
        until_destroyed(
            self, session.saver.state.connect(self._on_save_state), session.saver.notices.connect(self._on_notice)
        )
        self._on_save_state(session.saver.now)

    def _on_save_state(self, state: SaveState) -> None:
        if not state.conflicts and not state.problems:
            while self._open_notices:
                self.outdated.emit(self._open_notices.pop())
        rows = [
            _Row(self._with_short_paths(one), one.sentence, one.remedy, self.tr("Try again"), self.retry_requested.emit)
            for one in state.problems
        ]
        if state.conflicts:
            words = self.tr("Another program changed %n value(s) that you changed too.", "", len(state.conflicts))
            remedy = self.tr("Nothing was overwritten.")
            rows.append(_Row(words, words, remedy, self.tr("Choose…"), self.choose_requested.emit))
        if [row.words for row in rows] == [row.words for row in self._shown]:
            return
        self._shown = rows
        while self._rows:
            former = self._rows.pop()
            former.hide()
            former.deleteLater()
        for row in rows:
            self._rows.append(_row_widget(row))
            self._column.addWidget(self._rows[-1])
        self.setVisible(bool(rows))

    def _with_short_paths(self, problem: SaveProblem) -> str:
        """Return the message with file names instead of full paths, since the column is narrow."""
        words = problem.sentence
        for number in problem.images & self._library.images.keys():
            image = self._library.images[number]
            for path in (image.path, image.folder.path, image.folder.root):
                words = words.replace(str(path), path.name)
        return words

    def _on_notice(self, notice: SaveNotice) -> None:
        folder = Path(notice.root).name
        act: tuple[str, Callable[[], None]] | None
        if notice.code in ("notice.recovered", "notice.left"):
            words, act = self._leftover_message(notice)
        elif notice.code == "notice.converted":
            words = self.tr("Converted %n caption(s) in {folder} from another encoding to UTF-8.", "", notice.count)
            words += " " + self.tr("The originals are backed up.")
            act = None
        elif notice.code == "notice.backups_damaged":
            words = self.tr("The backup file of {folder} is damaged; it was kept as {file}.")
            words += " " + self.tr("New backups go into a new file.")
            act = None
        else:
            words = self.tr("metadata.jsonl of {folder} has %n caption(s).", "", notice.count)
            words += " " + self.tr("Your edits are saved in .txt files, which take precedence.")
            act = None
        words = words.format(folder=folder, file=notice.file)
        if notice.in_conflict or notice.refused:
            self._open_notices.append(words)
        self.notified.emit(words, act)

    def _leftover_message(self, notice: SaveNotice) -> tuple[str, tuple[str, Callable[[], None]] | None]:
        """Return a message about edits that an earlier session left unsaved, and its button.

        The button is a (title, action) pair, or None if the message needs no button.
        """
        if notice.code == "notice.recovered":
            words = [self.tr("Impasto stopped before it could save %n change(s) in {folder}.", "", notice.count)]
        else:
            words = [self.tr("Not saved when you closed Impasto: %n change(s) in {folder}.", "", notice.count)]
        saved = notice.count - notice.in_conflict - notice.refused
        if saved == notice.count:
            words.append(self.tr("All of them are saved now."))
        elif saved:
            words.append(self.tr("Saved now: %n.", "", saved))
        if notice.in_conflict:
            words.append(
                self.tr("Also changed by another program and waiting for your choice: %n.", "", notice.in_conflict)
            )
        if notice.refused:
            words.append(self.tr("Still not saved: %n.", "", notice.refused))
        if notice.code == "notice.recovered":
            return " ".join(words), (self.tr("Show…"), self.recovered_requested.emit)
        return " ".join(words), (self.tr("Choose…"), self.choose_requested.emit) if notice.in_conflict else None


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the panel: a short and a full description of the problem, the remedy, and a button."""

    short: str
    sentence: str
    remedy: str
    title: str
    act: Callable[[], None]

    @property
    def words(self) -> str:
        """Return the full text for screen readers."""
        return full_message(self)


def _row_widget(row: _Row) -> QWidget:
    widget = QWidget()
    button = QPushButton(row.title)
    button.setAccessibleDescription(row.words)
    button.clicked.connect(lambda: row.act())
    line, column = QHBoxLayout(), QVBoxLayout(widget)
    for layout in (line, column):
        layout.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(4)
    line.addWidget(_label(row.short, "warning", row.sentence), 1)
    line.addWidget(button, 0, Qt.AlignmentFlag.AlignTop)
    column.addLayout(line)
    column.addWidget(_label(row.remedy, "muted"))
    return widget


def _label(words: str, role: str, whole: str = "") -> QLabel:
    label = QLabel(words)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setWordWrap(True)
    label.setProperty("role", role)
    label.setToolTip(plain_tip(whole if whole != words else ""))
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


class EditTargets:
    """Images to edit: the selected ones or, if none are selected, the current one.

    Images that the filter hides are left out. `follow` updates the images from the view.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.order: Sequence[int] = []
        self.hidden = 0
        """Number of selected images that are not shown."""
        self._parts: tuple[frozenset[int], Sequence[int]] = frozenset(), ()
        self._images: list[LibraryImage] | None = []

    def __len__(self) -> int:
        return len(self.order)

    @property
    def images(self) -> list[LibraryImage]:
        """Return the images in display order; looking them up on first use takes 5 ms for 100,000 images."""
        if self._images is None:
            self._images = list(map(self._session.library.images.__getitem__, self.order))
        return self._images

    def follow(self) -> bool:
        """Update the images from the view; return whether they changed or there are none."""
        view, library = self._session.view, self._session.library.images
        current = [view.current] if view.current is not None and view.current in library else []
        chosen = len(view.selected or current)
        # With a single image selected, there is no need to search all shown images.
        single = view.selected.issubset(current)
        current = [number for number in current if number in view.ids]
        shown = current if single else view.scope()
        order, self.hidden = shown or current, chosen - len(shown)
        if order and order == self.order:
            return False
        self.order, self._parts, self._images = order, (view.selected, current), None
        return True

    def touched(self, altered: LibraryChange) -> bool:
        """Return whether the change altered a selected image, even a hidden one, or the current image."""
        return not all(map(altered.altered.isdisjoint, self._parts))


StyledText = tuple[str, str]
"""A message, and the style role for the label that shows it."""


class EditorTexts(QObject):
    """Texts for the caption editor, some with the style role that sets their color."""

    def title(self, count: int, hidden: int) -> str:
        """Return the editor's title: the number of images or, if there are none, the reason why."""
        if count:
            return self.tr("%n image(s)", "", count)
        return self.tr("No selected image is shown") if hidden else self.tr("No image selected")

    def hint(self, count: int, hidden: int) -> str:
        """Return a hint for editing several images or selecting some; it also says how many are hidden."""
        words = self.tr("The filter hides %n selected image(s), which will not be changed.", "", hidden)
        parts = [words] if hidden else []
        if not count and not hidden:
            parts.append(self.tr("Select an image to edit its caption, or several to edit their tags together."))
        if count > 1:
            parts.append(self.tr("Adding or removing a tag changes all of them."))
        return " ".join(parts)

    def of_one(self, image: LibraryImage, lines: Lines) -> StyledText:
        """Return the status of one image: the state of its caption, whether it is excluded, and any problem."""
        parts = [self._caption(image, lines)]
        role = "warning" if not (image.caption or "").strip() else "muted"
        if image.excluded:
            parts.append(self.tr("Excluded from training."))
        if image.problem:
            parts.append(image.problem.replace(str(image.path), image.name))  # the full path would take three lines
            role = "bad"
        return " ".join(part for part in parts if part), role

    def of_many(self, summary: Summary, images: Sequence[LibraryImage]) -> StyledText:
        """Return the numbers of missing captions, empty captions, excluded images and damaged images, as a message."""
        excluded = sum(image.excluded for image in images)
        damaged = sum(image.problem is not None for image in images)
        words = [
            self.tr("%n without a caption file", "", summary.missing) if summary.missing else "",
            self.tr("%n with an empty caption", "", summary.empty) if summary.empty else "",
            self.tr("%n excluded", "", excluded) if excluded else "",
            self.tr("%n damaged", "", damaged) if damaged else "",
        ]
        return ", ".join(word for word in words if word), "warning" if summary.missing or summary.empty else "muted"

    def of_tokens(self, measured: Sequence[TokenCount] | None, limit: int) -> StyledText:
        """Return a message with the token count of the caption, or of the longest one if there are several."""
        if measured is None:
            return self.tr("Counting tokens…"), "muted"
        longest = max(measured, key=lambda one: one.tokens)
        if longest.tokens > limit:
            words = self.tr("{count} of {limit} tokens, %n truncated", "", longest.tokens - limit)
            return words.format(count=longest.tokens, limit=limit), "warning"
        if limit > CHUNK and longest.tokens > CHUNK:
            row = (longest.tokens - 1) // CHUNK + 1
            words = self.tr("{count} of {limit} tokens, chunk {row} of {rows}")
            return words.format(count=longest.tokens, limit=limit, row=row, rows=limit // CHUNK), "muted"
        return self.tr("{count} of {limit} tokens").format(count=longest.tokens, limit=limit), "muted"

    def about_tokens(self, measured: Sequence[TokenCount] | None) -> str:
        """Return the tooltip that explains how tokens are counted."""
        words = self.tr("The text encoder reads captions in chunks of 75 tokens.")
        if measured and any(one.trigger for one in measured):
            words += " " + self.tr("The count includes the trigger word, which training adds at the start.")
        return words

    def there_already(self, tags: Sequence[str]) -> str:
        """Return the message for tags that were already in the caption."""
        return self.tr("Already in the caption: {tag}").format(tag=", ".join(tags))

    def _caption(self, image: LibraryImage, lines: Lines) -> str:
        if image.caption is None:
            return self.tr("No caption file yet; adding a tag creates it.")
        if not image.caption.strip():
            return self.tr("The caption file is empty.")
        count = sum(bool(row.strip()) for row in image.caption.split("\n"))
        if count < 2:
            return ""
        if lines == "variants":
            return self.tr("%n alternative caption(s), one per line.", "", count)
        return self.tr("%n line(s), read as one caption.", "", count)
