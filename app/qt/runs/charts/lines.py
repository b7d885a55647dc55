"""What a chart is told to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from app.core.runs.curves import Values
from app.core.runs.series import Mark

Look = Literal["raw", "smooth", "thin", "plain", "dashed", "dotted", "points"]
"""Raw: each step, pale. Smooth: the line one reads. Thin: each step, where that is what one reads. Plain, dashed,
dotted: lines without noise. Points: each counts."""


@dataclass(frozen=True)
class Line:
    """One line: values (points,) by rising steps (points,)."""

    label: str
    steps: Values
    values: Values
    look: Look
    colour: str = "series1"
    """A role of `Colours`."""
    run: str = ""
    """The run's name, where several are laid over each other."""


@dataclass(frozen=True)
class Level:
    """A value that holds for all steps, such as a limit."""

    label: str
    value: float
    colour: str = "muted"


@dataclass(frozen=True)
class Drawing:
    """All of one chart."""

    lines: Sequence[Line] = ()
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    best: int | None = None
    """The step with the lowest held-out loss."""
    title: str = ""
    """Instead of the chart's own, where that leaves open what is drawn."""
    logarithmic: bool = False
    clip: float = 0.0
    """Per cent of the raw values at either end that the axis need not have room for."""
    words: str = ""
    """What the chart shows, for who does not see it."""
    extra: tuple[tuple[str, str], ...] = field(default=())
    """Further entries of the legend: (label, colour)."""
