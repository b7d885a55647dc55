"""`plan --sweep`: the table, JSON and the chart say the same; what cannot be answered is a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from trainer import cli
from trainer.cli import planning, sweep
from trainer.protocol.sweep import Sweep, SweepPoint, sweep_from

GIB = 2**30
KNOWN = ("--set", "fit.quantize=none", "--set", "fit.gradient_checkpointing=none")
ASKED = ("plan", "--family", "sd15", "--recipe", "style", "--gpu", "8GB", "--sweep")


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not the traces of other ways of training ship, none is recorded."""
    monkeypatch.setattr(planning, "ALTERNATIVES_PATIENCE", -1.0)


def test_table_json_and_chart_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "Übersicht 1.png"
    assert cli.main([*ASKED, "--chart", str(chart)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cli.main([*ASKED, "--json"]) == 0
    found = sweep_from(json.loads(capsys.readouterr().out))
    header = next(place for place, line in enumerate(lines) if line.split()[:2] == ["FILL", "RESERVED"])
    rows = [line.split() for line in lines[header + 1 : header + 1 + len(found.points)]]
    for row, point in zip(rows, found.points, strict=True):
        assert row[0] == f"{point.fill:.1%}" and row[3:6] == [
            str(n) for n in (point.batch, point.resolution, point.rank)
        ]
        assert row[-1] == "s" and float(row[-2]) == pytest.approx(point.seconds_per_image, rel=0.01)
    printed = " ".join(lines[header:])
    assert f"{found.total:,} combinations" in printed and f"{found.skipped:,} skipped" in printed
    assert max(map(len, lines)) <= 88
    with Image.open(chart) as image:
        assert (image.format, image.size) == ("PNG", sweep.SIZE)
        assert len(image.getcolors(100_000) or ()) > 5


def point_at(side: int, seconds: float, allocated: float, *, front: bool = False) -> SweepPoint:
    size = int(allocated * GIB)
    return SweepPoint(1, side, 8, ("up_blocks.1",), "nf4", "adamw8bit", size, size, allocated / 8, seconds, front)


def result(*points: SweepPoint) -> Sweep:
    return Sweep(points, (), 4608, 500, 400, 20, 30, (("nf4", "full"), ("int8", "none")), 8 * GIB, 3.21)


def test_a_table_names_what_is_incomplete_and_counts_checkpointed_blocks() -> None:
    printed = " ".join(sweep.table(result(point_at(512, 0.5, 7.9))))
    assert "98.8%" in printed and "1 block" in printed and "NF4" in printed
    assert "4,608 combinations in 3.2 s: 500 computed, 3,708 skipped" in printed
    assert "Incomplete by 400, because traces are missing: NF4 with checkpointing, int8." in printed
    assert "No configuration fits." in list(sweep.table(result()))
    assert "No configuration could be computed." in list(sweep.table(replace(result(), computed=0)))


def colored(path: Path, color: str) -> list[tuple[int, int]]:
    """Return the pixels of a color in an image."""
    rgb = tuple(int(color[place : place + 2], 16) for place in (1, 3, 5))
    with Image.open(path) as image:
        pixels = image.load()
        assert pixels is not None
        return [(x, y) for x in range(image.width) for y in range(image.height) if pixels[x, y] == rgb]


def test_the_chart_shows_more_memory_higher_and_more_time_further_right(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    left, right = point_at(512, 0.5, 2.0, front=True), point_at(1024, 2.0, 6.0, front=True)
    sweep.draw(result(left, right), "a job", path)
    legend = sweep.SIZE[0] - 170  # the legend has the colors as well
    spots = [[spot for spot in colored(path, color) if spot[0] < legend] for color in ("#0072b2", "#e69f00")]
    (x1, y1), (x2, y2) = ([sum(axis) / len(axis) for axis in zip(*each, strict=True)] for each in spots)
    assert x1 < x2 and y1 > y2  # rows are counted from the top


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("plan", "--family", "sd15", "--gpu", "8GB", "--chart", "x.png"), "--sweep, which is not given"),
        (("plan", "--family", "sd15", "--sweep"), "no NVIDIA GPU works here"),
        ((*ASKED, "--chart", "no such folder/x.png"), "Could not write the chart"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, *(KNOWN if "style" in words else ())]) in (1, 2)
    printed = capsys.readouterr()
    assert not printed.out and part in printed.err and "What to do: " in printed.err
