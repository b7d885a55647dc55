"""The chart above the settings of the learning rate schedule; it imports numpy, so import it when it is shown."""

from __future__ import annotations

import numpy as np
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core.jobs.draft import Draft
from app.qt.runs.charts.chart import Chart
from app.qt.runs.charts.painting import ChartLine, ChartSpec, count, rate
from trainer.config.lr_schedule import curve
from trainer.config.recipe import RecipeConfig
from trainer.config.resolve import resolve_length

_HEIGHT = 170
"""Height of the chart with its title, in logical pixels."""
_TYPICAL_STEPS = 1000
"""Length to draw while neither the number of steps nor the images are known."""


class ScheduleChart(QWidget):
    """Chart of the learning rate at each step of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.chart = Chart(self.tr("Learning rate over the run"), rate)
        self._shown: object = None
        self.chart.setFixedHeight(_HEIGHT)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 4, 0, 8)
        column.addWidget(self.chart)

    def show_draft(self, draft: Draft, samples: int | None) -> None:
        """Draw this job's schedule; `samples` is the number of samples per epoch, or None if unknown."""
        job = draft.valid_part
        if job is None:
            return
        recipe = job.recipe
        steps = resolve_length(recipe, samples).steps if samples else recipe.steps or _TYPICAL_STEPS
        state = (recipe.schedule, _highest_rate(recipe), steps)
        if state != self._shown:
            self._shown = state
            self._draw(*curve(recipe.schedule, steps), _highest_rate(recipe))

    def _draw(self, steps: list[int], factors: list[float], highest: float) -> None:
        values = np.array(factors) * highest
        words = self.tr(
            "The learning rate starts at {first}, is at most {most} and ends at {last} after {steps} steps."
        )
        description = words.format(
            first=rate(float(values[0])),
            most=rate(float(values.max())),
            last=rate(float(values[-1])),
            steps=count(steps[-1] + 1),
        )
        line = ChartLine(self.tr("learning rate"), np.array(steps, dtype=float), values, "plain")
        self.chart.draw(ChartSpec((line,), words=description))
        self.chart.show_steps(0, steps[-1])


def _highest_rate(recipe: RecipeConfig) -> float:
    """Return the UNet's learning rate, or that of a text encoder if only text encoders are trained."""
    return recipe.learning_rate or recipe.text_encoder.learning_rate or recipe.text_encoder_2.learning_rate
