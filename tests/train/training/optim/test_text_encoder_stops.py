"""Text encoders stop at a step: as with a rate of 0 from there on, with less memory, across any interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.exhaustion import Exhaustion, SharedPlace, Trial, step_begins
from tests.support.optimizers import quick, rate_of, settings_of
from tests.train.dataset.test_cache import prepared, quiet, showings
from tests.train.training.run.test_run import Watcher, run_of, same_lora, stop_at
from trainer.config.lr_schedule import Segment
from trainer.config.recipe import RecipeConfig
from trainer.errors import JobError
from trainer.protocol import events
from trainer.training.build import build_engine
from trainer.training.callbacks.checkpoints import capture, restore
from trainer.training.engine import Engine
from trainer.training.optim.optimizer import averaged_weights
from trainer.training.run.resume import resume
from trainer.training.run.start import start

STOP = 2
LIVE = ("recipe.layers=attention", "recipe.text_encoder.learning_rate=0.01", "recipe.learning_rate=0.01")
LIVE = (*LIVE, "recipe.max_grad_norm=0")  # the norm of all gradients would include those of the text encoder
Build = Callable[..., Engine]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def built(*settings: str, family: Any = "sd15", fresh: bool = True) -> Engine:
        job, images, parts = prepared(tmp_path, (*LIVE, *settings), family)
        parts.cache.ensure_latents(list(showings(job, images, 4)), quiet)
        return build_engine(job, parts, [Segment(0, 8)], fresh=fresh)

    return built


def stopping(after: int = STOP) -> str:
    return f"recipe.text_encoder.stop_after={after}"


def masters_of(engine: Engine, part: str | None = None) -> dict[str, Tensor]:
    found = engine.master_weights.masters.items()
    return {key: master.detach().clone() for key, master in found if part in (None, engine.adapter.part_of[key])}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_run_is_that_of_a_rate_of_0_from_the_step_on(build: Build, checkpointing: str) -> None:
    """With AdamW, whose decay is a share of the rate; the momentum of a rate of 0 moves nothing either."""
    settings = ("recipe.optimizer.weight_decay=0.1", f"fit.gradient_checkpointing={checkpointing}")
    engine, reference = build(stopping(), *settings), build(*settings)
    for step in range(5):
        for group in reference.optimizer.param_groups:
            if group["part"] == "text_encoder" and step >= STOP:
                group["base_lr"] = 0.0
        results = [each.train_step() for each in (engine, reference)]
        assert results[0].loss == results[1].loss
        assert ("text_encoder" in results[0].learning_rates) == (step < STOP)
        if step == STOP - 1:
            stopped = masters_of(engine, "text_encoder")
    assert same(masters_of(engine), masters_of(reference))
    assert same(masters_of(engine, "text_encoder"), stopped) and any(weight.any() for weight in stopped.values())


def test_nothing_of_its_training_is_kept(build: Build) -> None:
    """No gradient, no optimizer state, and no activations that autograd saves in the text encoder."""
    engine = build(stopping(), "fit.gradient_checkpointing=full")
    encoder, saved = engine.models.text_encoders[0], []
    weights = {id(weight) for weight in encoder.parameters()}

    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        saved.append(hidden.requires_grad)

    encoder.register_forward_hook(note)
    for _ in range(STOP + 1):
        engine.train_step()
    count = len(saved) // (STOP + 1)
    assert all(saved[: STOP * count]) and not any(saved[STOP * count :])
    keys = masters_of(engine, "text_encoder")
    known = {id(weight) for weight in engine.optimizer.state}
    for key in keys:
        assert engine.master_weights.masters[key].grad is None and engine.master_weights.working[key].grad is None
        assert id(engine.master_weights.masters[key]) not in known
    assert len(known) == len(masters_of(engine, "unet"))
    assert {id(weight) for weight in engine.master_weights.working.values() if not weight.requires_grad} <= weights


def test_a_stopped_encoder_has_no_dropout(build: Build) -> None:
    engine = build(stopping(1), "recipe.dropout=0.5")
    tokens = engine.collator.assemble(engine.batches.batch(0)[:1], 1).tokens
    assert tokens is not None

    def encoded() -> Tensor:
        return engine.models.text_encoders[0](tokens[0]).last_hidden_state.detach()

    engine.train_step()
    assert torch.equal(encoded(), encoded())
    engine.adapter.frozen = frozenset()
    assert not torch.equal(encoded(), encoded())


@pytest.mark.parametrize("name", quick("schedulefree"))
def test_state_is_restored_before_and_after_the_stop(build: Build, name: str) -> None:
    """Also into an engine that has gone further, as after an optimizer step that ran out of memory."""
    rate = rate_of(name)
    settings = [*settings_of(name), f"recipe.text_encoder.learning_rate={rate}", f"recipe.learning_rate={rate}"]
    settings = [*settings, stopping(), "recipe.rank=64"]
    engine, saved, reached = build(*settings), {}, {}
    for step in range(4):
        saved[step] = capture(engine, [])
        saved[step].adapter.update(masters_of(engine))
        engine.train_step()
        reached[step] = masters_of(engine)
    for place, other in (("new", build(*settings, fresh=False)), ("further", engine)):
        for step in (STOP + 1, STOP, STOP - 1):
            restore(other, saved[step])
            for after in range(step, 4):
                other.train_step()
                assert same(masters_of(other), reached[after]), f"{place} engine, from step {step}"


def test_schedule_free_stops_at_its_averaged_weights(build: Build) -> None:
    """Those are what files have and what validation computes with."""
    engine, reference = (build("recipe.optimizer.name=schedulefree", *more) for more in ([stopping()], []))
    for _ in range(STOP):
        engine.train_step()
        reference.train_step()
    before = masters_of(reference, "text_encoder")
    with averaged_weights(reference.optimizer, reference.master_weights):
        averages = masters_of(reference, "text_encoder")
    assert same(masters_of(engine, "text_encoder"), averages) and not same(averages, before)
    assert same(masters_of(engine, "unet"), masters_of(reference, "unet"))


def test_each_encoder_of_sdxl_stops_at_its_own_step(build: Build) -> None:
    engine = build(
        stopping(1), "recipe.text_encoder_2.learning_rate=0.01", "recipe.text_encoder_2.stop_after=3", family="sdxl"
    )
    shares = [set(engine.train_step().learning_rates) for _ in range(4)]
    assert shares == [
        {"unet", "text_encoder", "text_encoder_2"}, *[{"unet", "text_encoder_2"}] * 2, {"unet"},
    ]  # fmt: skip


def test_weights_at_the_limit_of_norms_stay_as_they_are(build: Build) -> None:
    engine = build(stopping(), "recipe.max_weight_norm=1e-3")
    for _ in range(STOP):
        engine.train_step()
    stopped = masters_of(engine, "text_encoder")
    engine.train_step()
    assert same(masters_of(engine, "text_encoder"), stopped)


def test_a_run_with_nothing_left_to_train_is_refused(build: Build) -> None:
    with pytest.raises(JobError, match="nothing is left to train after step 2"):
        build(stopping(), 'recipe.blocks=[{match="unet.*", rate_factor=0.0}]')


@pytest.mark.parametrize(("after", "steps", "wanted"), [(0.5, 9, 4), (0.01, 9, 1), (3, 9, 3)])
def test_a_share_is_rounded_to_steps(after: float, steps: int, wanted: int) -> None:
    recipe = {"steps": steps, "text_encoder": {"learning_rate": 1e-4, "stop_after": after}}
    assert RecipeConfig.model_validate(recipe).stops == {"text_encoder": wanted}


# Whole runs

RUN = (
    *LIVE,
    "recipe.steps=4",
    "recipe.text_encoder.stop_after=0.5",
    "recipe.dropout=0.2",
    "report.previews.prompts=[]",
)
RUN = (*RUN, "report.validation.every=100", "report.saving.every_steps=100", "report.saving.checkpoint_every=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SharedPlace:
    return SharedPlace(tmp_path_factory.mktemp("stops ü"))


@pytest.fixture(scope="module")
def undisturbed(place: SharedPlace) -> Trial:
    return Trial(place.job(), RUN).start()


def test_a_run_says_when_an_encoder_stops(undisturbed: Trial) -> None:
    notices = [event.sentence for event in undisturbed.of(events.Notice) if event.code == "text_encoder.stopped"]
    assert notices == ["Stopped training the text encoder after step 2; it keeps encoding the captions."]
    rates = [sorted(event.learning_rates) for event in undisturbed.of(events.StepEvent)]
    assert rates == [["text_encoder", "unet"]] * 2 + [["unet"]] * 2


@pytest.mark.parametrize("step", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_paused_run_resumes_across_the_stop(undisturbed: Trial, place: SharedPlace, step: int) -> None:
    job = place.job()
    assert start(job, list(RUN), Watcher(stop_at(step, job))) == 75
    assert resume(run_of(job), Watcher()) == 0
    assert same_lora(undisturbed.run.output / "test.safetensors", run_of(job).output / "test.safetensors")


def test_a_step_that_ran_out_in_the_optimizer_is_repeated_across_the_stop(
    undisturbed: Trial, place: SharedPlace
) -> None:
    """Only the first state is on disk, so the step after the stop is reached by replaying those before it."""
    settings = (*RUN[:-1], "report.saving.checkpoint_every=100")
    exhaustion = Exhaustion(step_begins(3), 3, in_optimizer=True)
    trial = Trial(place.job(), settings, exhaustion.tell).start()
    assert len(trial.of(events.MemoryExhausted)) == 1 and not exhaustion.left
    assert trial.lora()[0] == undisturbed.lora()[0]
