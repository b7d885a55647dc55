"""The guard before the step, and one read of the host a step."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.train.dataset.test_cache import prepared, quiet, showings
from trainer.config.lr_schedule import Segment
from trainer.errors import TrainingError
from trainer.training.build import build_engine
from trainer.training.engine import Engine
from trainer.training.optim.master_weights import LossScaler
from trainer.training.step import MicroBatch


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    job, pictures, parts = prepared(tmp_path, ("report.max_skipped=3",))
    samples = list(showings(job, pictures, 3))
    parts.cache.ensure_latents(samples, quiet)
    parts.cache.ensure_texts([sample.caption for sample in samples], quiet)
    return build_engine(job, parts, [Segment(0, 6)], fresh=True)


def snapshot(engine: Engine) -> list[torch.Tensor]:
    return [master.detach().clone() for master in engine.master_weights.masters.values()]


def poison(engine: Engine) -> None:
    """Makes every prediction of the UNet infinite, as an overflow would."""
    engine.models.unet.conv_out.register_forward_hook(lambda module, inputs, output: output * float("inf"))


def test_a_good_step_moves_the_weights(engine: Engine) -> None:
    before = snapshot(engine)
    result = engine.train_step()
    assert result.skipped is None and result.step == engine.progress.step == 1 and engine.progress.images == 3
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
    with pytest.raises(TrainingError) as ended:
        engine.train_step()
    assert ended.value.code == "training.not_finite" and engine.progress.skipped_in_row == 3


def test_a_good_step_ends_the_row(engine: Engine) -> None:
    hook = engine.models.unet.conv_out.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    engine.train_step()
    engine.train_step()
    hook.remove()
    assert engine.train_step().skipped is None
    assert (engine.progress.skipped, engine.progress.skipped_in_row) == (2, 0)


def test_an_overflow_of_the_loss_is_seen_like_one_that_is_no_number(engine: Engine) -> None:
    for bad in (float("inf"), -float("inf"), float("nan")):
        assert engine.reason_to_skip(bad, 1.0) == "loss"
        assert engine.reason_to_skip(1.0, bad) == "gradient"
    assert engine.reason_to_skip(1e30, 1e30) is None


def test_what_a_smaller_scale_can_save_is_counted_apart_and_halves_it(engine: Engine) -> None:
    engine.scaler = LossScaler()
    scale = engine.scaler.scale
    assert engine.train_step().skipped is None
    before = snapshot(engine)
    hook = engine.models.unet.conv_out.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 1e38,))
    result = engine.train_step()
    hook.remove()
    assert result.skipped == "scale"
    assert (engine.progress.back_offs, engine.progress.skipped, engine.progress.skipped_in_row) == (1, 0, 0)
    assert engine.scaler.scale == scale / 2
    assert all(torch.equal(old, new) for old, new in zip(before, snapshot(engine), strict=True))
    assert engine.train_step().skipped is None


def test_the_scale_of_the_loss_leaves_the_step_as_it_was(engine: Engine, tmp_path: Path) -> None:
    """A power of two shifts no digit: the norm told, the clipping and the weights are those without it."""
    engine.job = engine.job.replaced(recipe=engine.job.recipe.replaced(max_grad_norm=1e-3))
    start, state = snapshot(engine), copy.deepcopy(engine.optimizer.state_dict())
    plain = engine.train_step()
    moved = snapshot(engine)
    engine.master_weights.load(dict(zip(engine.master_weights.masters, start, strict=True)))
    engine.optimizer.load_state_dict(state)
    engine.progress.step, engine.scaler = 0, LossScaler()
    scaled = engine.train_step()
    assert scaled.loss_scale == engine.scaler.scale > 1.0
    assert scaled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6) and scaled.grad_norm > 1e-3
    for one, other in zip(moved, snapshot(engine), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_dropout_is_seeded_anew_for_every_micro_batch_of_every_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeds(first: int) -> list[int]:
        """Of three steps of two micro-batches each."""
        found = []
        for step in range(first, first + 3):
            engine.progress.step = step
            for micro_batch in range(2):
                engine.seed_dropout(micro_batch)
                found.append(torch.initial_seed())
        return found

    torch.manual_seed(7)
    assert seeds(0) == [7] * 6  # without dropout the generator is left alone
    engine.job = engine.job.replaced(recipe=engine.job.recipe.replaced(dropout=0.1))
    first = seeds(0)
    assert len(set(first)) == 6
    assert seeds(1)[:4] == first[2:]
    engine.job = engine.job.replaced(recipe=engine.job.recipe.replaced(seed=engine.job.recipe.seed + 1))
    assert not set(seeds(0)) & set(first)
    used: list[int] = []
    micro_step = Engine.micro_step

    def watched(engine: Engine, micro: MicroBatch, *scale: torch.Tensor | None) -> torch.Tensor:
        used.append(torch.initial_seed())
        return micro_step(engine, micro, *scale)

    monkeypatch.setattr(Engine, "micro_step", watched)
    engine.progress.step = 0
    engine.train_step()
    assert used == seeds(0)[: len(used)] and len(used) > 1


def test_a_step_tells_the_epoch_that_it_is_of(engine: Engine) -> None:
    """Six showings in batches of three."""
    assert [engine.batches.epoch_of(step) for step in range(4)] == [0, 0, 1, 1]
    engine.progress.step = 1
    assert engine.train_step().epoch == 0
