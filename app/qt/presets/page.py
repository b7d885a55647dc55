"""The Presets page: recipes and fits that are built in, the user's own, or received."""

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
from app.core.tasks import reraise
from app.qt.actions.commands import Action, Commands
from app.qt.images.deletion import TrashedFiles, restore_files, trash_files
from app.qt.page_loader import Page
from app.qt.presets.cards import IMAGE, Details, PresetListView
from app.qt.presets.dialogs import EditDialog, ReceiveDialog, VersionsDialog
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, plain_label, to_pixmap, until_destroyed, while_alive
from trainer.config.presets.exchange import preset_text
from trainer.config.presets.library import PresetEntry, folder_of
from trainer.config.presets.preset import Preset
from trainer.errors import ImpastoError, JobError
from trainer.files.architecture import NAMES

if TYPE_CHECKING:
    from trainer.config.presets.library import Received


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
        tip=QT_TRANSLATE_NOOP("Action", "Opens a preset file that you received; you can also drop it here"),
    ),
    Action(
        "presets.paste",
        QT_TRANSLATE_NOOP("Action", "Paste a preset"),
        "presets",
        "paste",
        keys=("Ctrl+V",),
        icon="add",
        tip=QT_TRANSLATE_NOOP("Action", "Adds a preset from copied text or a copied file"),
    ),
    Action(
        "presets.save_file",
        QT_TRANSLATE_NOOP("Action", "Save as a file…"),
        "presets",
        "save_file",
        keys=("Ctrl+Shift+S",),
        enabled="is_chosen",
        icon="save",
        tip=QT_TRANSLATE_NOOP("Action", "Saves the preset and its image as one file to share"),
    ),
    Action(
        "presets.save_image",
        QT_TRANSLATE_NOOP("Action", "Save as an image…"),
        "presets",
        "save_image",
        enabled="has_image",
        icon="images",
        tip=QT_TRANSLATE_NOOP("Action", "Saves the preview image with the preset inside"),
    ),
    Action(
        "presets.copy",
        QT_TRANSLATE_NOOP("Action", "Copy as text"),
        "presets",
        "copy_text",
        keys=("Ctrl+Shift+C",),
        enabled="is_chosen",
        icon="copy",
        tip=QT_TRANSLATE_NOOP("Action", "Copies the preset without its image, for a chat message"),
    ),
    Action(
        "presets.edit",
        QT_TRANSLATE_NOOP("Action", "Edit…"),
        "presets",
        "edit",
        keys=("F2",),
        enabled="is_mine",
        icon="tag",
        tip=QT_TRANSLATE_NOOP("Action", "Changes name, author, license, notes or image"),
    ),
    Action(
        "presets.duplicate",
        QT_TRANSLATE_NOOP("Action", "Duplicate to your presets"),
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
_MAX_PASTE = 1 << 20
_COST_DELAY = 300
"""Milliseconds to wait before estimating time and memory for the visible cards, which starts the planner process."""


class PresetsPage(Page):
    """Page with preset cards and the selected preset's details; a received preset is shown before it is added."""

    def __init__(self, session: Session, commands: Commands) -> None:
        super().__init__(session, commands)
        self._wanted: Path | None = None
        self._broken: set[tuple[Path, str]] = set()
        """(file, reason) of each unusable file that has been reported, so that it is reported only once."""
        self._cost_timer = QTimer(self)
        self._cost_timer.setSingleShot(True)
        self._cost_timer.setInterval(_COST_DELAY)
        self._cost_timer.timeout.connect(self._request_costs)
        self.arriving: ReceiveDialog | None = None

    def build(self) -> Iterator[None]:
        """Create the search field, the cards and the details, and lay them out, yielding after each part."""
        presets = self.session.presets
        self.field, self.origin, self.kind = QLineEdit(), ComboBox(), ComboBox()
        self.no_results = plain_label("muted")
        self.side = QStackedWidget()
        self.commands.add(ACTIONS, self)
        yield
        self.list = PresetListView(lambda each: presets.cost_estimates.of(each.path, each.preset))
        self.details = Details(presets.cost_estimates)
        yield
        yield from self._lay_out()
        self._listen()
        self._show_chosen()

    # --- called by actions

    @property
    def chosen(self) -> PresetEntry | None:
        """The selected preset, or None."""
        return self.list.current

    def can_use(self) -> bool:
        """Return whether the selected preset contains a recipe."""
        return self.chosen is not None and self.chosen.preset.recipe is not None

    def is_chosen(self) -> bool:
        """Return whether a preset is selected."""
        return self.chosen is not None

    def is_mine(self) -> bool:
        """Return whether the selected preset can be edited."""
        return self.chosen is not None and self.chosen.origin != "built-in"

    def has_image(self) -> bool:
        """Return whether the selected preset has a preview image, in which the preset can be embedded."""
        return self.chosen is not None and self.chosen.preset.preview is not None

    def use(self) -> None:
        """Create a job that uses the selected recipe."""
        if self.chosen is not None and self.can_use():
            preset = self.chosen.preset
            self.session.navigator.recipe.emit(f"{preset.base.family}/{preset.name}")

    def search(self) -> None:
        """Focus the search field."""
        self.field.setFocus()
        self.field.selectAll()

    def receive(self) -> None:
        """Ask for a preset file and open it."""
        kinds = self.tr("Presets (*.toml *.png)")
        chosen = QFileDialog.getOpenFileName(self, self.tr("Open a preset"), "", kinds)[0]
        if chosen:
            self.open(Path(chosen))

    def paste(self) -> None:
        """Open a preset from the clipboard: text, or a copied file."""
        data: QMimeData | None = QGuiApplication.clipboard().mimeData()  # None if nothing was ever copied
        paths = [Path(url.toLocalFile()) for url in data.urls() if url.isLocalFile()] if data is not None else []
        text = data.text() if data is not None else ""
        if paths:
            self.open(paths[0])
        elif text.strip():
            self.session.presets.receive(text[:_MAX_PASTE], while_alive(self, self._on_received))
        else:
            self.message_shown.emit(self.tr("The clipboard contains no preset."))

    def save_file(self) -> None:
        """Save the selected preset as a file to share."""
        self._save(self.tr("Presets (*.toml)"), ".toml")

    def save_image(self) -> None:
        """Save the selected preset's image, with the preset embedded in it."""
        self._save(self.tr("Images (*.png)"), ".png")

    def copy_text(self) -> None:
        """Copy the selected preset as text, without its image."""
        if self.chosen is not None:
            QGuiApplication.clipboard().setText(preset_text(self.chosen.preset))
            self.message_shown.emit(self.tr("Copied. Paste it into a message; the recipient can paste it here."))

    def edit(self) -> None:
        """Open the dialog for editing the selected preset's details."""
        if self.chosen is not None and self.is_mine():
            dialog = EditDialog(self.session, self.chosen, self)
            dialog.changed.connect(self.choose)
            dialog.open()

    def duplicate(self) -> None:
        """Add a copy of the selected preset to the user's own presets."""
        if self.chosen is not None:
            self.session.presets.duplicate(self.chosen, while_alive(self, self.choose))

    def versions(self) -> None:
        """Open the dialog with earlier versions of the selected preset."""
        if self.chosen is not None and self.is_mine():
            dialog = VersionsDialog(self.session, self.chosen, self)
            dialog.changed.connect(self.choose)
            dialog.open()

    def delete(self) -> None:
        """Move the selected preset to the trash, and offer to undo that."""
        if self.chosen is None or not self.is_mine():
            return
        name, path = self.chosen.preset.name, self.chosen.path

        def on_trashed(trashed: TrashedFiles) -> None:
            if not trashed.moved:
                sentence = self.tr("Could not move “{name}” to the trash.").format(name=name)
                self.failed.emit(JobError("preset.trash", sentence, self.tr("Check your permissions for the folder.")))
                return
            self.session.presets.reload()
            words = self.tr("Moved “{name}” to the trash.").format(name=name)
            self.notified.emit(words, "info", (self.tr("Undo"), lambda: self._restore(trashed)))

        self.session.tasks.run(lambda: trash_files([path]), while_alive(self, on_trashed), reraise)

    # --- received presets

    def open(self, path: Path) -> None:
        """Select the preset if it is in the library; otherwise show it as a received preset."""
        if path.suffix.lower() == ".toml" and path.absolute().parent in (folder_of("yours"), folder_of("received")):
            self.choose(path)
        else:
            self.session.presets.receive(
                path,
                while_alive(self, self._on_received),
                while_alive(self, lambda e: self._on_receive_failed(path, e)),
            )

    def choose(self, path: Path) -> None:
        """Select the preset in this file as soon as it is loaded, and clear search and filter."""
        self._wanted = path
        self.field.clear()
        self.origin.setCurrentIndex(0)
        self._on_presets_changed()

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Reload the presets, since the command line may have changed them."""
        super().showEvent(event)
        self.session.presets.reload()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop the planner while the page is hidden."""
        super().hideEvent(event)
        self._cost_timer.stop()
        self.session.presets.cost_estimates.stop()

    # --- inside

    def _lay_out(self) -> Iterator[None]:
        self.field.setPlaceholderText(self.tr("Search presets"))
        self.field.setAccessibleName(self.tr("Search presets"))
        self.field.setClearButtonEnabled(True)
        origins = (self.tr("All authors"), self.tr("Yours"), self.tr("Received"), self.tr("Built-in"))
        for title, value in zip(origins, ("", "yours", "received", "built-in"), strict=True):
            self.origin.addItem(title, value)
        for title, kind in ((self.tr("Recipes"), "recipes"), (self.tr("Fit settings for GPUs"), "fits")):
            self.kind.addItem(title, kind)
        self.origin.setAccessibleName(self.tr("Author"))
        self.kind.setAccessibleName(self.tr("Kind"))
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
        # The cards' context menu, for the right mouse button and the menu key.
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.ActionsContextMenu)
        self.list.addActions([self.commands[action.id] for action in ACTIONS if action.enabled])
        self.no_results.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.side.addWidget(self.no_results)
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
        self.list.looked.connect(self._schedule_costs)
        self.list.selectionModel().currentChanged.connect(lambda _, __: self._show_chosen())
        self.list.activated.connect(lambda _: self.use())
        until_destroyed(
            self,
            presets.changed.connect(lambda _: self._on_presets_changed()),
            presets.failed.connect(self.failed.emit),
            presets.cost_estimates.changed.connect(lambda _: self._on_costs_changed()),
        )

    def _button(self, name: str, *, short: bool = False) -> QPushButton:
        """Return a button for a command; a short one shows only the icon."""
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

    def _on_presets_changed(self) -> None:
        """Show the library's presets, select the requested or else the previous one, and report unusable files."""
        library = self.session.presets.entries
        if library is None:
            return
        wanted = next((each for each in library.presets if each.path == self._wanted), None)
        if wanted is not None:
            self.kind.setCurrentIndex(0 if wanted.preset.recipe is not None else 1)
        self._filter()
        self._load_images()
        reported, self._broken = self._broken, {(path, error.sentence) for path, error in library.broken}
        for path, error in library.broken:
            if (path, error.sentence) in reported:
                continue  # reported before; the user may have closed the notice
            sentence = self.tr("Could not read {file}: {reason}").format(file=path.name, reason=error.sentence)
            self.failed.emit(JobError("preset.broken", sentence, error.remedy))

    def _filter(self) -> None:
        library = self.session.presets.entries
        before = self.chosen.path if self.chosen else None
        self.list.cards.show([each for each in library.presets if self._matches(each)] if library else [])
        index = self.list.cards.index_of(self._wanted or before)
        if self._wanted is not None and index.isValid():
            self._wanted = None
        index = index if index.isValid() else self.list.cards.index(0)
        self.list.setCurrentIndex(index)
        self.list.scrollTo(index)
        self._show_chosen()
        self._schedule_costs()

    def _matches(self, each: PresetEntry) -> bool:
        preset = each.preset
        if self.origin.currentData() not in ("", each.origin):
            return False
        if (preset.recipe is not None) != (self.kind.currentData() == "recipes"):
            return False
        details = (
            preset.name,
            preset.author,
            preset.license,
            preset.notes,
            preset.base.name,
            NAMES[preset.base.family],
        )
        text = " ".join((*details, *preset.trigger_words)).casefold()
        return all(word in text for word in self.field.text().casefold().split())

    def _show_chosen(self) -> None:
        each = self.chosen
        if each is not None:
            self.details.show_preset(each, self._pixmap(each.preset))
        read = self.session.presets.entries is not None
        self.no_results.setText(self.tr("No presets match.") if read else self.tr("Reading…"))
        self.side.setCurrentWidget(self.details if each else self.no_results)
        self.commands.refresh()

    def _schedule_costs(self) -> None:
        if self.isVisible():
            self._cost_timer.start()

    def _request_costs(self) -> None:
        if self.isVisible() and self.arriving is None:
            cards = self.list.visible_cards()
            self.session.presets.cost_estimates.request((each.path, each.preset) for each in cards)

    def _on_costs_changed(self) -> None:
        self.list.cards.renew()

    def _load_images(self) -> None:
        """Decode new preview images on a worker."""
        library = self.session.presets.entries
        texts = [each.preset.preview.image for each in library.presets if each.preset.preview] if library else []
        new = [text for text in texts if text not in self.list.painter.images]
        if new:
            work = lambda: {text: pixels for text in new if (pixels := pixels_of(text, IMAGE * 2))}  # noqa: E731
            self.session.tasks.run(work, while_alive(self, self._on_images), reraise)

    def _on_images(self, images: dict[str, Pixels]) -> None:
        self.list.painter.images = {**self.list.painter.images, **images}
        self.list.cards.renew()
        self._show_chosen()

    def _pixmap(self, preset: Preset) -> QPixmap | None:
        pixels = self.list.painter.images.get(preset.preview.image) if preset.preview else None
        return to_pixmap(pixels, IMAGE, self.devicePixelRatioF()) if pixels else None

    def _on_received(self, received: Received) -> None:
        text = received.preset.preview.image if received.preset.preview else ""
        show = while_alive(self, lambda pixels: self._show_received(received, pixels))
        self.session.tasks.run(lambda: pixels_of(text, IMAGE * 2) if text else None, show, reraise)

    def _show_received(self, received: Received, pixels: Pixels | None) -> None:
        image = to_pixmap(pixels, IMAGE, self.devicePixelRatioF()) if pixels else None
        self.arriving = ReceiveDialog(self.session, received, image, self)
        self.arriving.kept.connect(self._on_kept)
        self.arriving.finished.connect(lambda _: self._on_receive_finished())
        self.arriving.open()

    def _on_receive_finished(self) -> None:
        self.arriving = None
        self._schedule_costs()

    def _on_kept(self, path: Path) -> None:
        self.choose(path)
        self.notified.emit(self.tr("Added to the received presets."), "info", (self.tr("Use in a new job"), self.use))

    def _on_receive_failed(self, path: Path, error: ImpastoError) -> None:
        """Report why a file cannot be opened as a preset; open a job file on the Train page instead."""
        if error.code == "preset.job":
            self.session.navigator.job.emit(path)
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
            self.session.presets.export(preset, path, while_alive(self, self._on_saved))

    def _on_saved(self, path: Path) -> None:
        self.message_shown.emit(self.tr("Saved as {file}.").format(file=path.name))

    def _restore(self, trashed: TrashedFiles) -> None:
        def on_restored(left: list[Path]) -> None:
            for path in left:
                sentence = self.tr("Could not restore {file}.").format(file=path.name)
                self.failed.emit(JobError("preset.trash", sentence, self.tr("Look for it in the trash.")))
            self._wanted = trashed.moved[0][0]
            self.session.presets.reload()

        self.session.tasks.run(lambda: restore_files(trashed), while_alive(self, on_restored), reraise)
