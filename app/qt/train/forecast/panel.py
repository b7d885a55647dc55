"""Forecast panel of the Train page: headline, GPU memory, timeline, problems and alternative plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QComboBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from app.core.jobs.job_file import drop, put
from app.core.planning.answer import AnsweredPlan, PlanAnswer, preflight
from app.core.planning.forecaster import GPU_MEMORY_SIZES, HERE, REFERENCE_GPU, Forecaster, ForecastRequest
from app.core.planning.sweeper import settings_of
from app.core.session import Session
from app.core.words import full_message
from app.qt.actions.commands import Action, Commands
from app.qt.train import words
from app.qt.train.forecast.charts import MemoryBar, PeakMark, Timeline
from app.qt.train.forecast.lists import KindTable, PhaseTable, PlanTable, PreflightList
from app.qt.train.sweep import SweepDialog
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox
from trainer.protocol.forecast import SEARCHED_FIT_KEYS

if TYPE_CHECKING:
    from app.core.jobs.draft import Draft
    from trainer.protocol.sweep import SweepPoint


_NAMES = 4
# Free memory changes slightly all the time; a forecast for each change would never settle.
_WORTH_ASKING = 256 << 20
ACTIONS = (
    Action(
        "forecast.refresh",
        QT_TRANSLATE_NOOP("Action", "Forecast again"),
        "train",
        "ask_again",
        enabled="has_job",
        icon="refresh",
        tip=QT_TRANSLATE_NOOP("Action", "Reads the images, captions and GPU state again."),
    ),
    Action(
        "forecast.plan_again",
        QT_TRANSLATE_NOOP("Action", "Plan memory settings again"),
        "train",
        "plan_again",
        enabled="has_planned_keys",
        tip=QT_TRANSLATE_NOOP("Action", "Removes the chosen memory settings from the job and plans them again."),
    ),
    Action(
        "forecast.sweep",
        QT_TRANSLATE_NOOP("Action", "Find settings that fill the GPU…"),
        "train",
        "show_sweep",
        enabled="has_job",
        tip=QT_TRANSLATE_NOOP(
            "Action", "Tries batches, resolutions, ranks and ways of saving memory for the chosen GPU."
        ),
    ),
)


class GpuChooser(QWidget):
    """Chooser for the device whose details are shown; emits `chosen` with `HERE`, a GPU name or a memory size."""

    chosen = Signal(str)

    def __init__(self, forecaster: Forecaster, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._forecaster = forecaster
        self._on_cpu = False
        self.box, self.uses = ComboBox(), QLabel()
        self._build()
        self._fill()
        self.box.activated.connect(lambda _: self.chosen.emit(self.gpu))
        line = self.box.lineEdit()
        assert line is not None
        line.returnPressed.connect(lambda: self.chosen.emit(self.gpu))

    @property
    def gpu(self) -> str:
        """Return the chosen device: `HERE`, a GPU name as the user typed it, or a memory size such as "8GB"."""
        text = self.box.currentText().strip()
        known = self.box.findText(text)
        return str(self.box.itemData(known)) if known >= 0 else text or HERE

    def renew(self, *, on_cpu: bool) -> None:
        """Update the list's entry for this PC (its GPU or CPU) and the note about its GPU."""
        self._on_cpu = on_cpu
        if self.box.itemText(0) != self._here():
            self._fill()
        self.uses.setText(self._uses())
        self.uses.setVisible(bool(self.uses.text()))

    def _build(self) -> None:
        label = QLabel(self.tr("Details for"))
        label.setBuddy(self.box)
        self.box.setEditable(True)
        self.box.setInsertPolicy(QComboBox.InsertPolicy.NoInsert)
        self.box.setAccessibleName(self.tr("Device that the details are for"))
        self.box.setToolTip(
            self.tr("To compare, choose another GPU or type its name, such as RTX 4070. Training does not use it.")
        )
        self.uses.setTextFormat(Qt.TextFormat.PlainText)
        self.uses.setWordWrap(True)
        self.uses.setProperty("role", "muted")
        row, column = QHBoxLayout(), QVBoxLayout(self)
        row.addWidget(label)
        row.addWidget(self.box, 1)
        column.setContentsMargins(0, 0, 0, 0)
        column.addLayout(row)
        column.addWidget(self.uses)

    def _fill(self) -> None:
        """List the devices, this PC's first, and keep the user's choice."""
        former = self.gpu if self.box.count() else HERE
        self.box.clear()
        self.box.addItem(self._here(), HERE)
        self.box.addItem(REFERENCE_GPU, REFERENCE_GPU)
        for gigabytes in GPU_MEMORY_SIZES:
            self.box.addItem(self.tr("GPU with {size} GB").format(size=gigabytes), f"{gigabytes}GB")
        self.box.setCurrentIndex(max(self.box.findData(former), 0))
        if self.box.findData(former) < 0 and former != HERE:
            self.box.setEditText(former)

    def _here(self) -> str:
        gpu = self._forecaster.here
        if self._on_cpu or gpu is None:
            return self.tr("This PC: CPU")
        return self.tr("This PC: {gpu}").format(gpu=_short(gpu.name))

    def _uses(self) -> str:
        """Return a note about this PC's GPU, such as its free memory or why it is unused; "" if there is none."""
        forecaster = self._forecaster
        if forecaster.gpus is None:
            return ""
        if forecaster.gpu_error is not None:
            return full_message(forecaster.gpu_error)
        gpu = forecaster.here
        if gpu is None:
            return self.tr("No NVIDIA GPU was found, so training uses the CPU.")
        if self._on_cpu:
            return self.tr("This job trains on the CPU.")
        if self.gpu != HERE:
            return ""
        free = self.tr("{free} of {total} free.").format(
            free=words.format_memory(gpu.free_bytes), total=words.format_memory(gpu.total_bytes)
        )
        texts = [f"{use.name} {words.format_memory(use.bytes)}" if use.bytes else use.name for use in gpu.uses[:_NAMES]]
        others = self.tr("Also in use by {programs}.").format(programs=", ".join(texts)) if texts else ""
        return f"{free} {others}".strip()


