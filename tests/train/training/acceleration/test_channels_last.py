"""Maps that lie channels-last: what a step learns stays the same, and only where it is measured to be quicker.

The CPU has this layout too, so all of it is really computed; only what a clock says is given.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D

from tests.support.exhaustion import Killed, SharedPlace, Trial
from tests.support.images import make_picture
from tests.support.tiny import tiny_configs
from tests.train.training.acceleration.test_attention_autotune import as_on_a_card
from tests.train.training.acceleration.test_compile import error, gradients
from tests.train.training.acceleration.test_cuda_graphs import BRIEF, engine_of
from trainer.adapter import lean
from trainer.adapter.lean.residual import Normed
from trainer.config.base import Family
from trainer.config.load import load_job
from trainer.files.assets import bundled_configs
from trainer.protocol import events
from trainer.training.acceleration import channels_last, compile
from trainer.training.acceleration import channels_last as layout_race
from trainer.training.acceleration.attention_autotune import Clock, attention_shapes
from trainer.training.acceleration.channels_last import (
    ChannelsLastNormAndSilu,
    Kernels,
    ResidualShape,
    autotune_layout,
    is_channels_last,
    residual_blocks,
)
from trainer.training.engine import Engine

pytestmark = pytest.mark.usefixtures("shared_home")

ON = "fit.channels_last=true"
ONE = ("recipe.images.buckets=false", "recipe.effective_batch=2", "fit.micro_batch=2")


def lesson(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the first effective batch."""
    loss = engine.forward_backward(engine.batches.batch(0))
    return loss, torch.cat([gradient.flatten() for gradient in engine.master_weights.gradients()])


