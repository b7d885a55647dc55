"""The welcome dialog: what this PC can train, which models were found, and a button that starts the tour."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from PySide6.QtCore import QLocale, Qt, Signal
from PySide6.QtGui import QIcon
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QFileDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app.core.first_run import MachineCheck, MachineFacts, read_machine_facts
from app.core.models.models import Models
from app.core.models.tools import Installation
from app.core.session import Session
from app.core.tasks import Tasks, reraise
from app.core.words import full_message
from app.qt.theme import set_icon
from app.qt.theme.theme import FOLDER
from app.qt.train.words import format_memory, owner_of
from app.qt.widgets import icon_label, plain_label, plain_tip, until_destroyed, while_alive

Sign = Literal["good", "info", "warning", "bad", "waiting"]
_ICONS: dict[Sign, tuple[str, str]] = {
    "good": ("check", "good"),
    "info": ("info", "link"),
    "warning": ("warning", "warning"),
    "bad": ("error", "bad"),
    "waiting": ("more", "muted"),
}
_ENOUGH_BYTES = 20 * 10**9
"""Free space, in bytes, that is enough for one or two base models, caches and some runs; `doctor` requires less."""


class CheckLine(QWidget):
    """Line with the result of a check: an icon, and plain text with the same meaning."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._icon, self.words = icon_label(16), plain_label()
        self.words.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.MinimumExpanding)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        row.addWidget(self._icon, 0, Qt.AlignmentFlag.AlignTop)
        row.addWidget(self.words, 1)

    def say(self, kind: Sign, words: str) -> None:
        """Show these words with the icon for this kind of result."""
        set_icon(self._icon, *_ICONS[kind])
        self.words.setText(words)


