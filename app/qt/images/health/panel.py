"""The panel of problems and charts to the right of the images."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import (
    QButtonGroup,
    QDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QMenu,
    QProgressBar,
    QPushButton,
    QScrollArea,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)
from shiboken6 import isValid

from app.core.health import charts
from app.core.health.findings import Action as ByHand
from app.core.health.findings import HealthFinding
from app.core.health.health import Health, HealthProgress
from app.core.health.inspector import to_utf8
from app.core.session import Session
from app.core.words import full_message
from app.qt.actions.commands import Action, Commands
from app.qt.images.health.charts import BarChart, ColumnChart, HealthChart, SizeMap
from app.qt.images.health.finding_list import FindingView
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, until_destroyed
from trainer.errors import ImpastoError

# Rare tags are counted again after this pause without changes.
_PAUSE_MS = 1500
_RESOLUTIONS = (512, 768, 1024)
ACTIONS = (
    Action(
        "health.crop",
        QT_TRANSLATE_NOOP("Action", "Choose crops…"),
        "images",
        "choose_crops",
        ("K",),
        "has_chosen",
        icon="crop",
        tip=QT_TRANSLATE_NOOP("Action", "Show and change which part of each selected image is used in training"),
    ),
    Action(
        "health.mask",
        QT_TRANSLATE_NOOP("Action", "Paint masks…"),
        "images",
        "paint_masks",
        ("M",),
        "has_chosen",
        icon="brush",
        tip=QT_TRANSLATE_NOOP("Action", "Paint which areas of the selected images are used in training"),
    ),
)


class ChartsView(QWidget):
    """Charts of buckets, sizes, caption lengths and tags; `chosen` carries the image ids of a clicked part."""

    chosen = Signal(object)

    def __init__(self, health: Health, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._health = health
        self.choice = ComboBox()
        self.buckets = BarChart(self.tr("Buckets"))
        self.sizes = SizeMap(self.tr("Widths and heights"))
        self.lengths = ColumnChart(self.tr("Caption lengths in tokens"))
        self.tags = BarChart(self.tr("Most frequent tags"))
        self.note = QLabel()
        self.stack = QStackedWidget()
        self._build()

    def update_chart(self) -> None:
        """Update the visible chart."""
        if not self.isVisible():
            return
        health, chart = self._health, self.choice.currentIndex()
        if chart == 0:
            bars = charts.buckets(health)
            self.buckets.show_bars(bars)
            self.note.setText(self.tr("%n bucket(s) at {side} px", "", len(bars)).format(side=health.target.resolution))
        elif chart == 1:
            self.sizes.show_cells(charts.sizes(health), health.target.resolution)
            self.note.setText(
                self.tr("Below the line: smaller than {side} × {side}").format(side=health.target.resolution)
            )
        elif chart == 2:
            self.lengths.show_bars(charts.caption_lengths(health), health.target.tokens)
            self.note.setText(
                self.tr("Tokens; training truncates captions at {read}").format(read=health.target.tokens)
            )
        else:
            self.tags.show_bars(charts.frequent_tags(health))
            self.note.setText(self.tr("Most frequent tags"))

    def showEvent(self, event: object) -> None:  # noqa: N802
        """Update the chart, since it is not updated while hidden."""
        super().showEvent(event)  # type: ignore[arg-type]
        self.update_chart()

    def _build(self) -> None:
        self.choice.addItems([self.tr("Buckets"), self.tr("Sizes"), self.tr("Captions"), self.tr("Tags")])
        self.choice.setAccessibleName(self.tr("Chart"))
        self.choice.currentIndexChanged.connect(self._on_chart_selected)
        self.note.setProperty("role", "muted")
        self.note.setWordWrap(True)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.setContentsMargins(10, 4, 10, 2)
        row.addWidget(self.choice)
        row.addWidget(self.note, 1)
        charts_shown: tuple[HealthChart, ...] = (self.buckets, self.sizes, self.lengths, self.tags)
        for chart in charts_shown:
            chart.chosen.connect(self._chosen)
            self.stack.addWidget(_scrolled(chart) if isinstance(chart, BarChart) else chart)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(row)
        column.addWidget(self.stack, 1)

    def _on_chart_selected(self, chart: int) -> None:
        self.stack.setCurrentIndex(chart)
        self.update_chart()

    def _chosen(self, ids: Set[int]) -> None:
        self.chosen.emit(ids)


def _scrolled(chart: HealthChart) -> QScrollArea:
    area = QScrollArea()
    area.setWidget(chart)
    area.setWidgetResizable(True)
    area.setFrameShape(QFrame.Shape.NoFrame)
    area.setFocusProxy(chart)
    return area


class HealthPanel(QWidget):
    """Panel of problems and charts. A click on a problem shows the images that have it; a button fixes it.

    `message_shown` carries messages for the status bar; `edit_requested` asks to focus the caption editor.
    """

    message_shown = Signal(str)
    edit_requested = Signal()

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._health = session, session.health
        self.problems, self.figures = QToolButton(), QToolButton()
        self.resolution = QToolButton()
        self.list = FindingView()
        self.empty_label = QLabel()
        self.remedy = QLabel()
        self.show_button, self.fix_button = QPushButton(), QPushButton()
        self.detail = QFrame()
        self.message = QLabel()
        self.bar, self.progress = QProgressBar(), QLabel()
        self.charts = ChartsView(session.health)
        self.pages, self.answers = QStackedWidget(), QStackedWidget()
        self._pause = QTimer(self)
        self._build()
        self._connect()
        self._show_findings(self._health.current_findings)
        self._show_progress(self._health.current_progress())
        self._on_target_changed()
        commands.add(ACTIONS, self)

    # User actions

    def show_images(self) -> None:
        """Show the images that have the selected problem."""
        finding = self.list.finding
        if finding and finding.ids:
            self._session.filtering.apply(finding.query)
            ids = self._session.view.ids
            if ids:
                self._session.view.select([ids[0]], ids[0])

    def fix(self) -> None:
        """Fix the selected problem, or open the dialog for fixing it."""
        finding = self.list.finding
        self.message.hide()
        if finding is None:
            return
        if finding.fix is not None:
            self.fix_button.setEnabled(False)
            self._session.tasks.run(finding.fix, self._while_open(self._on_fixed), self._while_open(self._on_failed))
        elif finding.action == "convert":
            self._convert(finding)
        elif finding.action == "look":
            self._health.start_inspection()
        elif finding.action == "write":
            self.show_images()
            self.edit_requested.emit()
        elif finding.action:
            self._open_dialog(finding.action, self._in_order(finding.ids))

    def select(self, ids: Set[int]) -> None:
        """Select these images; clear the filter if it hides some of them."""
        view = self._session.view
        if not ids <= set(view.ids):
            self._session.filtering.apply("")
        first = next((number for number in view.ids if number in ids), None)
        view.select(ids, first)
        self.message_shown.emit(self.tr("%n image(s) selected", "", len(ids)))

    def set_resolution(self, resolution: int) -> None:
        """Set the training resolution that images are checked against."""
        self._session.target.set("resolution", resolution)

    def has_chosen(self) -> bool:
        """Return whether an image is selected or current, which the mask and crop dialogs require."""
        return bool(self._chosen())

    def paint_masks(self) -> None:
        """Open the mask dialog for the selected images, or for the current one."""
        self._open_dialog("mask", self._chosen())

    def choose_crops(self) -> None:
        """Open the crop dialog for the selected images, or for the current one."""
        self._open_dialog("crop", self._chosen())

    def _chosen(self) -> list[int]:
        view = self._session.view
        return list(view.scope()) or ([] if view.current is None else [view.current])

    def _open_dialog(self, action: ByHand, ids: list[int]) -> None:
        """Open the dialog for fixing a problem by hand, importing its modules on demand."""
        view = self._session.view
        dialog: QDialog
        if action == "mask":
            from app.qt.images.health.mask_painter import MaskPainter

            dialog = MaskPainter(self._session, ids, view.current, self)
        else:
            from app.qt.images.health.cropper import Cropper

            dialog = Cropper(self._session, ids, view.current, self)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()

    # Building

    def _build(self) -> None:
        group = QButtonGroup(self)
        for number, (button, text, name) in enumerate(
            ((self.problems, self.tr("Problems"), "warning"), (self.figures, self.tr("Charts"), "chart"))
        ):
            button.setText(text)
            set_icon(button, name)
            button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
            button.setCheckable(True)
            button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            group.addButton(button, number)
        self.problems.setChecked(True)
        group.idClicked.connect(self.pages.setCurrentIndex)
        self.resolution.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.resolution.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        menu = QMenu(self)
        for side in _RESOLUTIONS:
            menu.addAction(self.tr("{side} px").format(side=side), partial(self.set_resolution, side))
        self.resolution.setMenu(menu)
        top = QHBoxLayout()
        top.setContentsMargins(6, 4, 8, 2)
        top.addWidget(self.problems)
        top.addWidget(self.figures)
        top.addStretch(1)
        top.addWidget(self.resolution)
        self.pages.addWidget(self._build_problems())
        self.pages.addWidget(self.charts)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(top)
        column.addWidget(self.pages, 1)
        column.addLayout(self._build_progress())

    def _build_problems(self) -> QWidget:
        self.empty_label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.empty_label.setWordWrap(True)
        self.empty_label.setContentsMargins(16, 16, 16, 16)
        self.answers.addWidget(self.list)
        self.answers.addWidget(self.empty_label)
        self.remedy.setWordWrap(True)
        self.remedy.setProperty("role", "muted")
        self.message.setWordWrap(True)
        self.message.setProperty("role", "bad")
        self.message.hide()
        self.show_button.setText(self.tr("Show images"))
        buttons = QHBoxLayout()
        buttons.addWidget(self.show_button)
        buttons.addWidget(self.fix_button)
        buttons.addStretch(1)
        inside = QVBoxLayout(self.detail)
        inside.setContentsMargins(10, 6, 10, 8)
        for label in (self.remedy, self.message):
            inside.addWidget(label)
        inside.addLayout(buttons)
        whole = QWidget()
        column = QVBoxLayout(whole)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.answers, 1)
        column.addWidget(self.detail)
        return whole

    def _build_progress(self) -> QHBoxLayout:
        self.bar.setTextVisible(False)
        self.bar.setFixedSize(72, 6)
        self.bar.setAccessibleName(self.tr("Images checked"))
        self.progress.setProperty("role", "muted")
        row = QHBoxLayout()
        row.setContentsMargins(10, 2, 10, 5)
        row.setSpacing(8)  # otherwise it inherits the column's spacing of 0
        row.addWidget(self.bar)
        row.addWidget(self.progress, 1)
        return row

    def _connect(self) -> None:
        health = self._health
        self._pause.setSingleShot(True)
        self._pause.setInterval(_PAUSE_MS)
        self._pause.timeout.connect(health.refresh)
        self.list.asked.connect(self.show_images)
        self.list.selectionModel().currentChanged.connect(lambda *_: self._show_detail())
        self.list.findings.modelReset.connect(self._show_detail)
        self.show_button.clicked.connect(self.show_images)
        self.fix_button.clicked.connect(self.fix)
        self.charts.chosen.connect(self.select)
        until_destroyed(
            self,
            health.findings.connect(self._show_findings),
            health.progress.connect(self._show_progress),
            health.charts.connect(lambda _: self._on_target_changed()),
            self._session.target.changed.connect(lambda _: self._on_target_changed()),
            self._session.tags.changed.connect(lambda _: self._pause.start()),
        )

    # Display

    def _on_target_changed(self) -> None:
        self.charts.update_chart()
        target = self._session.target
        self.resolution.setText(self.tr("Training at {side} px").format(side=target.target.resolution))
        tip = self.tr("Resolution of the job “{name}”, which uses these images") if target.job else ""
        self.resolution.setToolTip(tip.format(name=target.job) or self.tr("Resolution of the next new job"))

    def _show_findings(self, findings: tuple[HealthFinding, ...]) -> None:
        self.list.show_findings(findings)
        self.answers.setCurrentWidget(self.list if findings else self.empty_label)
        problems = sum(one.severity != "info" for one in findings)
        self.problems.setText(self.tr("Problems ({count})").format(count=problems) if problems else self.tr("Problems"))
        self._show_detail()

    def _show_progress(self, progress: HealthProgress) -> None:
        left = max(progress.inspecting, progress.judging)
        for part in (self.bar, self.progress):
            part.setVisible(bool(left and progress.total))
        self.bar.setRange(0, max(progress.total, 1))
        self.bar.setValue(progress.total - min(left, progress.total))
        self.progress.setText(self.tr("Checking %n more", "", left))
        if not progress.total:
            self.empty_label.setText(self.tr("Open a folder to see problems with its images here."))
        elif left:
            self.empty_label.setText(self.tr("No problems found so far."))
        else:
            self.empty_label.setText(self.tr("No problems found. These images are ready for training."))

    def _show_detail(self) -> None:
        """Show the remedy and the buttons for the selected problem."""
        finding = self.list.finding
        self.detail.setVisible(finding is not None)
        self.message.hide()
        if finding is None:
            return
        self.remedy.setText(finding.remedy)
        self.remedy.setVisible(bool(finding.remedy))
        title = self.tr(finding.fix_title) if finding.fix else self._action_title(finding.action)
        self.fix_button.setText(title)
        self.fix_button.setVisible(bool(title))
        self.fix_button.setEnabled(True)

    def _action_title(self, action: ByHand | None) -> str:
        titles = {
            "crop": self.tr("Choose crops…"),
            "mask": self.tr("Paint masks…"),
            "convert": self.tr("Convert to UTF-8"),
            "look": self.tr("Try again"),
            "write": self.tr("Write captions"),
        }
        return titles[action] if action else ""

    # Fixing

    def _on_fixed(self, edit: object) -> None:
        from app.core.edits.history import Edit

        assert isinstance(edit, Edit)
        if edit:
            self._session.history.do(edit)
            self.message_shown.emit(edit.name)
        self._show_detail()

    def _convert(self, finding: HealthFinding) -> None:
        images = self._session.library.images
        asked = [(images[number].folder.root, images[number].path) for number in self._in_order(finding.ids)]
        self.fix_button.setEnabled(False)
        ids = list(finding.ids)

        def done(_: object) -> None:
            self._health.inspect_again(ids)

        self._session.tasks.run(lambda: to_utf8(asked, self._session.backups), done, self._while_open(self._on_failed))

    def _on_failed(self, fault: object) -> None:
        if not isinstance(fault, ImpastoError):
            assert isinstance(fault, BaseException)
            raise fault
        self._show_detail()
        self.message.setText(full_message(fault))
        self.message.show()

    def _while_open(self, callback: Callable[[object], None]) -> Callable[[object], None]:
        """Wrap a worker's callback so that it does nothing once the panel is destroyed."""
        return lambda result: callback(result) if isValid(self) else None

    def _in_order(self, ids: Set[int]) -> list[int]:
        return [number for number in self._session.library.images if number in ids]