@pytest.mark.parametrize(
    "settings",
    [("recipe.layers=all",), ("fit.gradient_checkpointing=full",), ("recipe.layers=linear", "recipe.dropout=0.3")],
    ids=["where convolutions learn", "checkpointed", "with dropouts"],
)
def test_a_step_learns_the_same_and_its_norms_keep_the_layout(
    place: SharedPlace, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    last, usual = (engine_of(place, "sd15", (*ONE, *settings, *on), []) for on in ((ON,), ()))  # type: ignore[arg-type]
    kept: list[tuple[bool, bool]] = []

    normed = ChannelsLastNormAndSilu.norm_silu

    def watched(norm: ChannelsLastNormAndSilu, x: torch.Tensor) -> Normed:
        found = normed(norm, x)
        kept.append((is_channels_last(x), is_channels_last(found[0])))
        return found

    monkeypatch.setattr(ChannelsLastNormAndSilu, "norm_silu", watched)
    norms = [module for module in last.models.unet.modules() if isinstance(module, ChannelsLastNormAndSilu)]
    (loss, gradient), (usual_loss, usual_gradient) = lesson(last), lesson(usual)
    assert float(loss) == pytest.approx(float(usual_loss), rel=1e-5)
    assert float((gradient - usual_gradient).norm() / usual_gradient.norm()) < 1e-4
    assert len(kept) >= len(norms) > 10
    # diffusers' transformers hand out maps that lie as usual, and so does a convolution's LoRA: a norm takes either.
    assert all(before == after for before, after in kept)
    assert settings[0] == "recipe.layers=all" or sum(before for before, _ in kept) > len(kept) // 2


def test_in_bf16_gradients_are_as_near_to_those_of_fp32_as_without(
    place: SharedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are rounded elsewhere, not more: over twelve batches, by single ones chance decides."""
    exact = gradients(place, "fp32")
    plain, last = (error(gradients(place, "bf16", *settings), exact) for settings in ((), (ON,)))
    monkeypatch.setattr(lean, "ENABLED", False)
    peft = error(gradients(place, "bf16"), exact)
    assert 0.0 < last < 1.1 * max(plain, peft), f"plain {plain:.4f}, channels-last {last:.4f}, PEFT's layers {peft:.4f}"


@pytest.mark.parametrize(("works", "failures"), [(True, 0), (True, 1), (False, 100)])
def test_compiled_kernels_do_what_plain_ones_do_also_where_compiling_fails(
    works: bool, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failure may be that of a compiler which a signal to all processes of a run has ended."""
    failed = itertools.count()

    def compiler(graph: torch.fx.GraphModule, _: object) -> Any:
        if next(failed) < failures:
            raise RuntimeError("the compiler cannot do this")
        return graph.forward

    monkeypatch.setattr(compile, "BACKEND", compiler)
    norm = torch.nn.GroupNorm(4, 8).requires_grad_(requires_grad=False)
    x = torch.randn(2, 8, 3, 5).to(memory_format=torch.channels_last).requires_grad_()
    kernels = Kernels(compiled=True)
    norm.__class__ = ChannelsLastNormAndSilu

    def by(one: Kernels) -> torch.Tensor:
        norm.kernels = one  # type: ignore[assignment]
        return norm(x)  # type: ignore[no-any-return]

    found, expected = by(kernels), by(Kernels(compiled=False))
    assert torch.equal(found, expected) and kernels.compiled is works
    gradients = [torch.autograd.grad(one.square().sum(), x)[0] for one in (found, expected)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("family", "layers"), [("sd15", 2), ("sdxl", 2), ("sd15", [1, 2])])
def test_the_blocks_by_the_config_are_about_those_of_the_unet(family: Family, layers: int | list[int]) -> None:
    """Their number, channels and sizes; what is joined on the way up is taken for as much as goes on."""
    config = {**tiny_configs(family)["unet"], "layers_per_block": layers}
    unet = UNet2DConditionModel.from_config(config)
    seen: Counter[tuple[int, int, int]] = Counter()
    for block in unet.modules():
        if isinstance(block, ResnetBlock2D):
            block.register_forward_hook(lambda _, __, found: seen.update([tuple(found.shape[1:])]))
    more = {"text_embeds": torch.zeros(2, 32), "time_ids": torch.zeros(2, 6)} if family == "sdxl" else None
    words = torch.zeros(2, 7, config["cross_attention_dim"])
    with torch.no_grad():
        unet(torch.zeros(2, 4, 8, 12), torch.zeros(2), words, added_cond_kwargs=more)
    found: Counter[tuple[int, int, int]] = Counter()
    for maps, times in residual_blocks(config, (96, 64), 2).items():
        found[maps.outputs, maps.height, maps.width] += times
    assert found == seen
    shapes = attention_shapes(config, (96, 64), 2, 7)
    attending = sum(isinstance(module, Attention) for module in unet.modules())
    assert sum(shapes.values()) == attending
    assert ResidualShape(1, 2560, 1280, 32, 32) in residual_blocks(bundled_configs("sdxl")["unet"], (1024, 1024), 1)


def clock_of(usual: float, last: float, called: list[bool]) -> Callable[[float], Clock]:
    """Clocks that do the work, see by the layout of its gradient which one it is, and say what they are told to."""

    def clock(work: Callable[[], object]) -> float:
        gradient = work()
        assert isinstance(gradient, torch.Tensor)
        called.append(is_channels_last(gradient))
        return last if called[-1] else usual

    return lambda _: clock


@pytest.mark.parametrize(("last", "pays"), [(1.0, True), (1.99, False), (3.0, False)])
def test_a_run_takes_it_only_where_it_is_quicker_and_says_so(
    place: SharedPlace, monkeypatch: pytest.MonkeyPatch, last: float, pays: bool
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(layout_race.autotune_layout, "__defaults__", (clock_of(2.0, last, called),))
    trial = Trial(place.job(), [*BRIEF, *ONE, ON, "recipe.steps=1"], planner=as_on_a_card).start()
    assert trial.code == 0 and load_job(trial.run.job).fit.channels_last is pays
    (sentence,) = [event.sentence for event in trial.of(events.Notice) if event.code == "channels_last"]
    assert sentence.startswith(f"fit.channels_last is {'used' if pays else 'not used'}: residual blocks take ")
    assert called == [False, True] * (len(called) // 2) and called


def test_where_timing_fails_maps_lie_as_usual(place: SharedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "_backward", lambda above, x, *_: above * 2)
    asked = Trial(place.job(), [*BRIEF, *ONE, ON, "recipe.steps=1"], planner=as_on_a_card).start()
    (sentence,) = [event.sentence for event in asked.of(events.Notice) if event.code == "channels_last"]
    assert sentence.startswith("fit.channels_last is not used: timing it failed (gradients differ by ")
    assert load_job(asked.run.job).fit.channels_last is False


@pytest.mark.parametrize(("times", "code"), [(1, 0), (2, 2)])
def test_a_shortage_while_timing_is_tried_again_and_never_decides(
    place: SharedPlace, monkeypatch: pytest.MonkeyPatch, times: int, code: int
) -> None:
    left = times

    def short(above: torch.Tensor, x: torch.Tensor, *more: Any) -> torch.Tensor:
        nonlocal left
        if left:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return backward(above, x, *more)

    backward = channels_last._backward
    monkeypatch.setattr(channels_last, "_backward", short)
    monkeypatch.setattr(layout_race.autotune_layout, "__defaults__", (clock_of(2.0, 1.0, []),))
    trial = Trial(place.job(), [*BRIEF, *ONE, ON, "recipe.steps=1"], planner=as_on_a_card).start()
    assert trial.code == code
    assert load_job(trial.run.job).fit.channels_last if code == 0 else trial.error.code == "memory.full"  # type: ignore[union-attr]


def test_nothing_is_timed_where_it_is_not_asked_for(place: SharedPlace) -> None:
    job, config = load_job(place.job()), tiny_configs("sd15")["unet"]
    assert autotune_layout(job, config, ()) is None
    learning = job.replaced(fit=job.fit.replaced(channels_last=True), recipe=job.recipe.replaced(layers="all"))
    found = autotune_layout(learning, config, ())
    assert found is not None and not found.is_faster and "convolution" in found.sentence
    assert (
        autotune_layout(job.replaced(fit=job.fit.replaced(channels_last=True, deterministic=True)), config, ()) is None
    )


@pytest.mark.parametrize("layers", [[2], [2, 2, 2], "2"])
def test_where_the_config_does_not_tell_of_each_depth_nothing_is_timed(place: SharedPlace, layers: object) -> None:
    job, config = load_job(place.job(), [ON]), {**tiny_configs("sd15")["unet"], "layers_per_block": layers}
    found = autotune_layout(job, config, [make_picture()])
    assert found is not None and not found.is_faster
    assert found.sentence == (
        "fit.channels_last is not used: the base's config does not give the number of residual blocks."
    )
    assert not attention_shapes(config, (96, 64), 2, 7)


def test_a_killed_run_is_resumed_to_the_same_lora(place: SharedPlace) -> None:
    def act(event: events.Event) -> None:
        if isinstance(event, events.StepEvent) and event.step == 3:
            raise Killed

    settings = [*BRIEF, *ONE, ON, "recipe.steps=4", "report.validation.every=2"]
    undisturbed = Trial(place.job(), settings).start()
    trial = Trial(place.job(), settings, act).start()
    assert trial.code is None and trial.resume().code == 0
    assert trial.lora() == undisturbed.lora()
