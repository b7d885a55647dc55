"""The way from the training loop to a micro-batch is short and can be read from file to file."""

from __future__ import annotations

import traceback
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.training import engine
from trainer.training.run.start import start


class ReachedError(Exception):
    """A micro-batch was reached."""


def test_no_file_is_entered_twice_and_six_frames_lead_to_a_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = []

    def stop(*_: object) -> None:
        chains.append(traceback.extract_stack()[:-1])
        raise ReachedError

    monkeypatch.setattr(engine, "training_step", stop)
    job = write_job(tmp_path, tiny_base("sd15", tmp_path, depth=1), photographs(tmp_path / "images", 2))
    with pytest.raises(ReachedError):
        start(job, ["recipe.steps=1"], lambda event: None)
    (chain,) = chains
    names = [frame.name for frame in chain]
    frames = chain[names.index("train") :]
    assert len(frames) <= 6, [frame.name for frame in frames]
    files = [file for file, _ in groupby(frame.filename for frame in frames)]
    assert len(files) == len(set(files)) == 3, files
