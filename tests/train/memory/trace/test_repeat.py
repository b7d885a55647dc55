"""Traces of a UNet of which few blocks were traced, against those of the whole UNet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.cpu_steps import tiny_workload
from trainer.config.fit import FitConfig
from trainer.config.job import PromptConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.trace import meta_models, other_phases, train_step
from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.repeat import NotRepeatedError, Repetition, repetition
from trainer.memory.trace.workload import Workload, complete_fit, workload_without_base

Options = Mapping[str, Any]
# Deeper than what is traced; the first level has as few blocks as in SDXL.
DEPTHS = [2, 6]
BOTH = {"text_encoder": {"learning_rate": 1e-4}, "text_encoder_2": {"learning_rate": 1e-4}}
FULL, SOME = {"gradient_checkpointing": "full"}, {"gradient_checkpointing": ["down_blocks.1", "mid_block"]}
TINY: list[tuple[int, Options, Options]] = [
    (1, {"dropout": 0.1}, {}),
    (2, {"adapter": "lokr", **BOTH}, {**SOME, "quantize": "int8"}),
]
# Full-size SDXL: every adapter, with different fits and optimizers.
SDXL: list[tuple[int, Options, Options]] = [
    (1, {"dropout": 0.1}, {}),
    (4, {**BOTH, "rank_dropout": 0.1, "module_dropout": 0.1}, SOME),
    (1, {"layers": "all", "optimizer": {"name": "adamw8bit"}}, {**FULL, "quantize": "nf4", "preview_offload": True}),
    (2, {"layers": "attention", "lora_plus_ratio": 4.0}, {**FULL, "quantize": "int8"}),
    (1, {"adapter": "loha", "optimizer": {"name": "lion"}}, FULL),
    (2, {"adapter": "lokr", "optimizer": {"name": "prodigy"}}, {}),
    (1, {"adapter": "oft", "optimizer": {"name": "adafactor"}}, SOME),
    (2, {"adapter": "dora"}, {**SOME, "quantize": "int8"}),
    (1, {"adapter": "tlora", "ema_decay": 0.99}, {"dtype": "fp16", "attention": "math"}),
    (2, {"objective": {"prior_prediction": True}, "weighted_captions": True, "token_chunks": 225, **BOTH}, FULL),
]


@pytest.fixture(autouse=True)
def _no_models() -> Iterator[None]:
    yield
    meta_models._latest.clear()


@pytest.mark.parametrize(("images", "recipe", "fit"), TINY)
def test_a_tiny_unet_has_the_traces_of_its_repeated_blocks(
    images: int, recipe: Options, fit: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = tiny_workload("sdxl", recipe, fit)
    workload = replace(workload, unet_config={**workload.unet_config, "transformer_layers_per_block": DEPTHS})
    assert_same_with_and_without(workload, images, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("images", "recipe", "fit"), SDXL)
def test_sdxl_has_the_traces_of_its_repeated_blocks(
    images: int, recipe: Options, fit: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = RecipeConfig.model_validate({"resolution": 1024, "rank": 16, **recipe})
    workload = workload_without_base("sdxl", chosen, complete_fit(FitConfig.model_validate({"dtype": "bf16", **fit})))
    assert_same_with_and_without(workload, images, monkeypatch)


def assert_same_with_and_without(workload: Workload, images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    side = workload.buckets[0].width
    workload = replace(workload, previews=(PromptConfig(prompt="a cat", width=side, height=side),))
    extended: list[MemoryTrace] = []
    whole = Repetition.extended

    def noted(self: Repetition, trace: MemoryTrace) -> MemoryTrace:
        extended.append(whole(self, trace))
        return extended[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Repetition, "extended", noted)
        found = traces(workload, images)
    # Weights, step, loading, validation, and three parts of previews; the last five are whole if there are averages.
    assert len(extended) == (2 if workload.recipe.ema_decay else 7)
    with monkeypatch.context() as patch:
        for module in (train_step, other_phases):
            patch.setattr(module, "repetition", lambda _: None)
        recorded = traces(workload, images)
    for one, other in zip(found, recorded, strict=True):
        assert one.name == other.name
        assert one.storages == other.storages
        assert np.array_equal(one.events, other.events)
        assert one.work == other.work


def traces(workload: Workload, images: int) -> Sequence[MemoryTrace]:
    bucket = workload.buckets[0].size
    micro = train_step.trace_micro(workload, [bucket], images, with_optimizer=True)
    found = [micro.weights, *micro.first.values(), *micro.more.values(), *micro.optimizer]
    for phase in (other_phases.load, other_phases.quantise, other_phases.validate, other_phases.preview):
        found += phase(workload)
    return found


def test_blocks_that_differ_in_more_than_their_number_are_not_repeated() -> None:
    short = Repetition(tiny_workload("sdxl"), {"mid_block": 6})
    path = "unet.mid_block.attentions.0.transformer_blocks"
    alike = [Storage(512, "temporary", f"{path}.{number}.ff", "forward") for number in range(3)]
    events = np.array([0, 1, 2, ~0, ~1, ~2], dtype=np.int32)
    last_larger = MemoryTrace("", (*alike[:2], replace(alike[2], bytes=1024)), events, ())
    assert_raises(short, last_larger)  # all are freed at the end, where the one in the middle stands for no other
    events = np.array([0, ~0, 1, ~1, 2, ~2], dtype=np.int32)
    assert [storage.module[-4] for storage in short.extended(replace(last_larger, events=events)).storages] == list(
        "012345"
    )
    first_larger = replace(
        last_larger, storages=(replace(alike[0], bytes=2048), *last_larger.storages[1:]), events=events
    )
    assert_raises(short, first_larger)
    assert_raises(short, replace(last_larger, storages=(alike[1], alike[0], alike[2]), events=events))


def assert_raises(short: Repetition, trace: MemoryTrace) -> None:
    with pytest.raises(NotRepeatedError):
        short.extended(trace)


def test_only_equal_blocks_are_repeated() -> None:
    workload = workload_without_base("sdxl", RecipeConfig(resolution=1024))
    short = repetition(workload)
    assert short is not None
    assert short.blocks == {"down_blocks.2": 10, "mid_block": 10, "up_blocks.0": 10}
    assert short.workload.unet_config["transformer_layers_per_block"] == [1, 2, 3]
    assert short.times("unet.up_blocks.0.attentions.2.transformer_blocks.1.attn1.to_q") == 8
    assert short.times("unet.up_blocks.0.attentions.2.transformer_blocks.2.attn1.to_q") == 1
    assert short.times("unet.up_blocks.1.attentions.0.transformer_blocks.1.attn1.to_q") == 1
    blocks = workload.recipe.model_copy(update={"max_weight_norm": 1.0})
    assert repetition(replace(workload, recipe=blocks)) is None
    assert repetition(replace(workload, fit=workload.fit.replaced(stream="full"))) is None
    assert repetition(workload_without_base("sd15", RecipeConfig(resolution=512))) is None
