"""The Presets page: recipes and fits that are built in, own or received."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QMimeData, Qt, QTimer
from PySide6.QtGui import QGuiApplication, QHideEvent, QPixmap, QShowEvent
from PySide6.QtWidgets import (
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QPushButton,
    QSplitter,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.pixels import Pixels, pixels_of
from app.core.session import Session
from app.core.tasks import raise_again
from app.qt.actions.commands import Action, Commands
from app.qt.page_loader import Page
from app.qt.pictures.deletion import TrashedFiles, bring_back, throw_files
from app.qt.presets.cards import PICTURE, CardView, Details
from app.qt.presets.dialogs import EditDialog, ReceiveDialog, VersionsDialog
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, pixmap_of, plain_label, until_destroyed, while_there
from trainer.config.presets.exchange import preset_text
from trainer.config.presets.library import PresetEntry, folder_of
from trainer.config.presets.preset import Preset
from trainer.errors import ImpastoError, JobError
from trainer.files.architecture import NAMES

if TYPE_CHECKING:
    from app.core.presets.receiving import Received


ACTIONS = (
    Action(
        "presets.use",
        QT_TRANSLATE_NOOP("Action", "Use in a new job"),
        "presets",
        "use",
        keys=("Ctrl+Return",),
        enabled="can_use",
        icon="train",
    ),
    Action(
        "presets.search",
        QT_TRANSLATE_NOOP("Action", "Search presets"),
        "presets",
        "search",
        keys=("Ctrl+F",),
        icon="search",
    ),
    Action(
        "presets.receive",
        QT_TRANSLATE_NOOP("Action", "Open a preset…"),
        "presets",
        "receive",
        icon="folder-add",
        tip=QT_TRANSLATE_NOOP("Action", "Show a preset that somebody sent; dropping it does the same"),
    ),
    Action(
        "presets.paste",
        QT_TRANSLATE_NOOP("Action", "Paste a preset"),
        "presets",
        "paste",
        keys=("Ctrl+V",),
        icon="add",
        tip=QT_TRANSLATE_NOOP("Action", "Take a preset from a text or file that was copied"),
    ),
    Action(
        "presets.save_file",
        QT_TRANSLATE_NOOP("Action", "Save as a file…"),
        "presets",
        "save_file",
        keys=("Ctrl+Shift+S",),
        enabled="is_chosen",
        icon="save",
        tip=QT_TRANSLATE_NOOP("Action", "One file to send, with the picture"),
    ),
    Action(
        "presets.save_picture",
        QT_TRANSLATE_NOOP("Action", "Save in its picture…"),
        "presets",
        "save_picture",
        enabled="has_picture",
        icon="pictures",
        tip=QT_TRANSLATE_NOOP("Action", "A picture that shows the result and holds the preset"),
    ),
    Action(
        "presets.copy",
        QT_TRANSLATE_NOOP("Action", "Copy as text"),
        "presets",
        "copy_text",
        keys=("Ctrl+Shift+C",),
        enabled="is_chosen",
        icon="copy",
        tip=QT_TRANSLATE_NOOP("Action", "For a chat, without the picture"),
    ),
    Action(
        "presets.edit",
        QT_TRANSLATE_NOOP("Action", "Edit…"),
        "presets",
        "edit",
        keys=("F2",),
        enabled="is_mine",
        icon="tag",
        tip=QT_TRANSLATE_NOOP("Action", "Change its name, author, licence, notes or picture"),
    ),
    Action(
        "presets.duplicate",
        QT_TRANSLATE_NOOP("Action", "Make a copy of your own"),
        "presets",
        "duplicate",
        keys=("Ctrl+D",),
        enabled="is_chosen",
        icon="add",
    ),
    Action(
        "presets.versions",
        QT_TRANSLATE_NOOP("Action", "Earlier versions…"),
        "presets",
        "versions",
        enabled="is_mine",
        icon="undo",
    ),
    Action(
        "presets.delete",
        QT_TRANSLATE_NOOP("Action", "Move to the trash"),
        "presets",
        "delete",
        keys=("Del",),
        enabled="is_mine",
        icon="trash",
    ),
)


Kind = Literal["recipes", "fits"]
_LARGEST_PASTE = 1 << 20
_LINGER = 300
"""Milliseconds that somebody looks at cards before they are planned for: the planner is a process to be started."""


class PresetsPage(Page):
    """Cards on the left, all of the chosen one on the right; what is dropped or pasted is shown before it is kept."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        self._wanted: Path | None = None
        self._broken: set[tuple[Path, str]] = set()
        """The files that cannot be used, with why; each is told once."""
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(_LINGER)
        self._soon.timeout.connect(self._ask_costs)
        self.arriving: ReceiveDialog | None = None

    def build(self) -> Iterator[None]:
        """Make search, cards and details, then lay them out."""
        presets = self.session.presets
        self.field, self.origin, self.kind = QLineEdit(), ComboBox(), ComboBox()
        self.nothing = plain_label("muted")
        self.side = QStackedWidget()
        self.commands.add(ACTIONS, self)
        yield
        self.list = CardView(lambda each: presets.outlooks.of(each.path, each.preset))
        self.details = Details(presets.outlooks)
        yield
        yield from self._lay_out()
        self._listen()
        self._show_chosen()

    # --- what the table of actions names

    @property
    def chosen(self) -> PresetEntry | None:
        """The preset that is chosen."""
        return self.list.current

    def can_use(self) -> bool:
        """Tell whether the chosen one holds a recipe."""
        return self.chosen is not None and self.chosen.preset.recipe is not None

    def is_chosen(self) -> bool:
        """Tell whether one is chosen."""
        return self.chosen is not None

    def is_mine(self) -> bool:
        """Tell whether the chosen one may be changed."""
        return self.chosen is not None and self.chosen.origin != "built-in"

    def has_picture(self) -> bool:
        """Tell whether the chosen one has a picture to travel in."""
        return self.chosen is not None and self.chosen.preset.preview is not None

    def use(self) -> None:
        """Make a new job with the chosen recipe."""
        if self.chosen is not None and self.can_use():
            preset = self.chosen.preset
            self.session.going.recipe.emit(f"{preset.base.family}/{preset.name}")

    def search(self) -> None:
        """Put the cursor into the search field."""
        self.field.setFocus()
        self.field.selectAll()

    def receive(self) -> None:
        """Ask for a file that somebody sent."""
        kinds = self.tr("Presets (*.toml *.png)")
        chosen = QFileDialog.getOpenFileName(self, self.tr("Open a preset"), "", kinds)[0]
        if chosen:
            self.open(Path(chosen))

    def paste(self) -> None:
        """Take a preset from the clipboard: its text, or a file that was copied."""
        data: QMimeData | None = QGuiApplication.clipboard().mimeData()  # None where nothing was ever copied
        paths = [Path(url.toLocalFile()) for url in data.urls() if url.isLocalFile()] if data is not None else []
        text = data.text() if data is not None else ""
        if paths:
            self.open(paths[0])
        elif text.strip():
            self.session.presets.receive(text[:_LARGEST_PASTE], while_there(self, self._arrived))
        else:
            self.said.emit(self.tr("There is no preset on the clipboard."))

    def save_file(self) -> None:
        """Save the chosen one as a file for others."""
        self._save(self.tr("Presets (*.toml)"), ".toml")

    def save_picture(self) -> None:
        """Save the chosen one within its picture."""
        self._save(self.tr("Pictures (*.png)"), ".png")

    def copy_text(self) -> None:
        """Put the chosen one on the clipboard, without its picture."""
        if self.chosen is not None:
            QGuiApplication.clipboard().setText(preset_text(self.chosen.preset))
            self.said.emit(self.tr("Copied. Paste it into a chat; whoever gets it pastes it here."))

    def edit(self) -> None:
        """Change what the chosen one says of itself."""
        if self.chosen is not None and self.is_mine():
            dialog = EditDialog(self.session, self.chosen, self)
            dialog.changed.connect(self.choose)
            dialog.open()

    def duplicate(self) -> None:
        """Make an own preset of the chosen one."""
        if self.chosen is not None:
            self.session.presets.duplicate(self.chosen, while_there(self, self.choose))

    def versions(self) -> None:
        """Show what the chosen one was before."""
        if self.chosen is not None and self.is_mine():
            dialog = VersionsDialog(self.session, self.chosen, self)
            dialog.changed.connect(self.choose)
            dialog.open()

    def delete(self) -> None:
        """Move the chosen one to the trash, and offer to bring it back."""
        if self.chosen is None or not self.is_mine():
            return
        name, path = self.chosen.preset.name, self.chosen.path

        def tell(thrown: TrashedFiles) -> None:
            if not thrown.moved:
                sentence = self.tr("“{name}” could not be moved to the trash.").format(name=name)
                self.failed.emit(JobError("preset.trash", sentence, self.tr("Check your rights to the folder.")))
                return
            self.session.presets.look()
            words = self.tr("“{name}” was moved to the trash.").format(name=name)
            self.told.emit(words, "info", (self.tr("Undo"), lambda: self._bring_back(thrown)))

        self.session.tasks.run(lambda: throw_files([path]), while_there(self, tell), raise_again)

    # --- what comes from elsewhere

    def open(self, path: Path) -> None:
        """Choose a preset that is at hand, or show one that somebody sent."""
        if path.suffix.lower() == ".toml" and path.absolute().parent in (folder_of("yours"), folder_of("received")):
            self.choose(path)
        else:
            self.session.presets.receive(
                path, while_there(self, self._arrived), while_there(self, lambda e: self._refuse(path, e))
            )

    def choose(self, path: Path) -> None:
        """Choose the preset of a file, whatever is searched for, as soon as it is read."""
        self._wanted = path
        self.field.clear()
        self.origin.setCurrentIndex(0)
        self._renew()

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Look what there is; presets may have come from the command line."""
        super().showEvent(event)
        self.session.presets.look()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """End the planner while nobody looks."""
        super().hideEvent(event)
        self._soon.stop()
        self.session.presets.outlooks.rest()

    # --- inside

    def _lay_out(self) -> Iterator[None]:
        self.field.setPlaceholderText(self.tr("Search presets"))
        self.field.setAccessibleName(self.tr("Search presets"))
        self.field.setClearButtonEnabled(True)
        origins = (self.tr("From anybody"), self.tr("Yours"), self.tr("Received"), self.tr("With Impasto"))
        for title, value in zip(origins, ("", "yours", "received", "built-in"), strict=True):
            self.origin.addItem(title, value)
        for title, kind in ((self.tr("Recipes"), "recipes"), (self.tr("Fits for cards"), "fits")):
            self.kind.addItem(title, kind)
        self.origin.setAccessibleName(self.tr("From whom"))
        self.kind.setAccessibleName(self.tr("What they hold"))
        left, filters = QWidget(), QHBoxLayout()
        column = QVBoxLayout(left)
        column.setContentsMargins(12, 12, 10, 0)
        column.setSpacing(8)
        for box in (self.kind, self.origin):
            filters.addWidget(box)
        filters.addStretch()
        for command in ("presets.receive", "presets.paste"):
            filters.addWidget(self._button(command, short=True))
        column.addWidget(self.field)
        column.addLayout(filters)
        column.addWidget(self.list, 1)
        yield
        for command in ("presets.use", "presets.save_file", "presets.copy", "presets.edit", "presets.versions"):
            self.details.buttons.addWidget(self._button(command))
        # The cards' own menu, by the right button or the menu key.
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.ActionsContextMenu)
        self.list.addActions([self.commands[action.id] for action in ACTIONS if action.enabled])
        self.nothing.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.side.addWidget(self.nothing)
        self.side.addWidget(self.details)
        splitter = QSplitter()
        splitter.setObjectName("presets")
        splitter.addWidget(left)
        splitter.addWidget(self.side)
        splitter.setStretchFactor(1, 1)
        splitter.setChildrenCollapsible(False)
        splitter.setSizes([440, 760])
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(splitter)
        yield

    def _listen(self) -> None:
        presets = self.session.presets
        self.field.textChanged.connect(lambda _: self._filter())
        self.origin.currentIndexChanged.connect(lambda _: self._filter())
        self.kind.currentIndexChanged.connect(lambda _: self._filter())
        self.list.looked.connect(self._ask_soon)
        self.list.selectionModel().currentChanged.connect(lambda _, __: self._show_chosen())
        self.list.activated.connect(lambda _: self.use())
        until_destroyed(
            self,
            presets.changed.connect(lambda _: self._renew()),
            presets.failed.connect(self.failed.emit),
            presets.outlooks.changed.connect(lambda _: self._renew_costs()),
        )

    def _button(self, name: str, *, short: bool = False) -> QPushButton:
        """Return a button for a command; a short one has only its icon."""
        command = self.commands[name]
        button = QPushButton("" if short else command.text())
        button.setToolTip(command.toolTip())
        button.setAccessibleName(command.text())
        button.clicked.connect(lambda: command.trigger())
        if command.action.icon:
            set_icon(button, command.action.icon)
        button.setEnabled(command.isEnabled())
        command.changed.connect(lambda: button.setEnabled(command.isEnabled()))
        return button

    def _renew(self) -> None:
        """Show the shelf as it is by now; the chosen one stays chosen, or the one that is wanted."""
        shelf = self.session.presets.shelf
        if shelf is None:
            return
        wanted = next((each for each in shelf.presets if each.path == self._wanted), None)
        if wanted is not None:
            self.kind.setCurrentIndex(0 if wanted.preset.recipe is not None else 1)
        self._filter()
        self._draw_pictures()
        told, self._broken = self._broken, {(path, error.sentence) for path, error in shelf.broken}
        for path, error in shelf.broken:
            if (path, error.sentence) in told:
                continue  # it was named when it was met; whoever closed the notice knows
            sentence = self.tr("{file} cannot be used: {reason}").format(file=path.name, reason=error.sentence)
            self.failed.emit(JobError("preset.broken", sentence, error.remedy))

    def _filter(self) -> None:
        shelf = self.session.presets.shelf
        before = self.chosen.path if self.chosen else None
        self.list.cards.show([each for each in shelf.presets if self._fits(each)] if shelf else [])
        index = self.list.cards.place_of(self._wanted or before)
        if self._wanted is not None and index.isValid():
            self._wanted = None
        index = index if index.isValid() else self.list.cards.index(0)
        self.list.setCurrentIndex(index)
        self.list.scrollTo(index)
        self._show_chosen()
        self._ask_soon()

    def _fits(self, each: PresetEntry) -> bool:
        preset = each.preset
        if self.origin.currentData() not in ("", each.origin):
            return False
        if (preset.recipe is not None) != (self.kind.currentData() == "recipes"):
            return False
        said = (preset.name, preset.author, preset.licence, preset.notes, preset.base.name, NAMES[preset.base.family])
        text = " ".join((*said, *preset.trigger_words)).casefold()
        return all(word in text for word in self.field.text().casefold().split())

    def _show_chosen(self) -> None:
        each = self.chosen
        if each is not None:
            self.details.show_preset(each, self._pixmap(each.preset))
        read = self.session.presets.shelf is not None
        self.nothing.setText(self.tr("No preset is like that.") if read else self.tr("Reading…"))
        self.side.setCurrentWidget(self.details if each else self.nothing)
        self.commands.refresh()

    def _ask_soon(self) -> None:
        if self.isVisible():
            self._soon.start()

    def _ask_costs(self) -> None:
        if self.isVisible() and self.arriving is None:
            cards = self.list.visible_cards()
            self.session.presets.outlooks.want((each.path, each.preset) for each in cards)

    def _renew_costs(self) -> None:
        self.list.cards.renew()

    def _draw_pictures(self) -> None:
        """Decode the pictures that are new, by a worker."""
        shelf = self.session.presets.shelf
        texts = [each.preset.preview.picture for each in shelf.presets if each.preset.preview] if shelf else []
        new = [text for text in texts if text not in self.list.painter.pictures]
        if new:
            work = lambda: {text: pixels for text in new if (pixels := pixels_of(text, PICTURE * 2))}  # noqa: E731
            self.session.tasks.run(work, while_there(self, self._have_pictures), raise_again)

    def _have_pictures(self, pictures: dict[str, Pixels]) -> None:
        self.list.painter.pictures = {**self.list.painter.pictures, **pictures}
        self.list.cards.renew()
        self._show_chosen()

    def _pixmap(self, preset: Preset) -> QPixmap | None:
        pixels = self.list.painter.pictures.get(preset.preview.picture) if preset.preview else None
        return pixmap_of(pixels, PICTURE, self.devicePixelRatioF()) if pixels else None

    def _arrived(self, received: Received) -> None:
        text = received.preset.preview.picture if received.preset.preview else ""
        have = while_there(self, lambda pixels: self._show_arrived(received, pixels))
        self.session.tasks.run(lambda: pixels_of(text, PICTURE * 2) if text else None, have, raise_again)

    def _show_arrived(self, received: Received, pixels: Pixels | None) -> None:
        picture = pixmap_of(pixels, PICTURE, self.devicePixelRatioF()) if pixels else None
        self.arriving = ReceiveDialog(self.session, received, picture, self)
        self.arriving.kept.connect(self._kept)
        self.arriving.finished.connect(lambda _: self._end_arriving())
        self.arriving.open()

    def _end_arriving(self) -> None:
        self.arriving = None
        self._ask_soon()

    def _kept(self, path: Path) -> None:
        self.choose(path)
        self.told.emit(self.tr("Kept among the received presets."), "info", (self.tr("Use it"), self.use))

    def _refuse(self, path: Path, error: ImpastoError) -> None:
        """Say why it is no preset; a job goes to where jobs are."""
        if error.code == "preset.job":
            self.session.going.job.emit(path)
        else:
            self.failed.emit(error)

    def _save(self, kinds: str, ending: str) -> None:
        if self.chosen is None:
            return
        preset = self.chosen.preset
        target = QFileDialog.getSaveFileName(self, self.tr("Save the preset"), f"{preset.name}{ending}", kinds)[0]
        if target:
            path = Path(target)
            path = path if path.suffix.lower() == ending else path.with_name(path.name + ending)
            self.session.presets.save(preset, path, while_there(self, self._saved))

    def _saved(self, path: Path) -> None:
        self.said.emit(self.tr("Saved as {file}. Send it to whom you like.").format(file=path.name))

    def _bring_back(self, thrown: TrashedFiles) -> None:
        def tell(left: list[Path]) -> None:
            for path in left:
                sentence = self.tr("{file} could not be brought back.").format(file=path.name)
                self.failed.emit(JobError("preset.trash", sentence, self.tr("Look for it in the trash.")))
            self._wanted = thrown.moved[0][0]
            self.session.presets.look()

        self.session.tasks.run(lambda: bring_back(thrown), while_there(self, tell), raise_again)
