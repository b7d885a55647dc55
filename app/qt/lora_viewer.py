"""Viewer for one LoRA file: what it is, how strong each block is, and how it was trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QLocale, Qt
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QHBoxLayout, QLabel, QTabWidget, QVBoxLayout, QWidget
from shiboken6 import isValid

from app.core.loras.file import LoraFile, read_lora
from app.core.loras.strength import OTHER, BlockStrength
from app.core.session import Session
from app.core.words import full_message
from app.qt.tables import Row, Table
from app.qt.widgets import QT_TRANSLATE_NOOP, close_row, plain_label, set_message, to_pixmap
from trainer.config.presets.creating import CreatedPreset
from trainer.errors import ImpastoError, LoraFileError
from trainer.files.architecture import NAMES

_SIDES = {
    "TE1": QT_TRANSLATE_NOOP("Lora", "Text encoder 1 (CLIP-L)"),
    "TE2": QT_TRANSLATE_NOOP("Lora", "Text encoder 2 (CLIP-G)"),
    "IN": QT_TRANSLATE_NOOP("Lora", "UNet, input blocks"),
    "MID": QT_TRANSLATE_NOOP("Lora", "UNet, middle block"),
    "OUT": QT_TRANSLATE_NOOP("Lora", "UNet, output blocks"),
    OTHER: QT_TRANSLATE_NOOP("Lora", "Other layers"),
}
_IMAGE_SIDE = 112


def summary(found: LoraFile) -> str:
    """Return a one-line summary: kind, family, rank and file size."""
    family = NAMES[found.family] if found.family else QCoreApplication.translate("Lora", "for an unknown base")
    size = QLocale().formattedDataSize(found.bytes, 1, QLocale.DataSizeFormat.DataSizeSIFormat)
    rank = (
        QCoreApplication.translate("Lora", "rank {rank}").format(rank=format_range(found.ranks))
        if found.ranks
        else QCoreApplication.translate("Lora", "no rank")
    )
    return f"{found.kind} · {family} · {rank} · {size}"


def block_rows(blocks: Sequence[BlockStrength]) -> list[Row]:
    """Return one row per block; its bar is the block's strength relative to the strongest block."""
    known = [block.strength for block in blocks if block.strength is not None and math.isfinite(block.strength)]
    most = max(known, default=0.0)
    return [_row(block, most) for block in blocks]


def format_range(numbers: Sequence[float]) -> str:
    """Return the range of these numbers, which must be in ascending order, as text: "16" or "8 to 32"."""
    ends = [f"{number:g}" for number in (numbers[0], numbers[-1])]
    return (
        ends[0]
        if ends[0] == ends[1]
        else QCoreApplication.translate("Lora", "{low} to {high}").format(low=ends[0], high=ends[1])
    )


def _row(block: BlockStrength, most: float) -> Row:
    side = next(words for start, words in _SIDES.items() if block.name.startswith(start))
    texts = (
        "–" if block.name == OTHER else block.name,
        QCoreApplication.translate("Lora", side),
        str(block.layers),
        format_range(block.ranks) if block.ranks else "–",
        format_range(block.alphas) if block.alphas else QCoreApplication.translate("Lora", "same as rank"),
        _strength(block.strength),
    )
    tip = ""
    if block.unknown:
        words = QCoreApplication.translate("Lora", "Layers that could not be measured: {count}.")
        tip = words.format(count=block.unknown)
    finite = block.strength is not None and math.isfinite(block.strength)
    return Row(texts, (block.strength or 0.0) / most if finite and most else 0.0 if finite else None, tip)


def _strength(strength: float | None) -> str:
    if strength is None:
        return QCoreApplication.translate("Lora", "unknown")
    if not math.isfinite(strength):
        return QCoreApplication.translate("Lora", "broken: contains NaN or infinity")
    return f"{strength:.3g}"


