"""The timing half of tests/benchmarks/speed.py, on tiny models: the code that runs on a GPU once, unattended."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tests.benchmarks import speed_time
from tests.benchmarks.speed_rows import Base, Bench, Case, Row
from tests.benchmarks.speed_time import groups, in_turn, picture_flops, time_group

CASES = (Case(512, 2), Case(512, 1, "selective"), Case(512, 1, attention="cudnn"))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(time_group(Base("sd15", "peft", dtype="fp32"), CASES, 600.0, small=True))


def test_a_row_has_all_that_a_step_takes_and_one_that_fails_is_named(rows: list[Row]) -> None:
    plain, selective, cudnn = rows
    for row in (plain, selective):
        assert row.timing is not None and not row.failure
        assert 0 < row.timing.host_seconds <= row.timing.seconds
        assert row.timing.limit > 0 and row.timing.waits == 0
        assert row.timing.launched is not None and row.timing.operations is not None
        assert row.timing.launched > row.timing.operations > 500
    assert plain.timing and selective.timing and plain.timing.operations < selective.timing.operations  # type: ignore[operator]
    assert cudnn.timing is None
    assert cudnn.failure.startswith("JobError: Could not use fit.attention")


@pytest.mark.slow
def test_blocks_that_make_nothing_again_are_a_base_of_their_own(rows: list[Row]) -> None:
    """PEFT's layers request most; with ours, blocks that recompute what they do not save request more than others."""
    ours, layers = (
        next(iter(time_group(Base("sd15", kind, dtype="fp32"), CASES[:1], 600.0, small=True)))
        for kind in ("lean", "layers")
    )
    counts = [row.timing.operations for row in (layers, ours, rows[0]) if row.timing]
    assert len(counts) == 3 and counts[0] < counts[1] < counts[2]  # type: ignore[operator]


def test_no_case_is_begun_when_time_is_up_and_settings_are_put_back() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    (row,) = time_group(Base("sd15", deterministic=not before, dtype="fp32"), CASES[:1], -1.0, small=True)
    assert row.failure == "no time was left"
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_table_is_written_after_every_row_with_what_is_known(rows: list[Row], tmp_path: Path) -> None:
    flops: Future[int] = Future()
    bench = Bench("a card", tmp_path, "speed_a_card", small=True, flops={("sd15", 512): flops})
    bench.keep(rows[0])
    written = json.loads((tmp_path / "speed_a_card.json").read_text(encoding="utf-8"))
    assert (written["card"], written["torch"], written["rows"][0]["flops"]) == ("a card", torch.__version__, None)
    flops.set_result(10**9)
    for row in rows[1:]:
        bench.keep(row)
    written = json.loads((tmp_path / "speed_a_card.json").read_text(encoding="utf-8"))
    assert [row["flops"] for row in written["rows"]] == [2 * 10**9, 10**9, 10**9]
    table = (tmp_path / "speed_a_card.md").read_text(encoding="utf-8")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 2 + len(rows)
    assert lines[2].startswith("| sd15 512 b2, peft, fp32 | ") and "selective checkpointing" in lines[3]
    timing = rows[0].timing
    assert timing is not None and f"| {2 / timing.seconds:.2f} |" in lines[2]
    assert f"{2e9 / timing.seconds / timing.limit:.1%}" in lines[2]


@pytest.mark.slow
def test_the_work_of_a_step_is_that_of_its_trace() -> None:
    """Twice the pixels each way: four times the work of convolutions and products, and more in attention."""
    one, other = picture_flops("sd15", 512, small=True), picture_flops("sd15", 1024, small=True)
    assert 4 * one < other < 16 * one


def test_both_families_take_turns_and_begin_with_what_tells_most() -> None:
    order = [(base.family, base.adapters) for base, _ in in_turn(["sdxl", "sd15"])]
    assert order[:4] == [("sdxl", "lean"), ("sd15", "lean"), ("sdxl", "peft"), ("sd15", "peft")]
    cases = [case for base, some in groups("sdxl") if base == Base("sdxl") for case in some]
    assert len(set(cases)) == len(cases)
    assert {(case.resolution, case.batch) for case in cases} == {
        (size, n) for size in (512, 768, 1024) for n in (1, 4, 8)
    }


def test_what_cannot_be_counted_costs_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> int:
        raise RuntimeError("CUPTI is not here")

    assert speed_time._or_none(broken) is None
    assert "CUPTI" in capsys.readouterr().out
