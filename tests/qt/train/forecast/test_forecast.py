"""The forecast panel with real jobs and the real planner: its sentence, stale marks, plans into the job, peaks told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QLabel, QToolButton

from app.core.planning.forecaster import ForecastRequest
from app.qt.actions.commands import Commands
from app.qt.train import words
from app.qt.train.forecast.charts import KINDS
from app.qt.train.forecast.panel import ForecastPanel
from app.qt.widgets import format_memory
from tests.support.drafts import opened
from tests.support.forecasts import known_job
from tests.support.remarks import every_advice, every_remark


@pytest.fixture
def draft(session, tmp_path):
    return opened(known_job(tmp_path / "Auftrag 猫", "sd15"), session.tasks)


@pytest.fixture
def panel(qtbot, session):
    panel = ForecastPanel(session, Commands())
    qtbot.addWidget(panel)
    panel.resize(480, 900)
    with qtbot.waitExposed(panel):
        panel.show()
    return panel


def answered(qtbot, panel):
    qtbot.waitUntil(lambda: panel.forecaster.state in ("done", "failed"))
    assert panel.forecaster.state == "done", panel.forecaster.error


def choose(panel, card):
    panel.chooser.box.setCurrentIndex(panel.chooser.box.findData(card))
    panel.chooser.box.activated.emit(panel.chooser.box.currentIndex())


def test_a_job_is_forecast_and_a_plan_goes_into_it_and_out_again(qtbot, session, panel, draft):
    panel.show_draft(draft)
    choose(panel, "8GB")
    answered(qtbot, panel)
    answer = panel.forecaster.compared
    assert panel.comparison.text().startswith("For comparison only (not used for training): About ")
    assert "GiB that are free; peak " in panel.comparison.text() and answer.gpu.name in panel.comparison.text()
    assert answer.gpu.name not in panel.headline.text() and not panel.stale.isVisible()
    # The bar holds what the figures say: all that the run takes, and what others have of the card.
    taken = answer.pick.reserved(answer.pick.decisive.reserved) + answer.pick.forecast.outside
    assert sum(piece.bytes for piece in panel.memory.pieces) == pytest.approx(
        taken + answer.gpu.total - answer.gpu.free, rel=0.01
    )
    # Base and pictures of this job are not there: both would end a training.
    wrong = [check.sentence for check in panel.checks.checks if check.severity == "error"]
    assert [("nowhere" in sentence, "pictures" in sentence) for sentence in wrong] == [(True, False), (False, True)]
    codes = [check.remark.code for check in panel.checks.checks if check.remark]
    assert codes[:2] == ["base.assumed", "dataset.unreadable"]
    shown = [label.text() for label in panel.checks.findChildren(QLabel)]
    assert "The base is not on this PC, so SD 1.5 as published is assumed." in shown
    assert any(text.startswith("The images could not be read, so 20 square image") for text in shown)
    # Another plan goes into the job file by one click, and the old answer is marked until the new one is there.
    button = panel.plans.buttons["Uses less memory"]
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert panel.stale.isVisible() and not panel.plans.isEnabled()
    assert draft.get("fit.micro_batch") == answer.smaller.fit["micro_batch"]
    qtbot.waitUntil(lambda: not panel.forecaster.stale)
    answered(qtbot, panel)
    now = panel.forecaster.compared
    assert {key: now.pick.keys[key] for key in answer.smaller.keys} == answer.smaller.keys
    assert "micro_batch" in draft.path.read_text(encoding="utf-8")
    assert panel.again.isVisible()
    qtbot.mouseClick(panel.again, Qt.MouseButton.LeftButton)
    assert draft.get("fit.micro_batch") is None
    draft.undo()
    assert draft.get("fit.micro_batch") == answer.smaller.fit["micro_batch"]


def test_peaks_are_told_by_key_and_pointer(qtbot, panel, draft):
    panel.show_draft(draft)
    choose(panel, "8GB")
    answered(qtbot, panel)
    timeline = panel.timeline
    highest = timeline.spots[timeline.current]
    assert highest.phase is panel.forecaster.compared.pick.decisive and highest.peak.name in panel.marker.text()
    timeline.setFocus()
    before = timeline.current
    qtbot.keyClick(timeline, Qt.Key.Key_Left)
    assert timeline.current == before - 1
    peak = timeline.spots[before - 1].peak
    shown = {kind: label.text() for kind, label in panel.kinds.sizes.items()}
    assert shown == {kind: format_memory(size) if (size := peak.by_kind.get(kind, 0)) else "–" for kind in KINDS}
    assert {"weights", "adapter", "activations", "temporary", "gradients", "optimizer", "workspace"} == set(shown)
    assert f"up block 3 {format_memory(dict(peak.largest)['unet.up_blocks.2'])}" in panel.kinds.largest.text()
    qtbot.hover(timeline, timeline._place(timeline.spots[0]).toPoint())
    qtbot.waitUntil(lambda: timeline.current == 0)
    for key, end in ((Qt.Key.Key_Right, 0), (Qt.Key.Key_Left, len(timeline.spots) - 1)):
        timeline.point(None)
        qtbot.keyClick(timeline, key)
        assert timeline.current == end
    assert "Base weights" in panel.memory.accessibleDescription()
    assert timeline.shows_limit and "Dashed" in panel.key.text()


def test_a_small_job_s_course_is_seen_beside_a_large_card(qtbot, panel, draft):
    panel.show_draft(draft)
    choose(panel, "8GB")
    answered(qtbot, panel)
    plan, timeline = panel.forecaster.compared.pick, panel.timeline
    small = replace(plan, forecast=replace(plan.forecast, budget=20 * plan.forecast.reserved))
    timeline.show_forecast(small.forecast)
    assert not timeline.shows_limit
    assert timeline._place(timeline.spots[timeline.current]).y() < timeline.height() / 3
    assert "is far above" in panel._key_words(small)


def test_what_is_wrong_with_a_block_names_the_block(qtbot, panel, draft):
    panel.show_draft(draft)
    draft.set("recipe.blocks", [{"match": "unet.mid_block.*", "rank": 8}, {"match": "unet.*.attn2.*", "rank": 0}])
    (line,) = [label.text() for label in panel.checks.findChildren(QLabel) if "must be" in label.text()]
    assert line.startswith("unet.*.attn2.* › Rank: must be ")
    (button,) = panel.checks.findChildren(QToolButton)
    assert button.toolTip() == "Go to unet.*.attn2.* › Rank"


def test_what_is_wrong_is_listed_with_its_remedy_and_nothing_is_asked(qtbot, panel, draft):
    panel.show_draft(draft)
    draft.set("recipe.rank", 0)
    assert draft.job is None
    assert [check.key for check in panel.checks.checks] == ["recipe.rank"]
    assert any(label.text().startswith("Rank: must be ") for label in panel.checks.findChildren(QLabel))
    assert "Fix the items below" in panel.headline.text()
    draft.set("base.model", None)
    draft.set("recipe.rank", 16)
    assert [check.key for check in panel.checks.checks] == ["base.model"]  # the folder of pictures is there
    told = [label.text() for label in panel.checks.findChildren(QLabel)]
    assert "Choose a base: the model that the LoRA will change." in told
    draft.undo()
    draft.undo()
    qtbot.waitUntil(lambda: not draft.file.unsaved)
    QApplication.processEvents()
    assert panel.forecaster.state == "idle"
    draft.undo()
    choose(panel, "RTX 9999")
    panel.chooser.box.setEditText("RTX 9999")
    panel.chooser.box.lineEdit().returnPressed.emit()
    qtbot.waitUntil(lambda: panel.forecaster.state == "failed")
    assert any("RTX 9999" in check.sentence for check in panel.checks.checks)


def test_a_base_of_the_hub_is_foreseen_as_the_family_of_the_recipe(qtbot, panel, draft):
    panel.show_draft(draft)
    choose(panel, "8GB")
    draft.set("base.family", None)
    draft.set("base.model", "owner/name")
    qtbot.waitUntil(lambda: panel.forecaster.state == "failed")
    (check,) = (check for check in panel.checks.checks if check.severity != "error")  # the pictures are not there
    assert (check.severity, check.key) == ("warning", "base.family")
    assert check.remedy.startswith("The base's family is unknown until the base is downloaded.")
    assert not panel.headline.isVisible(), "no empty line above it"
    draft.set("preset", "sd15/style")
    qtbot.waitUntil(lambda: panel.forecaster.state == "done")
    assert panel.forecaster.compared.family == "sd15"
    assert panel.headline.isVisible() and panel.headline.text().startswith("About ")
    draft.set("base.model", str(draft.path.parent / "gone.safetensors"))
    draft.set("preset", None)
    qtbot.waitUntil(lambda: panel.forecaster.state == "failed")
    assert ("base.model", "Choose another base.") in [(check.key, check.remedy) for check in panel.checks.checks]


def test_a_hidden_panel_keeps_no_process_and_asks_again_when_shown(qtbot, panel, draft):
    panel.show_draft(draft)
    qtbot.waitUntil(lambda: panel.forecaster.waiting)
    process = panel.forecaster._served._process
    panel.hide()
    assert panel.forecaster.state == "idle" and process.wait(60) != 0
    panel.show()
    answered(qtbot, panel)
    answer = panel.forecaster.answer
    panel.hide()
    panel.show()
    assert panel.forecaster.answer is answer and not panel.forecaster.stale and panel.figures.isVisible()


@pytest.mark.parametrize("by_job", [True, False], ids=["the job says so", "no GPU is here"])
def test_the_headline_is_of_the_cpu_that_training_will_use(qtbot, panel, draft, by_job, monkeypatch):
    if by_job:
        draft.set("fit.device", "cpu")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    panel.show_draft(draft)
    answered(qtbot, panel)
    answer = panel.forecaster.answer
    assert answer.on_cpu and panel.chooser.box.currentText() == "This PC: CPU"
    time = words.format_duration(answer.pick.forecast.seconds)
    memory = words.format_memory(max(phase.host for phase in answer.pick.forecast.phases))
    assert panel.headline.text() == f"About {time} on this PC's CPU, {memory} of main memory."
    assert panel.cpu_seconds(draft) == answer.pick.forecast.seconds > 600
    assert panel.phases.isVisible() and not panel.comparison.isVisible()
    assert not any(part.isVisible() for part in (panel.memory, panel.timeline, panel.plans, panel.fallbacks))

    def rows() -> list[str]:
        return [label.text() for label in panel.phases.findChildren(QLabel) if label.isVisible()]

    qtbot.waitUntil(lambda: "Training" in rows())  # Qt shows what is added to a layout when it next lays out
    assert "0 B" not in rows()
    # Another GPU is compared with, and the headline stays.
    choose(panel, "RTX 3060")
    qtbot.waitUntil(lambda: panel.forecaster.state == "done" and panel.forecaster.compared is not None)
    assert panel.headline.text().startswith("About ") and "on this PC's CPU" in panel.headline.text()
    assert panel.comparison.text().startswith("For comparison only (not used for training): About ")
    assert "RTX 3060" in panel.comparison.text() and panel.memory.isVisible()
    assert panel.cpu_seconds(draft) == panel.forecaster.answer.pick.forecast.seconds


def test_every_remark_and_advice_of_the_engine_has_words(qtbot):
    told = [words.remark(found) for found in every_remark()]
    assert all(text.endswith(".") and "{" not in text for text in told)
    assert {found.code for found in every_remark()} == set(words.REMARKS)
    ways = [words.too_large(1 << 30, given) for given in every_advice()]
    assert len(set(ways)) == len(ways) and all(way.startswith("1.0 GiB too large") for way in ways)
    assert words.too_large(0, None) == ""


def test_while_new_settings_are_computed_an_estimate_is_shown_as_one(qtbot, panel, draft):
    panel._draft = draft
    forecaster = panel.forecaster
    forecaster._request = ForecastRequest(draft.path, "8GB")
    found = {"reserved": 6 << 30, "budget": 8 << 30, "seconds": 3600.0}
    for fits, sentence in ((True, "It will probably fit."), (False, "probably not fit."), (None, "is not known yet.")):
        forecaster._on_answered({"id": 0, "state": "tracing", "stale": None, "estimate": {**found, "fits": fits}})
        shown, computing = panel.state.text().split("\n")
        assert shown.startswith("Estimate from a similar recipe: about 1 h 00 min, 6.0 of 8.0 GiB of GPU memory. ")
        assert shown.endswith(sentence) and computing.startswith("Computing new settings")
    forecaster._on_answered({"id": 0, "state": "tracing", "stale": None, "estimate": None})
    assert panel.state.text().startswith("Computing new settings")
