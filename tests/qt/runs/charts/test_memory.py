"""Memory of a run by phase: what is measured beside what was forecast, what holds a peak, and leaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor
from pytestqt.qtbot import QtBot

from app.core.runs.run import Run
from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.runs.charts.memory import RunMemory
from app.qt.runs.charts.panel import ProgressPanel
from app.qt.theme import colors
from tests.support.runs import GIB, write_events, write_run
from trainer.protocol import events

LEAK = events.MemoryLeak(500, "gpu", 350, 0.02, 8 * GIB, GIB, {"float32 4x64x64": GIB // 2})


@pytest.fixture
def run(qtbot: QtBot, session: Session, tmp_path: Path) -> Run:
    """A run of 600 steps of which 300 are done."""
    run = session.runs.open(write_run(tmp_path, "cats", 600, 300, "running").path)
    run.read()
    qtbot.waitUntil(lambda: run.loaded)
    return run


@pytest.fixture
def memory(qtbot: QtBot, run: Run) -> RunMemory:
    memory = RunMemory()
    qtbot.addWidget(memory)
    memory.resize(800, 600)
    memory.show_run(run)
    with qtbot.waitExposed(memory):
        memory.show()
    return memory


def lines(memory: RunMemory, across: float) -> Iterator[int]:
    """Yield the rows of the timeline that are painted in the color of measured memory, in a column of pixels."""
    shown, wanted = memory.timeline.grab().toImage(), QColor(colors().series2).rgb()
    yield from (row for row in range(shown.height()) if shown.pixel(round(across), row) == wanted)


def test_each_phase_has_its_measured_peaks_beside_the_forecast(memory: RunMemory, run: Run) -> None:
    rows = {texts[1]: texts[2:] for texts in memory.table.rows}
    assert list(rows) == ["Load the base", "Encode images", "First step", "Training", "Generate previews"]
    assert rows["Load the base"] == ["5.1 GiB", "7.4 GiB", "-31.1%", "5.3 GiB", "7.7 GiB", "-31.2%"]
    highest = max(run.series.memory.values[1:])
    assert rows["Training"][0] == "7.6 GiB"
    assert rows["Training"][2] == f"+{100 * (highest / int(7.4 * GIB) - 1):.1f}%"
    assert rows["Generate previews"][3:] == ["7.7 GiB", "7.7 GiB", "0.0%"]


def test_measured_lines_stand_at_their_height_and_training_at_its_steps(memory: RunMemory) -> None:
    timeline = memory.timeline
    columns = {phase.phase: (left, width) for phase, left, width in timeline._columns()}
    left, width = columns["load"]
    rows = list(lines(memory, left + width / 4))
    assert any(abs(row - timeline._height_of(int(5.1 * GIB))) <= 2 for row in rows)
    left, width = columns["train"]
    assert list(lines(memory, left + width * 0.3))
    assert not list(lines(memory, left + width * 0.9))  # only half of the steps are done


def test_what_holds_a_peak_is_shown_for_the_selected_one(memory: RunMemory, qtbot: QtBot) -> None:
    memory.timeline.setFocus()
    qtbot.keyClick(memory.timeline, Qt.Key.Key_Right)
    assert memory.marker.text() == "Encode images, backward through the middle block: 7.4 GiB"
    assert memory.kinds.sizes["weights"].text() == "4.8 GiB"
    assert memory.kinds.sizes["workspace"].text() == "–"
    assert "UNet up block 1 2.4 GiB, UNet middle block 1.0 GiB" in memory.kinds.largest.text()


def test_the_selection_stays_when_the_run_goes_on(memory: RunMemory, run: Run) -> None:
    memory.timeline.point(3)
    memory.show_run(run)
    assert memory.timeline.current == 3


def test_leaks_are_named_above_the_charts_of_a_single_run(run: Run, session: Session, qtbot: QtBot) -> None:
    panel = ProgressPanel(session, Commands())
    qtbot.addWidget(panel)
    with qtbot.waitExposed(panel):
        panel.show()
    panel.show_runs([run])
    assert not panel.leaks.isVisible()
    write_events(run.directory, [LEAK])
    run.read()
    qtbot.waitUntil(panel.leaks.isVisible)
    assert panel.leaks.text().startswith("GPU memory keeps growing: 2.0% per 100 steps since step 350, 1.0 GiB so far.")
    panel.show_runs([run, run])
    assert not panel.leaks.isVisible()


def test_nothing_is_shown_for_several_runs_or_without_a_forecast(memory: RunMemory, run: Run) -> None:
    memory.show_run(None)
    assert not memory.isVisible()
    run.forecast = None
    memory.show_run(run)
    assert not memory.isVisible()
