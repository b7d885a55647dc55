"""Pictures drawn here are those of diffusers' own pipelines, with LoRAs loaded by diffusers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPTokenizer

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.base.drawing import make_sampler
from trainer.config.base import BaseConfig
from trainer.config.report import PromptConfig
from trainer.files.tokens import vocabulary
from trainer.render import LoraUse, render
from trainer.training.run import start

PROMPT = PromptConfig(prompt="sks, a cat", negative="dog", steps=3, guidance=4.0, seed=7, width=64, height=64)


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LoRA of each family, trained at a rate that shows in the pictures."""
    folder = tmp_path_factory.mktemp("loras")
    pictures = photographs(folder / "pictures")
    made = {}
    for family in ("sd15", "sdxl"):
        job = write_job(folder / family, tiny_base(family, folder / "bases"), pictures)  # type: ignore[arg-type]
        settings = ["recipe.learning_rate=0.05", "recipe.text_encoder.learning_rate=0.05", "report.previews.prompts=[]"]
        settings += ["recipe.text_encoder_2.learning_rate=0.05"] if family == "sdxl" else []
        start(job, settings, lambda event: None)
        made[family] = folder / family / "runs" / "test" / "output" / "test.safetensors"
    return made


def tokenizer(**options: str) -> CLIPTokenizer:
    words, merges = vocabulary()
    return CLIPTokenizer(vocab=words, merges=cast(Any, merges), model_max_length=77, **options)


def by_diffusers(base: Path, family: str, lora: Path | None) -> Image.Image:
    kind: Any = diffusers.StableDiffusionXLPipeline if family == "sdxl" else diffusers.StableDiffusionPipeline
    others: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if family == "sdxl":
        others = {"add_watermarker": False, "tokenizer_2": tokenizer(pad_token="!")}
    pipeline = kind.from_pretrained(base, tokenizer=tokenizer(), **others)
    pipeline.scheduler = make_sampler(PROMPT.sampler, "epsilon", zero_terminal_snr=False)
    pipeline.set_progress_bar_config(disable=True)
    if lora:
        pipeline.load_lora_weights(lora)
    result = pipeline(
        PROMPT.prompt,
        negative_prompt=PROMPT.negative,
        num_inference_steps=PROMPT.steps,
        guidance_scale=PROMPT.guidance,
        width=64,
        height=64,
        generator=torch.Generator("cpu").manual_seed(PROMPT.seed),
    )
    picture: Image.Image = result.images[0]
    return picture


# As in trainer/base/drawing.py: between diffusers, numpy 2 and torch.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_equals_the_pipeline(loras: dict[str, Path], tmp_path: Path, family: str, with_lora: bool) -> None:
    base = loras[family].parents[4] / "bases" / f"tiny-{family}-float32-0-epsilon"
    used = [LoraUse(loras[family])] if with_lora else []
    (file,) = render(
        BaseConfig(model=str(base)),
        used,
        [PROMPT],
        tmp_path,
        device=torch.device("cpu"),
        dtype=torch.float32,
        on_drawn=lambda *_: None,
        on_notice=lambda *_: None,
    )
    drawn = np.asarray(Image.open(file), np.int16)
    expected = by_diffusers(base, family, loras[family] if with_lora else None)
    assert np.abs(drawn - np.asarray(expected, np.int16)).max() <= 1
    if with_lora:
        plain = by_diffusers(base, family, None)
        assert np.abs(drawn - np.asarray(plain, np.int16)).max() > 5  # the LoRA shows
