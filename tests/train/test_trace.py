"""The same step on meta tensors at full size: no weights, no arithmetic, every allocation seen, as forecasts do."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from trainer.adapter.attach import Adapter, attach
from trainer.base.text import TextConditioning
from trainer.config.base import Family
from trainer.config.objective import ObjectiveConfig
from trainer.config.optimizer import AdamW8bitConfig, AdamWConfig
from trainer.config.recipe import RecipeConfig
from trainer.files.assets import asset_path
from trainer.training.gradient_checkpointing import set_checkpointing
from trainer.training.masters import MasterWeights, clip, measure
from trainer.training.objective import NoiseSchedule
from trainer.training.optimizer import build_optimizer, set_learning_rates
from trainer.training.step import MicroBatch, StepModels, training_step

META = torch.device("meta")
GIB = 2**30
SIZES = {"sd15": (512, 768, None), "sdxl": (1024, 2048, 1280)}


@pytest.fixture(autouse=True)
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta PyTorch would choose the math kernel; a GPU takes flash, which keeps no matrix of scores."""

    def flash(query: Tensor, key: Tensor, value: Tensor, *_: object, is_causal: bool = False, **__: object) -> Tensor:
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)


class Allocations(TorchDispatchMode):
    """Counts operations that compute, and the bytes that live in storages born inside, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.live = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        taken = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.note(tensor.untyped_storage(), taken)
        self.operations += not (func.is_view or func is torch.ops.aten._unsafe_view.default)
        return result

    def note(self, storage: torch.UntypedStorage, taken: set[int]) -> None:
        name = storage._cdata
        if name in self.known or name in taken:
            return
        self.known.add(name)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, name, storage.nbytes())

    def forget(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.live -= size


@dataclass
class Traced:
    """A full-size base with its adapter, on the meta device."""

    models: StepModels
    adapter: Adapter
    masters: MasterWeights


def config(family: Family, part: str) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(
        asset_path("models", family, part, "config.json").read_text(encoding="utf-8")
    )
    return loaded


def full_size(family: Family, recipe: RecipeConfig, dtype: torch.dtype = torch.bfloat16) -> Traced:
    with META:
        unet = UNet2DConditionModel.from_config(config(family, "unet"))
        encoders: list[nn.Module] = [CLIPTextModel(CLIPTextConfig(**config(family, "text_encoder")))]
        if family == "sdxl":
            encoders.append(CLIPTextModelWithProjection(CLIPTextConfig(**config(family, "text_encoder_2"))))
    for model in (unet, *encoders):
        nn.Module.to(model, dtype).eval().requires_grad_(False)
    adapter = attach(family, unet, encoders, recipe, dtype=dtype, generator=lambda name: np.random.default_rng(0))
    live = any(part != "unet" for part in adapter.part_of.values())
    models = StepModels(family, unet, tuple(encoders) if live else (), None, dtype)
    return Traced(models, adapter, MasterWeights(adapter.parameters))


def meta_batch(traced: Traced, count: int) -> MicroBatch:
    family = traced.models.family
    side, width, pooled = SIZES[family]
    latents = torch.empty(count, 4, side // 8, side // 8)
    live = bool(traced.models.text_encoders)
    dtype = traced.models.dtype
    text = TextConditioning(
        torch.empty(count, 77, width, dtype=dtype), torch.empty(count, pooled, dtype=dtype) if pooled else None
    )
    return MicroBatch(
        latents=latents,
        noise=latents.clone(),
        input_noise=None,
        timesteps=torch.zeros(count, dtype=torch.int64),
        text=None if live else text,
        tokens=(torch.zeros(count, 77, dtype=torch.int64),) * len(traced.models.text_encoders) if live else None,
        time_ids=torch.empty(count, 6) if pooled else None,
        mask=latents[:, :1].clone(),
        weights=torch.ones(count),
    ).to(META)


def run_step(traced: Traced, batch: MicroBatch) -> Tensor:
    schedule = NoiseSchedule.create("epsilon", False).to(META, torch.float32)
    loss = training_step(traced.models, schedule, ObjectiveConfig(min_snr_gamma=5.0), batch, 1024.0)
    assert (loss.is_meta, loss.shape, loss.dtype) == (True, (), torch.float32)
    return loss


@pytest.fixture(scope="module")
def sdxl() -> Traced:
    return full_size("sdxl", RecipeConfig(rank=16))


def test_sdxl_at_1024_without_checkpointing(sdxl: Traced) -> None:
    """A micro-step of one picture; elsewhere PEFT was counted at 10.4 k operations and 6.29 GiB."""
    set_checkpointing(sdxl.models.unet, (), "none")
    batch = meta_batch(sdxl, 1)
    with Allocations() as mode:
        run_step(sdxl, batch)
        operations = mode.operations
        sdxl.masters.accumulate()
    assert operations == pytest.approx(10_400, rel=0.05)
    assert mode.peak / GIB == pytest.approx(6.29, rel=0.03)
    gradients = sdxl.masters.gradients()
    assert len(gradients) == len(sdxl.adapter.parameters) == 2 * 722
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    # What outlives the step is the gradients, once, in fp32.
    assert mode.live == pytest.approx(sum(gradient.nbytes for gradient in gradients), abs=4096)
    sdxl.masters.zero_grad()


def test_sdxl_at_1024_with_checkpointing(sdxl: Traced) -> None:
    """Blocks keep their inputs and are computed again: a forward more, a tenth of the memory (0.45 GiB kept, A4)."""
    set_checkpointing(sdxl.models.unet, (), "full")
    batch = meta_batch(sdxl, 1)
    with Allocations() as mode:
        run_step(sdxl, batch)
    assert 14_000 < mode.operations < 16_500
    assert 0.45 < mode.peak / GIB < 0.65
    assert all(weight.grad is not None for weight in sdxl.adapter.parameters.values())
    sdxl.masters.zero_grad()


def test_sd15_with_its_text_encoder_through_whole_steps() -> None:
    """Two optimizer steps: what stays after either is the optimizer's state, so a run's peak is in the second."""
    traced = full_size("sd15", RecipeConfig.model_validate({"text_encoder": {"learning_rate": 1e-5}}))
    assert len(traced.adapter.parameters) == 2 * (192 + 72)
    masters, batch = traced.masters, meta_batch(traced, 2)
    left, peaks = [], []
    with Allocations() as mode:
        optimizer = build_optimizer(AdamWConfig(), {"unet": (1e-4, list(masters.masters.values()))})
        for _ in range(2):
            mode.peak = mode.live
            set_learning_rates(optimizer, 0.5)
            loss = run_step(traced, batch)
            masters.accumulate()
            assert measure(loss, masters, 1024.0).shape == (2,)
            clip(masters, 2.0, 1.0, 1024.0)
            optimizer.step()
            masters.refresh()
            masters.zero_grad()
            left.append(mode.live)
            peaks.append(mode.peak)
    state = 2 * sum(master.nbytes for master in masters.masters.values())
    assert left == [pytest.approx(state, abs=4096)] * 2
    assert peaks[1] == pytest.approx(peaks[0] + state, abs=4096)


def test_eight_bit_state_is_seen_too() -> None:
    weight = Parameter(torch.empty(64, 64, device=META))
    optimizer = build_optimizer(AdamW8bitConfig(), {"unet": (1e-4, [weight])})
    weight.grad = torch.empty_like(weight)
    with Allocations() as mode:
        optimizer.step()
    # Two states of a byte a weight, two fp32 maxima for each 256 weights, two maps of 256 fp32 numbers.
    assert mode.live == pytest.approx(2 * 4096 + 2 * 4 * 16 + 2 * 4 * 256, abs=256)
