"""Kept outcomes come back as they were; damaged ones, and brief ones where all is asked for, count as absent."""

from __future__ import annotations

import os
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.damage import damaged
from trainer.memory.forecast.results import (
    MAX_OOM_RESULTS,
    OOM_SUFFIX,
    OUTCOME_SUFFIX,
    ForecastResult,
    OomResult,
    ResultStore,
    most_reserved,
    without_details,
    write_outcomes,
)
from trainer.memory.trace.store import TraceStore
from trainer.protocol.forecast import Peak, PhaseForecast

PEAK = Peak(
    "backward of the été block", "unet", "backward", 5 * 2**30, {"weights": 2**32, "adapter": 7}, (("unet", 9),)
)


def outcome(seed: int = 0) -> ForecastResult:
    """One told at length."""
    chance = random.Random(seed)
    timeline = tuple((chance.randrange(2**36), chance.randrange(2**36)) for _ in range(50))
    most = chance.randrange(2**36)
    load = PhaseForecast("load", most, most + 512, 2**31, 0.0, (), timeline[:3])
    return load, PhaseForecast("train", most + 1024, most + 4096, 2**30, 0.0, (PEAK, PEAK), timeline)


def test_outcomes_come_back_as_they_were(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "a folder ü")
    assert store.load("key", brief=True) is None
    store.save("key", outcome())
    assert store.load("key", brief=False) == outcome()
    assert store.load("key", brief=True) == without_details(outcome()) != outcome()
    assert store.load("other", brief=True) is None
    assert most_reserved(outcome()) == outcome()[1].reserved


def test_a_brief_one_does_not_do_where_all_is_asked_for(tmp_path: Path) -> None:
    write_outcomes(tmp_path / "shipped.zip", {"key": without_details(outcome()), "other": outcome(1)})
    store = ResultStore(tmp_path / "own", tmp_path / "shipped.zip")
    assert store.load("key", brief=True) == without_details(outcome())
    assert store.load("key", brief=False) is None
    store.save("key", outcome())
    assert store.load("key", brief=False) == outcome()


def test_what_ships_comes_first_and_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    shipped = tmp_path / "traces" / "outcomes.zip"
    write_outcomes(shipped, {"key": outcome(1), "other": outcome(2)})
    sound = shipped.read_bytes()
    store = ResultStore.for_traces(TraceStore(tmp_path / "own", tmp_path / "traces"))
    store.save("key", outcome(3))
    assert store.load("key", brief=False) == outcome(1)
    assert store.load("other", brief=False) == outcome(2)
    shipped.write_bytes(sound[: len(sound) // 2])
    assert store.load("key", brief=False) == outcome(3)
    assert store.load("other", brief=False) is None
    assert shipped.exists()


def test_a_damaged_outcome_is_never_taken_for_a_sound_one(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    store.save("key", outcome())
    path = tmp_path / f"key{OUTCOME_SUFFIX}"
    sound, chance = path.read_bytes(), random.Random(3)
    misses = 0
    for _ in range(100):
        path.write_bytes(damaged(sound, chance))
        found = store.load("key", brief=False)
        misses += found is None
        assert found in (None, outcome())
    assert misses > 80
    store.save("key", outcome(4))
    assert store.load("key", brief=False) == outcome(4)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'[{"phase": "load"}]', b"[1]", b"null", b"\xff", b'["a"]'])
def test_what_is_no_outcome_is_a_miss(tmp_path: Path, content: bytes) -> None:
    with zipfile.ZipFile(tmp_path / f"key{OUTCOME_SUFFIX}", "w") as archive:
        archive.writestr("key", content)
    assert ResultStore(tmp_path).load("key", brief=True) is None


def hindered(least: int) -> OomResult:
    return OomResult(least, least + 512, "train", (0, 2, 1))


def test_what_came_of_limits_is_kept_beside_what_ships(tmp_path: Path) -> None:
    write_outcomes(tmp_path / "shipped.zip", {"key": outcome()}, {"key": [hindered(1)]})
    store = ResultStore(tmp_path / "own", tmp_path / "shipped.zip")
    store.save_oom("key", hindered(1000))
    store.save_oom("other", hindered(3))
    assert store.oom_result("key") == (hindered(1), hindered(1000))
    assert store.oom_result("other") == (hindered(3),)
    assert store.oom_result("none") == ()
    assert store.load("key", brief=False) == outcome()
    assert store.load("other", brief=True) is None


def test_of_one_run_the_latest_limits_are_kept_each_once(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    for least in (0, *range(MAX_OOM_RESULTS + 3), 5):
        store.save_oom("key", hindered(least))
    assert [found.least for found in store.oom_result("key")] == [3, 4, *range(6, MAX_OOM_RESULTS + 3), 5]


def test_damaged_limits_are_none(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    path = tmp_path / f"key{OOM_SUFFIX}"
    store.save_oom("key", hindered(1))
    sound, chance = path.read_bytes(), random.Random(4)
    for _ in range(100):
        path.write_bytes(damaged(sound, chance))
        assert store.oom_result("key") in ((), (hindered(1),))
    for content in ("{}", "[1]", '[{"least": 1}]', "null"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("key.oom_result", content)
        assert store.oom_result("key") == ()
    store.save_oom("key", hindered(2))
    assert store.oom_result("key") == (hindered(2),)


def test_the_oldest_used_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResultStore(tmp_path)
    store.save("a", outcome())
    size = (tmp_path / f"a{OUTCOME_SUFFIX}").stat().st_size
    monkeypatch.setattr("trainer.memory.forecast.results.MOST_OUTCOME_BYTES", 3 * size + size // 2)
    for key in ("b", "c"):
        store.save(key, outcome())
    for age, key in enumerate(("c", "b", "a")):
        os.utime(tmp_path / f"{key}{OUTCOME_SUFFIX}", (1000 - age, 1000 - age))
    assert store.load("a", brief=True) is not None  # used now, so b is the oldest
    store.save("d", outcome())
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_equal_outcomes_give_equal_files(tmp_path: Path) -> None:
    one, other = outcome(), tuple(replace(phase) for phase in outcome())
    for name, each in (("a", one), ("b", other)):
        write_outcomes(tmp_path / name, {"key": each})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
