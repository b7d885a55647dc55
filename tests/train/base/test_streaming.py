"""A streamed base trains bit for bit like one that stays on the device, and reads no weight that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sample import of_the_day
from tests.support.tiny import tiny_base
from tests.train.dataset.test_cache import prepared, quiet, showings
from trainer.base import streaming
from trainer.base.source import open_base
from trainer.base.stream_order import AHEAD
from trainer.base.streaming import StreamedWeight, WeightStream, streamed_modules
from trainer.config.base import BaseConfig, Family
from trainer.config.lr_schedule import Segment
from trainer.training.build import RunParts, build_engine
from trainer.training.callbacks.preview import Previewer
from trainer.training.callbacks.validation import losses_of_image
from trainer.training.engine import Engine

MARK = 0xFF
"""Byte of freed memory: NaN in bf16, fp16 and fp32."""


@pytest.fixture(autouse=True)
def _every_weight_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MIN_BYTES", 0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the memory of freed weights and fill it with NaN, so that every use outside of its time shows."""

    def fill(weight: StreamedWeight) -> None:
        if not weight.storage.nbytes():
            weight.storage.resize_(weight.bytes)
        torch.empty(0, dtype=torch.uint8).set_(weight.storage).fill_(MARK)

    def free(stream: WeightStream, block: Any) -> None:
        block.resident = False
        for weight in block.weights:
            fill(weight)

    monkeypatch.setattr(StreamedWeight, "free", fill)
    monkeypatch.setattr(WeightStream, "_free", free)


def engine_of(folder: Path, family: Family, *settings: str) -> Engine:
    return built(folder, family, *settings)[0]


def built(folder: Path, family: Family, *settings: str) -> tuple[Engine, RunParts]:
    job, images, parts = prepared(folder, settings, family)
    samples = list(showings(job, images, 12))
    parts.cache.ensure_latents(samples, quiet)
    prompts = [prompt.prompt for prompt in job.report.previews.prompts]
    parts.cache.ensure_texts(["", *prompts, *(sample.caption for sample in samples)], quiet)
    return build_engine(job, parts, [Segment(0, 6)], fresh=True), parts


def trained(engine: Engine, steps: int = 3) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        assert engine.train_step().skipped is None
    return {key: master.detach().clone() for key, master in engine.master_weights.masters.items()}


def held(stream: WeightStream) -> int:
    return sum(weight.storage.nbytes() for weight in stream.weights)


def stream_setting(amount: str | int) -> str:
    return f"fit.stream={amount}" if isinstance(amount, int) else f'fit.stream="{amount}"'


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("family", "checkpointing", "quantize", "amount"),
    of_the_day(
        3,
        [
            ("sd15", "none", "none", "full"),
            ("sdxl", "none", "none", 3),
            ("sdxl", "full", "nf4", "full"),
            ("sd15", "full", "none", 4),
            ("sdxl", "none", "int8_products", "full"),
            ("sdxl", "full", "none", "full"),
            ("sdxl", "full", "int8", "full"),
            ("sdxl", ("down_blocks.0", "mid_block"), "none", "full"),
        ],
    ),
)
def test_training_is_bit_identical(
    tmp_path: Path, family: Family, checkpointing: str | tuple[str, ...], quantize: str, amount: str | int
) -> None:
    settings = (
        f"fit.gradient_checkpointing={json.dumps(checkpointing)}",
        f'fit.quantize="{quantize}"',
        'recipe.layers="all"',
    )
    resident = trained(engine_of(tmp_path / "resident", family, *settings))
    engine = engine_of(tmp_path / "streamed", family, *settings, stream_setting(amount))
    streamed = trained(engine)
    assert resident.keys() == streamed.keys()
    assert all(torch.equal(resident[key], streamed[key]) for key in resident)
    assert all(streamed[slot.up].abs().max() > 0 for slot in engine.adapter.slots)


@pytest.mark.usefixtures("poisoned")
def test_a_late_copy_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests can fail: without the fetch before backward, NaN reaches the loss or the gradients."""
    monkeypatch.setattr(WeightStream, "_on_gradient", lambda *_: None)
    engine = engine_of(tmp_path, "sdxl", 'fit.stream="full"')
    assert any(engine.train_step().skipped for _ in range(2))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_only_a_few_blocks_have_memory_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    engine = engine_of(
        tmp_path, "sdxl", f'fit.gradient_checkpointing="{checkpointing}"', 'fit.stream="full"', 'recipe.layers="all"'
    )
    stream = engine.models.stream
    assert stream is not None
    sizes = [sum(weight.bytes for weight in block.weights) for block in stream.blocks]
    most: list[int] = []
    stream.on_allocated = lambda _: most.append(held(stream))
    trained(engine)
    largest = max(sum(sizes[place : place + AHEAD + 1]) for place in range(len(sizes)))
    assert 0 < max(most) <= largest < sum(sizes)
    assert not held(stream), "between steps no block stays, so that each begins with the same free memory"


def test_validation_and_previews_are_bit_identical(tmp_path: Path) -> None:
    found = []
    for stream in ("none", "full"):
        engine, parts = built(tmp_path / stream, "sdxl", stream_setting(stream))
        micro = engine.collator.assemble(engine.batches.batch(0)[:1], 1)
        losses = losses_of_image(engine.models, engine.noise_schedule, [micro], engine.device)
        previewer = Previewer(engine.job, parts.source, parts.cache, tmp_path / stream)
        previewer.render_all(1, engine.models.unet, (), lambda *_: None, quiet)
        found.append((losses, previewer.path(1, 0).read_bytes()))
    assert found[0] == found[1]


def test_blocks_are_streamed_in_the_order_in_which_they_run(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "sdxl")
    unet, ran = engine.models.unet, []
    every = streamed_modules(unet, "full")
    for block in every:
        block.register_forward_pre_hook(lambda module, _: ran.append(module))
    engine.train_step()
    assert ran[: len(every)] == every


@pytest.mark.parametrize(("amount", "count"), [("none", 0), (1, 1), (3, 3), (999, None), ("full", None)])
def test_a_number_of_blocks_is_spread_over_all(tmp_path: Path, amount: Any, count: int | None) -> None:
    unet = open_base(BaseConfig(model=str(tiny_base("sdxl", tmp_path)))).empty_unet()
    every = streamed_modules(unet, "full")
    chosen = streamed_modules(unet, amount)
    assert len(chosen) == (len(every) if count is None else count)
    places = [every.index(module) for module in chosen]
    gaps = [later - earlier for earlier, later in zip([-1, *places], places, strict=False)]
    assert places == sorted(set(places)) and (not gaps or max(gaps) - min(gaps) <= 1 or count == 1)
