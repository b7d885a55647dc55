"""A range test trains the job's data and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.cli import main
from trainer.protocol import events
from trainer.protocol.run_directory import known_runs
from trainer.training.run.start import start


def test_the_test_trains_on_the_data_of_the_job_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_base("sd15", tmp_path / "bases", depth=1)
    job = write_job(tmp_path / "job", base, photographs(tmp_path / "images", count=3))
    command = ["lr-find", str(job), "--steps", "20", "--to", "1", "--set", "recipe.layers=attention", "--json"]
    assert main(command) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert known_runs() == []
    assert sorted(path.name for path in job.parent.iterdir()) == ["job.toml"]
    assert "output/" not in printed.err
    points = found["points"]
    assert points[0]["learning_rate"] == pytest.approx(1e-6)
    # The first loss is that of the base, whatever the rate; later ones are not, because the weights have moved.
    seen: list[events.Event] = []
    settings = ["recipe.layers=attention", "recipe.steps=1", "report.previews.prompts=[]"]
    assert start(job, settings, seen.append) == 0
    losses = [event.loss for event in seen if isinstance(event, events.StepEvent)]
    assert points[0]["loss"] == losses[0]
    assert len(points) in range(10, 21)
