"""The window with configurations that fill a GPU, with the real planner: table, chart, into the job and out again."""

from __future__ import annotations

import math

import pytest

from app.core.planning.forecaster import ForecastRequest
from app.core.planning.sweeper import Sweeper, settings_of
from app.qt.actions.commands import Commands
from app.qt.train.forecast.panel import ForecastPanel
from app.qt.train.sweep import SweepDialog, summary
from tests.support.drafts import opened
from tests.support.forecasts import known_job
from trainer.config.recipe import RecipeConfig
from trainer.protocol.sweep import Sweep, SweepPoint

# The only way of training SD 1.5 whose traces ship.
KNOWN = {"fit.quantize": "none", "fit.gradient_checkpointing": "none"}


@pytest.fixture
def draft(session, tmp_path):
    draft = opened(known_job(tmp_path / "Auftrag 猫", "sd15"), session.tasks)
    for key, value in KNOWN.items():
        draft.set(key, value)
    return draft


@pytest.fixture
def panel(qtbot, session, draft):
    panel = ForecastPanel(session, Commands())
    qtbot.addWidget(panel)
    panel.show_draft(draft)
    qtbot.waitUntil(lambda: not draft.file.unsaved)
    panel.chooser.box.setCurrentIndex(panel.chooser.box.findData("8GB"))
    return panel


def dialog_of(qtbot, panel):
    panel.show_sweep()
    dialog = panel.findChild(SweepDialog)
    assert dialog is not None
    return dialog


def test_a_configuration_goes_into_the_job_as_one_step(qtbot, panel, draft):
    dialog = dialog_of(qtbot, panel)
    assert dialog.state.text() == "Starting the planner…" and not dialog.take.isEnabled()
    qtbot.waitUntil(lambda: dialog.sweeper.state in ("done", "failed"))
    found = dialog.sweeper.found
    assert found is not None, dialog.sweeper.error
    rows = dialog.table.lines.rows
    assert [row.texts[1:4] for row in rows] == [(str(p.batch), str(p.resolution), str(p.rank)) for p in found.points]
    assert rows[0].bar == max(row.bar for row in rows) <= 1.0
    assert f"{found.computed:,} combinations computed, {found.skipped:,} skipped" in dialog.state.text()
    dialog.table.setCurrentIndex(dialog.table.lines.index(1, 0))
    assert dialog.selected == dialog.chart.selected == found.points[1]
    before = draft.get("recipe.rank")
    recipe = draft.job.recipe if draft.get("recipe.alpha") is not None else None
    dialog.take.click()
    point = found.points[1]
    taken = {key: draft.get(key) for key in settings_of(point, recipe)}
    assert taken == settings_of(point, recipe) and draft.job is not None
    assert draft.undo() is not None and draft.get("recipe.rank") == before
    dialog.close()


def test_in_the_chart_what_needs_more_is_higher_and_what_is_slower_further_right(qtbot, panel):
    dialog = dialog_of(qtbot, panel)
    qtbot.waitUntil(lambda: dialog.sweeper.state == "done")
    found, chart = dialog.sweeper.found, dialog.chart
    points = [*found.points, *found.others]
    places = [chart.place_of(point) for point in points]
    by_time = sorted(range(len(points)), key=lambda index: points[index].seconds_per_image)
    by_memory = sorted(range(len(points)), key=lambda index: points[index].allocated)
    assert [places[index].x() for index in by_time] == sorted(place.x() for place in places)
    assert [places[index].y() for index in by_memory] == sorted((place.y() for place in places), reverse=True)
    assert chart.grab().toImage().allGray() is False
    dialog.reject()


def test_an_error_is_shown_and_closing_stops_the_search(qtbot, panel, session, draft, tmp_path):
    dialog = SweepDialog(session, ForecastRequest(tmp_path / "nowhere.toml", "8GB"), panel)
    qtbot.waitUntil(lambda: dialog.sweeper.state == "failed")
    assert "nowhere.toml" in dialog.state.text() and not dialog.table.isVisible()
    dialog.close()
    sweeper = Sweeper(session.tasks.post)
    sweeper.ask(ForecastRequest(draft.path, "8GB"))
    process = sweeper._served._process
    assert process is not None
    sweeper.close()
    assert process.wait() != 0 and sweeper.state == "asked"


def test_a_written_alpha_keeps_the_strength_of_the_lora():
    point = SweepPoint(2, 768, 64, ("mid_block",), "int8", "adamw8bit", 1, 1, 0.9, 1.0)
    keys = settings_of(point, RecipeConfig(rank=16, alpha=8.0))
    assert keys["recipe.alpha"] / keys["recipe.rank"] == 8.0 / 16
    keys = settings_of(point, RecipeConfig(rank=16, alpha=8.0, rank_stabilized=True))
    assert keys["recipe.alpha"] / math.sqrt(keys["recipe.rank"]) == 8.0 / math.sqrt(16)
    assert keys["fit.gradient_checkpointing"] == ["mid_block"] and keys["fit.micro_batch"] == 2
    assert "recipe.alpha" not in settings_of(point, None)


@pytest.mark.parametrize(
    ("computed", "text"), [(0, "No configuration could be computed."), (9, "No configuration fits.")]
)
def test_without_a_configuration_the_window_says_why(computed, text):
    """Nothing is computed if traces are missing, such as those of a base of another size."""
    assert summary(Sweep((), (), 10, computed, 10 - computed, 0, 0, (("none", "none"),), 2**30, 1.0)) == text
