"""The pages that are made after the window has opened, and what to load before each, so that no piece of it is long.

Most of their modules are none of Qt's; a worker loads those. The rest makes classes of Qt's: that is for the window's
thread, a part in each turn. Who goes to a page earlier sees its title at once, and it is made before the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from app.core.query import tokens
from trainer.errors import ImpastoError

BESIDE = (
    "app.core.disk.scanner",
    "app.core.disk.images",
    "app.core.disk.reading",
    "app.core.health.judging",
    "app.core.health.judging",
    "app.core.health.findings",
    "trainer.dataset.decoders",
    "app.core.jobs.essentials",
    "app.core.planning.answer",
    "app.core.after.export",
    "app.core.after.export",
    "app.core.runs.run",
    "app.core.runs.series",
    "app.core.after.run_jobs",
    "app.core.runs.runs",
    "app.core.after.run_jobs",
    "app.core.after.export",
    "app.core.presets.receiving",
)
"""What is none of Qt's: numpy and Pillow, for which the first thumbnails would wait half a second, what judges
pictures, then what the pages need; it brings the rest with it, pydantic's models of a job above all."""


@dataclass(frozen=True, slots=True)
class Room:
    """A page's module and class, and the modules of its larger parts."""

    module: str
    page: str
    parts: tuple[str, ...] = ()

    def load(self) -> Iterator[None]:
        """Load one thing at a time."""
        for module in (*self.parts, self.module):
            importlib.import_module(module)
            yield


TRAIN = Room("app.qt.train.page", "TrainPage", ("app.qt.train.forecast.panel", "app.qt.train.essentials"))
RUNS = Room(
    "app.qt.runs.page",
    "RunsPage",
    (
        "app.qt.runs.after.export_dialog",
        "app.qt.runs.after.exporting",
        "app.qt.runs.after.grid_dialog",
        "app.qt.runs.after.panel",
        "app.qt.runs.queue_panel",
        "app.qt.runs.log_view",
        "app.qt.runs.samples.matrix",
        "app.qt.runs.charts.drawings",
        "app.qt.runs.charts.board",
        "app.qt.runs.header",
    ),
)
PRESETS = Room(
    "app.qt.presets.page", "PresetsPage", ("app.qt.presets.cards", "app.qt.presets.details", "app.qt.presets.receive")
)


def load_beside() -> None:
    """Load what is none of Qt's; on a worker."""
    from trainer.dataset.pixels import load_formats

    for module in BESIDE:
        importlib.import_module(module)
    load_formats()


def load_vocabulary() -> None:
    """Load CLIP's; on a worker. Its library holds Python's lock for 40 ms, which nobody feels before a dataset is open.

    No page needs it: where it is missing, the counting of tokens says so when somebody asks for that.
    """
    with suppress(ImpastoError):
        tokens.load()
