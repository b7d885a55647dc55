"""The guard before the step, and one read of the host a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.test_cache import prepared, quiet, showings
from trainer.errors import TrainingFault
from trainer.training.build import build_engine
from trainer.training.loop import Engine
from trainer.training.segments import Segment


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    job, pictures, parts = prepared(tmp_path, ("report.max_skipped=3",))
    samples = list(showings(job, pictures, 3))
    parts.cache.ensure_pictures(samples, quiet)
    parts.cache.ensure_texts([sample.caption for sample in samples], quiet)
    return build_engine(job, parts, [Segment(0, 6)], fresh=True)


def snapshot(engine: Engine) -> list[torch.Tensor]:
    return [master.detach().clone() for master in engine.masters.masters.values()]


def poison(engine: Engine) -> None:
    """Makes every prediction of the UNet infinite, as an overflow would."""
    engine.models.unet.conv_out.register_forward_hook(lambda module, inputs, output: output * float("inf"))


def test_a_good_step_moves_the_weights(engine: Engine) -> None:
    before = snapshot(engine)
    result = engine.train_step()
    assert result.skipped is None and result.step == engine.progress.step == 1 and engine.progress.pictures == 3
    assert any(not torch.equal(old, new) for old, new in zip(before, snapshot(engine), strict=True))


def test_a_step_that_is_not_finite_moves_nothing_and_is_counted(engine: Engine) -> None:
    engine.train_step()
    before = snapshot(engine)
    poison(engine)
    result = engine.train_step()
    assert result.skipped == "loss" and engine.progress.skipped == 1 and engine.progress.step == 2
    assert all(torch.equal(old, new) for old, new in zip(before, snapshot(engine), strict=True))


def test_too_many_in_a_row_end_the_run(engine: Engine) -> None:
    poison(engine)
    engine.train_step()
    engine.train_step()
    with pytest.raises(TrainingFault) as ended:
        engine.train_step()
    assert ended.value.code == "training.not_finite" and engine.progress.skipped_in_row == 3


def test_a_good_step_ends_the_row(engine: Engine) -> None:
    hook = engine.models.unet.conv_out.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    engine.train_step()
    engine.train_step()
    hook.remove()
    assert engine.train_step().skipped is None
    assert (engine.progress.skipped, engine.progress.skipped_in_row) == (2, 0)
