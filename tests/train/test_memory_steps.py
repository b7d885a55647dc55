"""What a trace says of a training step against what real steps on the CPU do."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import pytest

from tests.support.cpu_steps import outside_kernels, real_micro_batch, real_steps, tiny_subject, traced_bytes
from trainer.config.base import Family
from trainer.memory import tracer
from trainer.memory.steps import trace_steps

BUCKET = (64, 64)

TEXT = {"text_encoder": {"learning_rate": 1e-4}, "text_encoder_2": {"learning_rate": 1e-4}}
MASKED = {"objective": {"loss": "huber", "input_perturbation": 0.1}}
SETTINGS: list[tuple[Family, int, Mapping[str, Any], Mapping[str, Any]]] = [
    ("sd15", 1, {"layers": "attention"}, {}),
    ("sd15", 2, {"layers": "all", "objective": {"min_snr_gamma": 5.0}}, {}),
    ("sd15", 2, {**TEXT, **MASKED}, {"checkpointing": ["down_blocks.0", "mid_block"]}),
    ("sdxl", 1, {}, {"checkpointing": "full"}),
    ("sdxl", 2, {**TEXT, "token_chunks": 150}, {}),
    ("sdxl", 3, {"clip_gradient": 0.0}, {"checkpointing": ["up_blocks.0"]}),
]


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the buffers of CUDA's kernels, which a CPU's do not have."""
    monkeypatch.setattr(tracer, "hidden_bytes", lambda func, args: ())


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(("family", "pictures", "recipe", "fit"), SETTINGS)
def test_every_allocation_of_real_steps_is_traced_in_its_order(
    family: Family, pictures: int, recipe: Mapping[str, Any], fit: Mapping[str, Any]
) -> None:
    """Two optimizer steps of two micro-batches each: the same bytes taken and given back, one by one."""
    subject = tiny_subject(family, recipe, fit, masks="objective" in recipe)
    real = [outside_kernels(part) for part in real_steps(subject, BUCKET, pictures, micro_batches=2, steps=2)]
    tapes = trace_steps(subject, [BUCKET], pictures)
    micro = real_micro_batch(subject, BUCKET, pictures)
    first, more = tapes.micro_first[BUCKET], tapes.micro_more[BUCKET]
    micros = [traced_bytes(first, micro), traced_bytes(more, micro)]
    traced = [*micros, traced_bytes(tapes.optimizer_first), *micros, traced_bytes(tapes.optimizer)]
    for part, (seen, said) in enumerate(zip(real, traced, strict=True)):
        assert seen == said, f"part {part}"
        assert max(accumulate(seen)) == max(accumulate(said)) > 0