def _short(name: str) -> str:
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


# Pause in typing before a request, and interval of reading this PC's GPU while the panel is visible.
_PAUSE_MS, _LOOK_MS = 250, 5000


class ForecastPanel(QWidget):
    """Panel that requests a new forecast when the job changes; until it arrives, the old one is marked outdated."""

    message_shown = Signal(str)
    notified = Signal(str, str, object)
    failed = Signal(object)
    wanted = Signal(str)
    """Key of the setting that the user wants to see."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.commands = session, commands
        self.forecaster = Forecaster(session.tasks, session.tasks.post)
        self._draft: Draft | None = None
        self._leave: list[Callable[[], None]] = []
        self._fresh = False
        self._soon, self._looks = QTimer(self), QTimer(self)
        self.chooser = GpuChooser(self.forecaster)
        self.headline, self.state, self.stale = QLabel(), QLabel(), QLabel()
        self.bar = QProgressBar()
        self.checks = PreflightList()
        self.memory, self.timeline, self.marker = MemoryBar(), Timeline(), QLabel()
        self.kinds = KindTable()
        self.phases, self.plans, self.fallbacks = PhaseTable(), PlanTable(), QLabel()
        self.again = QPushButton()
        self.comparison, self.timeline_title = QLabel(), QLabel()
        self._of_gpu: list[QWidget] = []
        """Widgets that are shown only if training uses a GPU."""
        self.key = QLabel()
        """Legend of the timeline."""
        self.figures = QWidget()
        self._shown: PlanAnswer | None = None
        self._build()
        self._connect()
        self._renew()
        commands.add(ACTIONS, self)

    def show_draft(self, draft: Draft | None) -> None:
        """Forecast this job from now on; for None, show no forecast."""
        for leave in self._leave:
            leave()
        self._leave, self._draft, self._fresh = [], draft, False
        self.forecaster.clear()
        if draft is not None:
            self._leave = [
                draft.changed.connect(lambda _: self._outdate()),
                draft.file.written.connect(lambda _: self._ask_soon()),
            ]
            self._ask_soon()
        self._renew()

    def has_job(self) -> bool:
        """Return whether there is a valid job to forecast."""
        return self._draft is not None and self._draft.job is not None

    def cpu_seconds(self, draft: Draft) -> float | None:
        """Return a job's forecast duration on the CPU in seconds; None if it uses a GPU or has no current forecast."""
        answer = self.forecaster.answer
        if draft is not self._draft or not self.forecaster.settled or answer is None:
            return None
        return answer.pick.forecast.seconds if answer.on_cpu and answer.pick else None

    def awaits_cpu_seconds(self, draft: Draft) -> bool:
        """Return whether a job will train on the CPU and its forecast is still pending."""
        asks = draft is self._draft and draft.job is not None and self.isVisible()
        return asks and self._on_cpu() and not self.forecaster.settled

    def ask_again(self) -> None:
        """Request the forecast again."""
        self._choose()

    def has_planned_keys(self) -> bool:
        """Return whether the job sets a key that the planner would otherwise choose."""
        draft = self._draft
        return draft is not None and any(draft.get(f"fit.{name}") is not None for name in SEARCHED_FIT_KEYS)

    def plan_again(self) -> None:
        """Remove from the job all keys that the planner can choose, so that they are planned again."""
        if self._draft is not None:

            def work(values: dict[str, Any]) -> None:
                for name in SEARCHED_FIT_KEYS:
                    drop(values, f"fit.{name}")

            self._draft.edit(self.tr("Plan memory settings again"), work)

    def show_sweep(self) -> None:
        """Open the window with the configurations that fill the chosen GPU best."""
        if self._draft is not None:
            request = ForecastRequest.of(self._draft, self.chooser.gpu)
            dialog = SweepDialog(self.session, request, self)
            dialog.applied.connect(partial(self._take_configuration, self._draft))
            dialog.show()

    # --- Qt's events

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Read the GPU's state, and request the forecast if it is outdated."""
        super().showEvent(event)
        self.forecaster.read_gpus()
        self._looks.start(_LOOK_MS)
        if not self._fresh:
            self._ask_soon()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop the planner, which holds memory that training may need."""
        super().hideEvent(event)
        self._looks.stop()
        self._soon.stop()
        self._fresh = self._fresh and not self.forecaster.waiting  # a canceled forecast is requested again when shown
        self.forecaster.stop()

    # --- asking

    def _outdate(self) -> None:
        """Mark the forecast as outdated because the job changed."""
        self._fresh = False
        self.forecaster.mark_outdated()
        self._renew()
        if self._draft is not None and not self._draft.file.unsaved:
            self._ask_soon()

    def _ask_soon(self) -> None:
        if self.isVisible():
            self._soon.start(_PAUSE_MS)

    def _ask(self) -> None:
        draft = self._draft
        if draft is None or draft.job is None or draft.file.unsaved or self.forecaster.gpus is None:
            return  # a change of any of these requests the forecast again
        self._fresh = True
        self.forecaster.ask(ForecastRequest.of(draft, HERE), self._compared_gpu())

    def _on_cpu(self) -> bool:
        """Return whether training will use the CPU: the job says so, or this PC has no working GPU."""
        by_job = self._draft is not None and self._draft.get("fit.device") == "cpu"
        return by_job or self.forecaster.gpus == ()

    def _compared_gpu(self) -> str | None:
        """Return the other GPU that the details are for, or None if they are for the device that training uses."""
        return None if self.chooser.gpu == HERE else self.chooser.gpu

    def _detailed(self) -> PlanAnswer | None:
        """Return the answer that the details show, or None if there is none yet."""
        return self.forecaster.answer if self._compared_gpu() is None else self.forecaster.compared

    def _on_gpus_changed(self) -> None:
        """Request the forecast again if other programs took or freed much GPU memory."""
        self.chooser.renew(on_cpu=self._on_cpu())
        answer, gpu = self.forecaster.answer, self.forecaster.here
        if gpu and answer and not answer.on_cpu and not self.forecaster.waiting:
            moved = abs(gpu.free_bytes - answer.gpu.free)
            self._fresh = self._fresh and moved < _WORTH_ASKING
        if not self._fresh:
            self._ask_soon()

    def _on_images_changed(self) -> None:
        """If the panel is hidden, mark the forecast as outdated: images or captions changed on another page."""
        self._fresh = self._fresh and self.isVisible()

    def _choose(self) -> None:
        self._fresh = False
        self.chooser.renew(on_cpu=self._on_cpu())
        self.forecaster.mark_outdated()
        self._ask_soon()

    # --- changing the job

    def _take(self, keys: Mapping[str, Any], title: str) -> None:
        """Write a plan's keys into the job as a single undo step."""
        if self._draft is not None:

            def work(values: dict[str, Any]) -> None:
                for key, value in keys.items():
                    put(values, key, value)

            self._draft.edit(self.tr("Plan: {title}").format(title=title), work)
            self.message_shown.emit(self.tr("Plan applied to the job. Undo removes it."))

    def _take_configuration(self, draft: Draft, point: SweepPoint) -> None:
        """Write a configuration's settings into the job that it was found for, if that is still open."""
        if draft is self._draft:
            recipe = draft.job.recipe if draft.job and draft.get("recipe.alpha") is not None else None
            keys = settings_of(point, recipe)
            self._take(keys, self.tr("settings that fill the GPU"))

    # --- showing

    def _renew(self) -> None:
        forecaster, answer = self.forecaster, self._detailed()
        best = answer.best if answer else None
        self.headline.setText(self._headline(forecaster.answer))
        self.headline.setVisible(bool(self.headline.text()))
        compared = forecaster.compared if self._compared_gpu() is not None else None
        self.comparison.setText(words.comparison(compared) if compared else "")
        self.comparison.setVisible(compared is not None)
        self.stale.setText(self._stale_words())
        self.stale.setVisible(forecaster.stale)
        self.state.setText(self._state_words())
        self.state.setVisible(bool(self.state.text()))
        self.bar.setVisible(forecaster.waiting and forecaster.state != "picked")
        self.figures.setVisible(best is not None)
        self.chooser.renew(on_cpu=self._on_cpu())
        self.plans.setEnabled(not forecaster.stale)
        if answer is not None and best is not None and answer is not self._shown:
            self._shown = answer
            self._show_figures(answer, best)
        self._renew_checks()

    def _show_figures(self, answer: PlanAnswer, best: AnsweredPlan) -> None:
        """Show an answer's details; for the CPU, hide the GPU memory and the alternative plans."""
        for part in self._of_gpu:
            part.setVisible(not answer.on_cpu)
        self.timeline_title.setText(
            self.tr("Time and main memory") if answer.on_cpu else self.tr("Memory over the run")
        )
        self.phases.show_plan(best)
        if answer.on_cpu:
            return
        self.memory.show_plan(answer, best)
        self.timeline.show_forecast(best.forecast)
        self.key.setText(self._key_words(best))
        self.plans.show_answer(answer)
        self.fallbacks.setText(
            "\n".join(f"{n}. {words.fallback(fallback)}" for n, fallback in enumerate(answer.fallbacks, start=1))
        )

    def _renew_checks(self) -> None:
        draft = self._draft
        if draft is not None:
            answer = None if self.forecaster.stale else self.forecaster.answer
            self.checks.show_checks(preflight(draft, answer, self.forecaster.error))
        self.checks.setVisible(draft is not None and not (self.forecaster.waiting and not self.checks.checks))
        self.again.setVisible(self.has_planned_keys())

    def _headline(self, answer: PlanAnswer | None) -> str:
        if self._draft is None:
            return self.tr("Set up a job to see its time and memory.")
        if answer is not None:
            return words.headline(answer, here=True)
        if self._draft.job is None:
            return self.tr("Fix the items below to see time and memory.")
        return self.tr("Forecasting time and memory…") if self.forecaster.error is None else ""

    def _stale_words(self) -> str:
        """Return a sentence saying that the forecast is outdated and whether a new one is being computed."""
        if self._draft is None or self._draft.job is None or self.forecaster.state == "failed":
            return self.tr("This forecast is from before the last change.")
        return self.tr("This forecast is from before the last change; updating…")

    def _state_words(self) -> str:
        forecaster = self.forecaster
        if forecaster.state == "tracing":
            computing = self.tr("Computing new settings (only once, up to half a minute)…")
            return f"{words.estimate(forecaster.estimate)}\n{computing}" if forecaster.estimate else computing
        return {"reading": self.tr("Reading the images…"), "asked": self.tr("Forecasting…")}.get(forecaster.state, "")

    def _show_marker(self, spot: PeakMark | None) -> None:
        """Show a peak's phase, name and size, and what holds its memory; nothing for None."""
        self.marker.setText(words.peak_name(spot.phase, spot.peak) if spot else "")
        self.kinds.show_peak(spot.peak if spot else None)

    # --- building

    def _build(self) -> None:
        self._soon.setSingleShot(True)
        font = self.headline.font()
        font.setPointSizeF(font.pointSizeF() * 1.25)
        font.setBold(True)
        self.headline.setFont(font)
        self.stale.setProperty("role", "warning")
        self.state.setProperty("role", "muted")
        self.bar.setRange(0, 0)
        self.bar.setTextVisible(False)
        self.bar.setFixedHeight(6)
        self.bar.setAccessibleName(self.tr("The forecast is being computed"))
        self.again.setText(self.tr("Plan memory settings again"))
        self.again.setToolTip(self.tr("Removes the memory settings chosen here from the job and plans them again."))
        self.marker.setMinimumHeight(self.marker.fontMetrics().lineSpacing() * 2)
        self.marker.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.key.setProperty("role", "muted")
        self.comparison.setProperty("role", "muted")
        for label in (self.headline, self.comparison, self.state, self.stale, self.key, self.marker, self.fallbacks):
            label.setTextFormat(Qt.TextFormat.PlainText)
            label.setWordWrap(True)
        inner = QWidget()
        column = QVBoxLayout(inner)
        column.setSpacing(8)
        asked = (self.headline, self.stale, self.state, self.bar)
        for part in (*asked, self.chooser, self.comparison, self.checks, self.again):
            column.addWidget(part)
        column.addWidget(self._figures())
        column.addStretch()
        area = QScrollArea()
        area.setWidgetResizable(True)
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setAccessibleName(self.tr("Forecast"))
        area.setWidget(inner)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(area)

    def _figures(self) -> QWidget:
        column = QVBoxLayout(self.figures)
        column.setContentsMargins(0, 4, 0, 0)
        column.setSpacing(6)
        for heading, parts in (
            (QLabel(self.tr("Memory at the peak")), (self.memory,)),
            (self.timeline_title, (self.timeline, self.key, self.marker, self.kinds, self.phases)),
            (QLabel(self.tr("Plans")), (self.plans,)),
            (QLabel(self.tr("If memory still runs out")), (self.fallbacks,)),
        ):
            heading.setProperty("role", "heading")
            heading.setContentsMargins(0, 8, 0, 0)
            column.addWidget(heading)
            for part in parts:
                column.addWidget(part)
            self._of_gpu += [part for part in (heading, *parts) if part not in (self.timeline_title, self.phases)]
        return self.figures

    def _key_words(self, plan: AnsweredPlan) -> str:
        """Return the timeline's legend, as a sentence."""
        colors = self.tr("Colored: in use. Gray: reserved.")
        if self.timeline.shows_limit:
            return f"{colors} {self.tr('Dashed: limit.')}"
        limit = self.tr("The limit ({size}) is far above the chart.")
        return f"{colors} {limit.format(size=words.format_memory(plan.forecast.budget))}"

    def _connect(self) -> None:
        self._soon.timeout.connect(self._ask)
        self._looks.timeout.connect(self.forecaster.read_gpus)
        self.chooser.chosen.connect(lambda _: self._choose())
        self.timeline.pointed.connect(self._show_marker)
        self.plans.applied.connect(self._take)
        self.again.clicked.connect(self.plan_again)
        self.checks.wanted.connect(self.wanted)
        ends = [
            self.forecaster.changed.connect(lambda _: self._renew()),
            self.forecaster.gpus_read.connect(lambda _: self._on_gpus_changed()),
            self.session.library.altered.connect(lambda _: self._on_images_changed()),
        ]
        forecaster = self.forecaster

        def leave() -> None:
            for end in ends:
                end()
            forecaster.close()

        self.destroyed.connect(leave)
