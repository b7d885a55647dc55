"""Measure the host time of a step: a UNet of full depth on the CPU, so narrow that arithmetic hardly counts.

At batch size 1 a GPU waits for the host if host time exceeds its arithmetic. The host does the same work for every
operation on the CPU as for a GPU, except for the kernel launch, so what is saved here is saved there, plus a launch per
operation. 16-bit products use different code on the CPU, so the base is in fp32; LoRA weights of higher precision than
the base, which most trainers have in fp32 next to bf16, are in fp64 here, and need as many casts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from trainer.adapter.attach import attach
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.files.assets import bundled_configs

WIDTH = 32
"""Channels of the outermost block."""
WARM_UP = 2
"""Steps of each round that do not count."""
ROUNDS = 3
LAYERS: Mapping[str, tuple[torch.dtype, bool]] = {
    "peft-wide": (torch.float64, False),
    "peft": (torch.float32, False),
    "lean": (torch.float32, True),
}
"""LoRA layers by dtype, and whether they are those of trainer.adapter.lean."""


@dataclass(frozen=True)
class HostTime:
    """Milliseconds of CPU time, median of the steps."""

    forward: float
    backward: float


def measure_host(family: Family, steps: int) -> dict[str, HostTime]:
    """Measure each kind of LoRA layers, over so many steps of each of three rounds.

    They alternate by rounds, so that other load on the machine affects all alike, and none benefits from the CPU's
    caches.
    """
    works = {name: _work(family, dtype, lean=lean) for name, (dtype, lean) in LAYERS.items()}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            spent[name] += [_timed(work) for _ in range(WARM_UP + steps)][WARM_UP:]
    return {
        name: HostTime(*(1e3 * statistics.median(one) for one in zip(*times, strict=True)))
        for name, times in spent.items()
    }


def _timed(work: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the CPU seconds of forward and of backward, both of which run in this thread."""
    started = time.thread_time()
    loss = work()
    between = time.thread_time()
    loss.backward()  # type: ignore[no-untyped-call]
    return between - started, time.thread_time() - between


def _work(family: Family, dtype: torch.dtype, *, lean: bool) -> Callable[[], Tensor]:
    """Return a forward pass over one image of 64 pixels and a few tokens."""
    unet = narrow_unet(family)
    recipe = RecipeConfig(layers="attention", rank=4, alpha=4.0)
    attach(family, unet, [], recipe, dtype=dtype, generator=lambda _: np.random.default_rng(0), lean=lean)
    unet.train()
    width = unet.config["cross_attention_dim"]
    more = {"text_embeds": torch.zeros(1, WIDTH), "time_ids": torch.zeros(1, 6)} if family == "sdxl" else None
    latents, text, time_step = torch.ones(1, 4, 8, 8), torch.ones(1, 7, width), torch.tensor([500])

    def forward() -> Tensor:
        (said,) = unet(latents, time_step, encoder_hidden_states=text, added_cond_kwargs=more, return_dict=False)
        loss: Tensor = said.square().mean()
        return loss

    return forward


def narrow_unet(family: Family) -> UNet2DConditionModel:
    """Return a UNet with all layers of the published one, each with few channels."""
    config = dict(bundled_configs(family)["unet"])
    full = config["block_out_channels"]
    widths = [WIDTH * width // full[0] for width in full]
    changed = {"block_out_channels": widths, "cross_attention_dim": WIDTH, "sample_size": 8}
    if family == "sdxl":
        changed |= {
            "attention_head_dim": [width // WIDTH for width in widths]
        }  # this is the number of heads, despite its name
        changed |= {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": WIDTH + 6 * 8}
    unet: UNet2DConditionModel = UNet2DConditionModel.from_config({**config, **changed})
    nn.Module.requires_grad_(unet, False)
    return unet
