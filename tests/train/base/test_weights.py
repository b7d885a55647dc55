"""A base whose tensors are not those of its models is refused by headers alone, before a run is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.jobs import photographs, write_job
from tests.support.tiny import Family, tiny_base
from trainer.base.source import open_base
from trainer.config.base import BaseConfig
from trainer.errors import BaseModelError
from trainer.training.run.start import start

Change = Callable[[dict[str, Tensor], str], None]

# One tensor of each model: its name in a single file, and its file and name in a folder.
TENSORS = {
    "UNet2DConditionModel": (
        "model.diffusion_model.middle_block.1.proj_in.weight",
        "unet/diffusion_pytorch_model.safetensors",
        "mid_block.attentions.0.proj_in.weight",
    ),
    "AutoencoderKL": (
        "first_stage_model.decoder.conv_out.weight",
        "vae/diffusion_pytorch_model.safetensors",
        "decoder.conv_out.weight",
    ),
    "CLIPTextModel": (
        "{clip}transformer.text_model.encoder.layers.1.mlp.fc2.weight",
        "text_encoder/model.safetensors",
        "text_model.encoder.layers.1.mlp.fc2.weight",
    ),
    "CLIPTextModelWithProjection": (
        "conditioner.embedders.1.model.transformer.resblocks.1.mlp.c_proj.weight",
        "text_encoder_2/model.safetensors",
        "text_model.encoder.layers.1.mlp.fc2.weight",
    ),
}
MODELS = [("sdxl", model) for model in TENSORS] + [("sd15", model) for model in list(TENSORS)[:3]]
CLIP = {"sd15": "cond_stage_model.", "sdxl": "conditioner.embedders.0."}
# Diffusers' converters look these up without asking whether they are there.
TAKEN_FOR_GRANTED = [
    "model.diffusion_model.label_emb.0.0.weight",
    "model.diffusion_model.output_blocks.2.2.conv.bias",
    "first_stage_model.decoder.up.1.upsample.conv.bias",
    "conditioner.embedders.1.model.text_projection",
    "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight",
    "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_bias",
]


def remove(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def widen(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.zeros([length + 1 for length in tensors[name].shape])


def flatten(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.zeros([])


def rewrite(file: Path, change: Change, name: str) -> None:
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(file)
    change(tensors, name)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize(("change", "code"), [(remove, "base.incomplete"), (widen, "base.other_shape")])
@pytest.mark.parametrize("form", ["single", "folder"])
@pytest.mark.parametrize(("family", "model"), MODELS)
def test_a_tensor_that_is_missing_or_of_another_shape(
    tmp_path: Path, family: Family, form: str, model: str, change: Change, code: str
) -> None:
    base = tiny_base(family, tmp_path / "bases", form=form)  # type: ignore[arg-type]
    single, file, name = TENSORS[model]
    if form == "single":
        rewrite(base, change, single.format(clip=CLIP[family]))
    else:
        rewrite(base / file, change, name)
    job = write_job(tmp_path / "job", base, photographs(tmp_path / "pictures", count=1))
    with pytest.raises(BaseModelError) as refused:
        start(job, [], lambda event: None)
    assert refused.value.code == code
    assert model in refused.value.sentence
    assert name.removeprefix("text_model.") in refused.value.sentence
    assert [path.name for path in job.parent.iterdir()] == ["job.toml"]


@pytest.mark.parametrize("change", [remove, flatten])
@pytest.mark.parametrize("name", TAKEN_FOR_GRANTED)
def test_what_diffusers_takes_for_granted_is_an_error_in_words_too(tmp_path: Path, name: str, change: Change) -> None:
    base = tiny_base("sdxl", tmp_path, form="single")
    rewrite(base, change, name)
    with pytest.raises(BaseModelError) as refused:
        open_base(BaseConfig(model=str(base))).require_weights()
    assert refused.value.code in ("base.incomplete", "base.other_shape")