class LoraViewer(QDialog):
    """Non-modal window about one LoRA; workers read the file, and the window shows each result as it arrives."""

    def __init__(self, session: Session, path: Path, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._wanted = True
        self.path = path
        self.found: LoraFile | None = None
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(path.name)
        self.setWindowFlag(Qt.WindowType.WindowMaximizeButtonHint)
        self.setSizeGripEnabled(True)
        self.resize(820, 620)
        self.image, self.title, self.facts = QLabel(), plain_label("title"), plain_label("muted")
        self.about, self.words, self.state = plain_label(), plain_label(), plain_label()
        self.tabs = QTabWidget()
        self._add_tables()
        buttons = close_row(self)
        self.recipe = buttons.addButton(self.tr("Create preset from this"), QDialogButtonBox.ButtonRole.ActionRole)
        self.recipe.setAutoDefault(False)
        self.recipe.setEnabled(False)
        self.recipe.clicked.connect(self._create_preset)
        self._lay_out(buttons)
        set_message(self.state, self.tr("Reading…"), "muted")
        session.tasks.run(
            lambda: read_lora(path), self._while_open(self._on_file_read), self._while_open(self._on_failed)
        )

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        """Ignore the results of workers that are still running."""
        self._wanted = False
        super().closeEvent(event)

    def done(self, result: int) -> None:
        """Ignore the results of workers that are still running: Escape closes a dialog without a close event."""
        self._wanted = False
        super().done(result)

    def _add_tables(self) -> None:
        strength = self.tr("Strength")
        blocks = (self.tr("Block"), self.tr("Where"), self.tr("Layers"), self.tr("Rank"), self.tr("Alpha"), strength)
        self.blocks = Table(blocks, self.tr("Blocks and their strength"))
        self.settings = Table((self.tr("Setting"), self.tr("Value")), self.tr("Training settings"))
        self.tags = Table((self.tr("Tag"), self.tr("Count")), self.tr("Tags in the training captions"))
        self.metadata = Table((self.tr("Key"), self.tr("Value")), self.tr("All metadata"))
        self.tabs.setAccessibleName(self.tr("About the LoRA"))
        self.tabs.setDocumentMode(True)
        titles = (strength, self.tr("Training"), self.tr("Tags"), self.tr("All metadata"))
        for table, title in zip((self.blocks, self.settings, self.tags, self.metadata), titles, strict=True):
            self.tabs.addTab(table, title)
        self.tabs.hide()

    def _lay_out(self, buttons: QDialogButtonBox) -> None:
        details, head, column = QVBoxLayout(), QHBoxLayout(), QVBoxLayout(self)
        details.setSpacing(4)
        for label in (self.title, self.facts, self.about, self.words):
            details.addWidget(label)
            label.hide()
        details.addStretch()
        self.image.hide()
        self.image.setAccessibleName(self.tr("Image"))
        head.setSpacing(16)
        head.addWidget(self.image, 0, Qt.AlignmentFlag.AlignTop)
        head.addLayout(details, 1)
        column.setContentsMargins(16, 16, 16, 12)
        column.setSpacing(12)
        column.addLayout(head)
        column.addWidget(self.state)
        column.addWidget(self.tabs, 1)
        column.addStretch()
        column.addWidget(buttons)

    def _on_file_read(self, found: LoraFile) -> None:
        self.found = found
        set_message(self.title, found.about.get("title") or self.path.stem)
        set_message(self.facts, summary(found))
        set_message(self.about, self._about(found))
        set_message(self.words, self._triggers(found))
        for pixels in found.images[:1]:
            self.image.setPixmap(to_pixmap(pixels, _IMAGE_SIDE, self.devicePixelRatioF()))
            self.image.show()
        self.settings.show_rows([Row(pair) for pair in found.settings])
        most = max((count for _, count in found.tags), default=1)
        self.tags.show_rows([Row((tag, f"{count:,}"), count / most) for tag, count in found.tags])
        self.metadata.show_rows([Row(pair) for pair in found.metadata])
        for table in (self.settings, self.tags, self.metadata):
            self.tabs.setTabVisible(self.tabs.indexOf(table), bool(table.lines.rows))
        self.tabs.show()
        self.recipe.setEnabled(True)
        set_message(self.state, self.tr("Measuring the strength of each block…"), "muted")
        work = lambda: found.blocks(lambda: self._wanted)  # noqa: E731
        self._session.tasks.run(work, self._while_open(self._on_blocks), self._while_open(self._on_failed))

    def _on_blocks(self, blocks: Sequence[BlockStrength]) -> None:
        self.blocks.show_rows(block_rows(blocks))
        silent = self.found is not None and not self.found.metadata
        set_message(self.state, self.tr("This file has no training metadata.") if silent else "")

    def _about(self, found: LoraFile) -> str:
        about = found.about
        details = (
            self.tr("Made for {base}").format(base=about["base"]) if "base" in about else "",
            self.tr("by {author}").format(author=about["author"]) if "author" in about else "",
            self.tr("license: {license}").format(license=about["license"]) if "license" in about else "",
        )
        return "\n".join(
            text for text in (" · ".join(part for part in details if part), about.get("description", "")) if text
        )

    def _triggers(self, found: LoraFile) -> str:
        if not found.triggers:
            return ""
        words = (
            self.tr("Trigger words: {words}") if found.triggers_stated else self.tr("Possible trigger words: {words}")
        )
        return words.format(words=found.triggers)

    def _create_preset(self) -> None:
        self.recipe.setEnabled(False)
        self._session.presets.create_from_lora(
            self.path, self._while_open(self._on_preset_created), self._while_open(self._on_preset_failed)
        )

    def _on_preset_created(self, made: tuple[Path, CreatedPreset]) -> None:
        path, preset = made
        self.recipe.setEnabled(True)
        words = [self.tr("Added to your presets as “{name}”.").format(name=preset.preset.name)]
        if preset.not_found:
            words.append(self.tr("%n setting(s) not given: the job's values are used.", "", len(preset.not_found)))
        if preset.left_out:
            words.append(self.tr("Left out: {what}.").format(what="; ".join(preset.left_out)))
        set_message(self.state, " ".join(words), "good")
        self._session.navigator.preset.emit(path)

    def _on_preset_failed(self, error: ImpastoError) -> None:
        self.recipe.setEnabled(True)
        set_message(self.state, full_message(error), "bad")

    def _on_failed(self, fault: BaseException) -> None:
        if isinstance(fault, OSError):
            words = self.tr("Could not read the tensors: {reason}.").format(reason=fault.strerror or fault)
            fault = LoraFileError("lora.unreadable", words, self.tr("Check the disk and the file's permissions."))
        if not isinstance(fault, ImpastoError):
            raise fault
        set_message(self.state, full_message(fault), "bad")

    def _while_open(self, have: Callable[..., None]) -> Callable[..., None]:
        """Wrap a worker's callback so that it does nothing once the window is closed."""
        return lambda answer: have(answer) if isValid(self) and self._wanted else None
