"""Exported files: loaded by diffusers, merged by hand, compared with the golden lists, and broken on purpose."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors import safe_open
from torch import nn
from transformers import CLIPTokenizer

from tests.support.loras import EVERYTHING, Models, merge, random_weights
from tests.support.tiny import tiny_configs
from trainer.adapter import export
from trainer.adapter.attach import Adapter
from trainer.adapter.export import Naming, export_lora
from trainer.config.base import Family
from trainer.errors import LoraFileError
from trainer.files.tokens import vocabulary

FAMILIES: list[Family] = ["sd15", "sdxl"]
METADATA = {"ss_v2": "False", "ss_output_name": "Zürich", "modelspec.title": "t"}


def load_in_diffusers(models: Models, path: Path) -> None:
    words, merges = vocabulary()
    tokenizer = CLIPTokenizer(vocab=words, merges=cast(Any, merges))
    scheduler = DDIMScheduler.from_config(tiny_configs(models.family)["scheduler"])
    parts: dict[str, Any] = {**models.parts, "vae": None, "tokenizer": tokenizer, "scheduler": scheduler}
    pipeline: Any
    if models.family == "sd15":
        pipeline = StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    else:
        pipeline = StableDiffusionXLPipeline(**parts, tokenizer_2=tokenizer, add_watermarker=False)
    pipeline.load_lora_weights(path)
    for model in models.parts.values():
        nn.Module.to(model, models.unet.dtype)  # the LoRA's weights come in the file's dtype


@pytest.mark.parametrize("naming", ["kohya", "diffusers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_predicts_what_training_predicts(family: Family, naming: Naming, tmp_path: Path) -> None:
    trained, plain = Models.copies(family), Models.copies(family)
    before = plain.predict()
    adapter = trained.attach()
    weights = random_weights(adapter)
    dtype = torch.float16 if naming == "kohya" else torch.float32
    export_lora(tmp_path / "a.safetensors", weights, adapter, METADATA, dtype=dtype, naming=naming)
    load_in_diffusers(plain, tmp_path / "a.safetensors")
    expected, found = trained.predict(), plain.predict()
    assert (expected - before).norm() > 0.05 * before.norm()
    # Folding alpha into lora_B rounds once in fp32; the universal file is exact.
    bound = 1e-12 if naming == "kohya" else 1e-6
    assert (found - expected).norm() < bound * (expected - before).norm()