class MachinePanel(QWidget):
    """Panel about this PC: GPU, disk, and a training test that starts at once; `cancel` stops the test."""

    def __init__(self, tasks: Tasks, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.gpu, self.disk, self.check = CheckLine(), CheckLine(), CheckLine()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        for line in (self.gpu, self.disk, self.check):
            column.addWidget(line)
        self.gpu.say("waiting", self.tr("Looking for GPUs…"))
        self.disk.hide()
        self.check.say("waiting", self.tr("Testing whether training works (a few seconds)…"))
        self._check_up = MachineCheck(tasks.post)
        self._check_up.changed.connect(while_alive(self, lambda _: self._on_check_changed()))
        tasks.run(read_machine_facts, while_alive(self, self._on_machine_facts), reraise)
        self._check_up.start()

    @property
    def done(self) -> bool:
        """Return whether the test has finished."""
        return self._check_up.done

    def cancel(self) -> None:
        """Cancel the test."""
        self._check_up.close()

    def _on_machine_facts(self, found: MachineFacts) -> None:
        self._show_gpus(found)
        if found.free is not None:
            words = self.tr("{free} free for models and runs on the disk that contains {folder}.")
            enough = found.free >= _ENOUGH_BYTES
            more = "" if enough else self.tr(" SDXL bases and checkpoints take several gigabytes: free up some space.")
            self.disk.say(
                "good" if enough else "warning", words.format(free=_size(found.free), folder=found.folder) + more
            )
            self.disk.show()

    def _show_gpus(self, found: MachineFacts) -> None:
        if found.fault:
            self.gpu.say("bad", found.fault)
            return
        if not found.gpus:
            words = self.tr("No NVIDIA GPU found. Training runs on the CPU, which is very slow.")
            self.gpu.say("info", words)
            return
        words = self.tr("{name}: {free} of {total} free, driver {driver}.")
        lines = [
            words.format(
                name=gpu.name,
                free=format_memory(gpu.free_bytes),
                total=format_memory(gpu.total_bytes),
                driver=gpu.driver,
            )
            for gpu in found.gpus
        ]
        self.gpu.say("good", "\n".join(lines))

    def _on_check_changed(self) -> None:
        check = self._check_up
        if check.problem:
            self.check.say("bad", self.tr("Could not run the test: {why}").format(why=check.problem))
        elif check.worst and (check.done or check.worst[0].verdict == "broken"):
            broken = check.worst[0].verdict == "broken"
            problems = "\n".join(map(full_message, check.worst))
            self.check.say("bad" if broken else "warning", problems)
        elif check.done:
            self.check.say("good", self.tr("Training works on this PC."))


def _size(size: int) -> str:
    return QLocale().formattedDataSize(size, 0, QLocale.DataSizeFormat.DataSizeSIFormat)


class ToolsPanel(QWidget):
    """Panel that searches this PC for other tools and their models, and lists them as they are found."""

    def __init__(self, models: Models, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._models = models
        self.boxes: dict[Path, QCheckBox] = {}
        self.status = QLabel()
        self.folder = QPushButton(self.tr("Add folder…"))
        self._list, self._column = QWidget(), QVBoxLayout()
        self._build()
        until_destroyed(self, models.changed.connect(lambda _: self._fill()))
        self.folder.clicked.connect(lambda: self.add_folder())
        models.search()
        self._fill()

    def add_folder(self) -> None:
        """Ask for a folder of models, or the folder of a tool that was not found."""
        folder = QFileDialog.getExistingDirectory(self, self.tr("Choose a folder with models, or the folder of a tool"))
        if folder:
            self._models.add_folder(Path(folder))

    def _build(self) -> None:
        self.status.setProperty("role", "muted")
        self.status.setWordWrap(True)
        self.folder.setAutoDefault(False)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(2)
        self._list.setLayout(self._column)
        self._column.addStretch()
        area = QScrollArea()
        area.setWidget(self._list)
        area.setWidgetResizable(True)
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        row = QHBoxLayout()
        row.addWidget(self.status, 1)
        row.addWidget(self.folder)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(area, 1)
        column.addLayout(row)

    def _fill(self) -> None:
        tools = {one.folder: one for one in self._models.installations}
        for folder in [folder for folder in self.boxes if folder not in tools]:
            self.boxes.pop(folder).deleteLater()
        for folder, tool in tools.items():
            if folder not in self.boxes:
                self._add(tool)
            self._update_box(self.boxes[folder], tool)
        self.status.setText(self._state_text())

    def _add(self, tool: Installation) -> None:
        box = QCheckBox()
        box.setChecked(self._models.is_offered(tool))
        box.setToolTip(plain_tip(str(tool.folder)))
        box.toggled.connect(lambda wanted: self._models.set_offered(tool, wanted))
        self._column.insertWidget(self._column.count() - 1, box)
        self.boxes[tool.folder] = box

    def _update_box(self, box: QCheckBox, tool: Installation) -> None:
        count = self.tr("%n base(s)", "", self._models.count_of(tool))
        text = f"{owner_of(tool.tool)} · {count} · {tool.folder}"
        room = max(self._list.width() - 40, 300)
        shown = box.fontMetrics().elidedText(text, Qt.TextElideMode.ElideMiddle, room)
        box.setText(shown.replace("&", "&&"))
        box.setAccessibleName(text)

    def _state_text(self) -> str:
        if self._models.is_searching:
            return self.tr("Looking for models in other tools on this PC…")
        if not self.boxes:
            return self.tr("No other tools found. Add the folder with your models.")
        return self.tr("Bases from the selected folders are available for training.")


class Welcome(QDialog):
    """Non-modal welcome dialog."""

    tour = Signal()
    images = Signal()
    """Emitted when the user wants to open a folder of images."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(self.tr("Welcome to Impasto"))
        self.resize(660, 560)
        self.machine, self.tools = MachinePanel(session.tasks), ToolsPanel(session.models)
        self.tour_button = QPushButton(self.tr("Take the tour"))
        self.finished.connect(lambda: self.machine.cancel())
        self.destroyed.connect(lambda _=None, machine=self.machine: machine.close())
        self._build()
        self.tour_button.setFocus()

    def _build(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 22, 24, 18)
        column.setSpacing(10)
        column.addLayout(self._head())
        column.addSpacing(8)
        column.addWidget(_label(self.tr("Your PC"), "heading"))
        column.addWidget(self.machine)
        column.addSpacing(10)
        column.addWidget(_label(self.tr("Your models"), "heading"))
        column.addWidget(_label(self.tr("Models stay where they are: nothing is copied or moved."), "muted"))
        column.addWidget(self.tools, 1)
        column.addSpacing(6)
        column.addLayout(self._buttons())

    def _head(self) -> QHBoxLayout:
        sign = QLabel()
        sign.setPixmap(QIcon(str(FOLDER / "impasto.svg")).pixmap(44, 44))
        words = QVBoxLayout()
        words.setSpacing(2)
        words.addWidget(_label(self.tr("Welcome to Impasto"), "title"))
        words.addWidget(_label(self.tr("Train LoRAs for SD 1.5 and SDXL from your images, on your own PC."), "muted"))
        row = QHBoxLayout()
        row.setSpacing(14)
        row.addWidget(sign, 0, Qt.AlignmentFlag.AlignTop)
        row.addLayout(words, 1)
        return row

    def _buttons(self) -> QHBoxLayout:
        self.tour_button.setToolTip(self.tr("Train a small LoRA on any PC, step by step, in a few minutes"))
        self.tour_button.setDefault(True)
        images = QPushButton(self.tr("Open images…"))
        close = QPushButton(self.tr("Close"))
        for button in (images, close):
            button.setAutoDefault(False)
        for button, way in ((self.tour_button, self.tour), (images, self.images)):
            button.clicked.connect(lambda _=False, way=way: (self.close(), way.emit()))
        close.clicked.connect(lambda: self.close())
        row = QHBoxLayout()
        row.addWidget(close)
        row.addStretch()
        row.addWidget(images)
        row.addWidget(self.tour_button)
        return row


def _label(text: str, role: str) -> QLabel:
    label = QLabel(text)
    label.setProperty("role", role)
    label.setWordWrap(True)
    return label
