"""The panel of problems and charts, at the right of the pictures."""

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
from app.core.words import in_words
from app.qt.actions.commands import Action, Commands
from app.qt.pictures.health.charts import BarChart, ColumnChart, HealthChart, SizeMap
from app.qt.pictures.health.finding_list import FindingView
from app.qt.theme import set_icon
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, until_destroyed
from trainer.errors import ImpastoError

# Rare tags are counted again when nothing has changed for so long.
_PAUSE_MS = 1500
_RESOLUTIONS = (512, 768, 1024)
ACTIONS = (
    Action(
        "health.crop",
        QT_TRANSLATE_NOOP("Action", "Choose crops…"),
        "pictures",
        "choose_crops",
        ("K",),
        "has_chosen",
        icon="crop",
        tip=QT_TRANSLATE_NOOP("Action", "Shows what training sees of the selected pictures, and lets you move it."),
    ),
    Action(
        "health.mask",
        QT_TRANSLATE_NOOP("Action", "Paint masks…"),
        "pictures",
        "paint_masks",
        ("M",),
        "has_chosen",
        icon="brush",
        tip=QT_TRANSLATE_NOOP("Action", "Says which parts of the selected pictures are trained."),
    ),
)


class ChartsView(QWidget):
    """Buckets, sizes, caption lengths and tags; `chosen` with the pictures of the bar that is clicked."""

    chosen = Signal(object)

    def __init__(self, health: Health, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._health = health
        self.choice = ComboBox()
        self.buckets = BarChart(self.tr("Shapes as training sees them"))
        self.sizes = SizeMap(self.tr("Widths and heights"))
        self.lengths = ColumnChart(self.tr("Lengths of captions in tokens"))
        self.tags = BarChart(self.tr("Most frequent tags"))
        self.note = QLabel()
        self.stack = QStackedWidget()
        self._build()

    def renew(self) -> None:
        """Show what is so now; only the chart that is seen costs anything."""
        if not self.isVisible():
            return
        health, chart = self._health, self.choice.currentIndex()
        if chart == 0:
            bars = charts.buckets(health)
            self.buckets.show_bars(bars)
            self.note.setText(self.tr("%n shape(s) at {side} pixels", "", len(bars)).format(side=health.aim.resolution))
        elif chart == 1:
            self.sizes.show_cells(charts.sizes(health), health.aim.resolution)
            self.note.setText(
                self.tr("Below the line: fewer pixels than {side} × {side}").format(side=health.aim.resolution)
            )
        elif chart == 2:
            self.lengths.show_bars(charts.caption_lengths(health), health.aim.tokens)
            self.note.setText(self.tr("Tokens; what lies beyond {read} is not read").format(read=health.aim.tokens))
        else:
            self.tags.show_bars(charts.frequent_tags(health))
            self.note.setText(self.tr("The most frequent tags"))

    def showEvent(self, event: object) -> None:  # noqa: N802
        """Catch up with what changed meanwhile."""
        super().showEvent(event)  # type: ignore[arg-type]
        self.renew()

    def _build(self) -> None:
        self.choice.addItems([self.tr("Shapes"), self.tr("Sizes"), self.tr("Captions"), self.tr("Tags")])
        self.choice.setAccessibleName(self.tr("Chart"))
        self.choice.currentIndexChanged.connect(self._choose)
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

    def _choose(self, chart: int) -> None:
        self.stack.setCurrentIndex(chart)
        self.renew()

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
    """Lists what is wrong; a click shows the pictures, a button mends it.

    `said` carries sentences for the status line; `write_asked` is for whoever knows where captions are written.
    """

    said = Signal(str)
    write_asked = Signal()

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._health = session, session.health
        self.problems, self.figures = QToolButton(), QToolButton()
        self.resolution = QToolButton()
        self.list = FindingView()
        self.well = QLabel()
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
        self._show_findings(self._health.now)
        self._tell_progress(self._health.state())
        self._changed()
        commands.add(ACTIONS, self)

    # What the user asks for

    def show_pictures(self) -> None:
        """Show the pictures of the chosen finding."""
        finding = self.list.finding
        if finding and finding.ids:
            self._session.filtering.apply(finding.query)
            ids = self._session.view.ids
            if ids:
                self._session.view.select([ids[0]], ids[0])

    def mend(self) -> None:
        """Do what the button of the chosen finding says."""
        finding = self.list.finding
        self.message.hide()
        if finding is None:
            return
        if finding.fix is not None:
            self.fix_button.setEnabled(False)
            self._session.tasks.run(finding.fix, self._here(self._mended), self._here(self._refused))
        elif finding.action == "convert":
            self._convert(finding)
        elif finding.action == "look":
            self._health.begin()
        elif finding.action == "write":
            self.show_pictures()
            self.write_asked.emit()
        elif finding.action:
            self._lead(finding.action, self._in_order(finding.ids))

    def select(self, ids: Set[int]) -> None:
        """Select the pictures of a bar; where the filter hides some, it is lifted."""
        view = self._session.view
        if not ids <= set(view.ids):
            self._session.filtering.apply("")
        first = next((number for number in view.ids if number in ids), None)
        view.select(ids, first)
        self.said.emit(self.tr("%n picture(s) selected", "", len(ids)))

    def aim(self, resolution: int) -> None:
        """Train at another resolution, and judge for it."""
        self._session.target.set("resolution", resolution)

    def has_chosen(self) -> bool:
        """Tell whether there is something to work on."""
        return bool(self._chosen())

    def paint_masks(self) -> None:
        """Paint the masks of the selected pictures, or of the current one."""
        self._lead("mask", self._chosen())

    def choose_crops(self) -> None:
        """Choose which part of the selected pictures, or of the current one, is trained."""
        self._lead("crop", self._chosen())

    def _chosen(self) -> list[int]:
        view = self._session.view
        return list(view.scope()) or ([] if view.current is None else [view.current])

    def _lead(self, action: ByHand, ids: list[int]) -> None:
        """Open the place where the user mends it by hand; what it imports is loaded only then."""
        view = self._session.view
        place: QDialog
        if action == "mask":
            from app.qt.pictures.masks.painter import MaskPainter

            place = MaskPainter(self._session, ids, view.current, self)
        else:
            from app.qt.pictures.health.cropper import Cropper

            place = Cropper(self._session, ids, view.current, self)
        place.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        place.open()

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
            menu.addAction(self.tr("{side} pixels").format(side=side), partial(self.aim, side))
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
        self.well.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.well.setWordWrap(True)
        self.well.setContentsMargins(16, 16, 16, 16)
        self.answers.addWidget(self.list)
        self.answers.addWidget(self.well)
        self.remedy.setWordWrap(True)
        self.remedy.setProperty("role", "muted")
        self.message.setWordWrap(True)
        self.message.setProperty("role", "bad")
        self.message.hide()
        self.show_button.setText(self.tr("Show pictures"))
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
        self.bar.setAccessibleName(self.tr("Pictures looked at"))
        self.progress.setProperty("role", "muted")
        row = QHBoxLayout()
        row.setContentsMargins(10, 2, 10, 5)
        row.setSpacing(8)  # else it takes the column's, which is none
        row.addWidget(self.bar)
        row.addWidget(self.progress, 1)
        return row

    def _connect(self) -> None:
        health = self._health
        self._pause.setSingleShot(True)
        self._pause.setInterval(_PAUSE_MS)
        self._pause.timeout.connect(health.refresh)
        self.list.asked.connect(self.show_pictures)
        self.list.selectionModel().currentChanged.connect(lambda *_: self._detail())
        self.list.findings.modelReset.connect(self._detail)
        self.show_button.clicked.connect(self.show_pictures)
        self.fix_button.clicked.connect(self.mend)
        self.charts.chosen.connect(self.select)
        until_destroyed(
            self,
            health.findings.connect(self._show_findings),
            health.progress.connect(self._tell_progress),
            health.charts.connect(lambda _: self._changed()),
            self._session.target.changed.connect(lambda _: self._changed()),
            self._session.tags.changed.connect(lambda _: self._pause.start()),
        )

    # What is known now

    def _changed(self) -> None:
        self.charts.renew()
        target = self._session.target
        self.resolution.setText(self.tr("Training at {side} px").format(side=target.aim.resolution))
        tip = self.tr("Resolution of the job “{name}”, which uses these images") if target.job else ""
        self.resolution.setToolTip(tip.format(name=target.job) or self.tr("Resolution of the next new job"))

    def _show_findings(self, findings: tuple[HealthFinding, ...]) -> None:
        self.list.show_findings(findings)
        self.answers.setCurrentWidget(self.list if findings else self.well)
        problems = sum(one.severity != "info" for one in findings)
        self.problems.setText(self.tr("Problems ({count})").format(count=problems) if problems else self.tr("Problems"))
        self._detail()

    def _tell_progress(self, progress: HealthProgress) -> None:
        left = max(progress.inspecting, progress.judging)
        for part in (self.bar, self.progress):
            part.setVisible(bool(left and progress.total))
        self.bar.setRange(0, max(progress.total, 1))
        self.bar.setValue(progress.total - min(left, progress.total))
        self.progress.setText(self.tr("Looking at %n more", "", left))
        if not progress.total:
            self.well.setText(self.tr("Open a folder, and what is wrong with its pictures stands here."))
        elif left:
            self.well.setText(self.tr("Nothing wrong so far."))
        else:
            self.well.setText(self.tr("All is well. Nothing stands against training with these pictures."))

    def _detail(self) -> None:
        """Say what to do about the chosen finding."""
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
            "convert": self.tr("Write as UTF-8"),
            "look": self.tr("Try again"),
            "write": self.tr("Write captions"),
        }
        return titles[action] if action else ""

    # Mending

    def _mended(self, edit: object) -> None:
        from app.core.edits.history import Edit

        assert isinstance(edit, Edit)
        if edit:
            self._session.history.do(edit)
            self.said.emit(edit.name)
        self._detail()

    def _convert(self, finding: HealthFinding) -> None:
        pictures = self._session.library.pictures
        asked = [(pictures[number].folder.root, pictures[number].path) for number in self._in_order(finding.ids)]
        self.fix_button.setEnabled(False)
        ids = list(finding.ids)

        def done(_: object) -> None:
            self._health.look_again(ids)

        self._session.tasks.run(lambda: to_utf8(asked, self._session.backups), done, self._here(self._refused))

    def _refused(self, fault: object) -> None:
        if not isinstance(fault, ImpastoError):
            assert isinstance(fault, BaseException)
            raise fault
        self._detail()
        self.message.setText(in_words(fault))
        self.message.show()

    def _here(self, have: Callable[[object], None]) -> Callable[[object], None]:
        """Return a receiver for a worker's result that lets it drop when the panel is gone by then."""
        return lambda result: have(result) if isValid(self) else None

    def _in_order(self, ids: Set[int]) -> list[int]:
        return [number for number in self._session.library.pictures if number in ids]
