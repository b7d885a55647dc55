"""The presets at hand without a window: a planner that dies, a folder that refuses, answers that are kept."""

import threading

import pytest

from app.core.presets.cost_estimates import CostEstimates
from app.core.presets.presets import Presets
from tests.support.desk import Desk, a_desk
from tests.unit.config.presets.test_hostile import GOOD
from trainer.config.presets import library
from trainer.config.presets.exchange import parse_preset


@pytest.fixture
def desk():
    with a_desk() as desk:
        yield desk


def test_a_planner_that_dies_is_told_in_the_place_of_the_answer_and_started_anew(desk: Desk, tmp_path):
    preset = parse_preset(GOOD, "good")
    path, _ = library.save_preset(preset)
    outlooks = CostEstimates(desk.post)
    outlooks.choose("8GB")
    outlooks.request([(path, preset)])
    assert outlooks.of(path, preset) is None
    first = outlooks._served._process
    first.kill()
    desk.until(lambda: outlooks.of(path, preset) is not None)
    assert outlooks.of(path, preset).answer is None
    assert outlooks.of(path, preset).problem
    outlooks.choose("no such card")
    desk.until(lambda: outlooks.of(path, preset) is not None)
    assert outlooks._served._process is not first
    assert "no such card" in outlooks.of(path, preset).problem
    other = parse_preset(GOOD.replace("rank = 8", "rank = 9"), "other")
    assert outlooks.of(path, other) is None  # the file holds another recipe now
    outlooks.close()


def test_what_was_read_before_a_preset_was_kept_does_not_hide_it_when_it_comes_later(desk: Desk, monkeypatch):
    presets, kept, looked = Presets(desk.tasks), [], []
    read, goes_on, real = threading.Event(), threading.Event(), library.read_library

    def late():
        if read.is_set():
            return real()
        found = real()
        read.set()
        assert goes_on.wait(120)
        return found

    monkeypatch.setattr(library, "read_library", late)
    presets._change(lambda: None, looked.append)
    assert read.wait(120)
    presets.add(parse_preset(GOOD, "good"), "gouache", "yours", kept.append)
    desk.until(lambda: kept)
    goes_on.set()
    desk.until(lambda: looked)
    assert "gouache" in {each.preset.name for each in presets.entries.presets}
    presets.close()


def test_a_place_that_is_taken_by_a_file_is_told(desk: Desk, per_user_folder):
    presets, refused = Presets(desk.tasks), []
    presets.failed.connect(refused.append)
    (per_user_folder / "presets").write_text("no folder", encoding="utf-8")
    presets.add(parse_preset(GOOD, "good"), "gouache", "yours", lambda _: None)
    desk.until(lambda: refused)
    assert refused[0].code == "preset.unwritable"
    assert refused[0].remedy
