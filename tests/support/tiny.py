"""Tiny bases of the real classes: SD 1.5 and SDXL with random weights, as a single file or a diffusers folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from tests.support.ldm import open_clip_to_ldm, unet_to_ldm, vae_to_ldm, with_text_model

Family = Literal["sd15", "sdxl"]
Depth = Literal[1, 2]

_UNET_SD15: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
}
_UNET_SDXL: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [32, 64],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": [2, 4],
    "cross_attention_dim": 64,
    "transformer_layers_per_block": [1, 2],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,  # pooled 32 + six numbers of 8
}
_VAE: dict[str, Any] = {
    "sample_size": 64,
    "latent_channels": 4,
    "block_out_channels": [8, 16, 16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "norm_num_groups": 8,
}
_TEXT: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 32,
    "max_position_embeddings": 77,
    # As in the published configs of both families; transformers interprets 2 as "the largest id", CLIP's end token.
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_SCALING = {"sd15": 0.18215, "sdxl": 0.13025}


def tiny_configs(
    family: Family, *, prediction: str = "epsilon", zero_terminal_snr: bool = False, depth: Depth = 2
) -> dict[str, dict[str, Any]]:
    """Return the diffusers and transformers configs of a tiny base, by the name of their subfolder.

    `depth` is `layers_per_block` of UNet and VAE: 2 as in published models, 1 for tests that train and do not check
    names.
    """
    configs: dict[str, dict[str, Any]] = {
        "unet": {**(_UNET_SD15 if family == "sd15" else _UNET_SDXL), "layers_per_block": depth},
        "vae": {**_VAE, "layers_per_block": depth, "scaling_factor": _SCALING[family]},
        "text_encoder": {**_TEXT, "hidden_act": "quick_gelu"},
        "scheduler": {
            "_class_name": "DDIMScheduler",
            "beta_schedule": "scaled_linear",
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "num_train_timesteps": 1000,
            "prediction_type": "epsilon" if prediction == "epsilon" else "v_prediction",
            "rescale_betas_zero_snr": zero_terminal_snr,
            "timestep_spacing": "trailing" if zero_terminal_snr else "leading",
            "steps_offset": 1,
            "set_alpha_to_one": False,
            "clip_sample": False,
        },
    }
    if family == "sdxl":
        configs["text_encoder_2"] = {**_TEXT, "hidden_act": "gelu"}
    return configs


@cache
def tiny_models(family: Family, seed: int = 0, depth: Depth = 2) -> dict[str, nn.Module]:
    """Build the models of a tiny base by subfolder name; shared in the session, so treat them as read-only."""
    configs = tiny_configs(family, depth=depth)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        models: dict[str, nn.Module] = {
            "unet": UNet2DConditionModel.from_config(configs["unet"]),
            "vae": AutoencoderKL.from_config(configs["vae"]),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**configs["text_encoder"])),
        }
        if family == "sdxl":
            models["text_encoder_2"] = CLIPTextModelWithProjection(CLIPTextConfig(**configs["text_encoder_2"]))
        for model in models.values():
            model.eval().requires_grad_(False)
            for parameter in model.parameters():  # norms start at 1 and 0: noise reveals when two of them are swapped
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return models


def tiny_base(
    family: Family,
    folder: Path,
    *,
    form: Literal["folder", "single"] = "folder",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    prediction: Literal["epsilon", "v"] = "epsilon",
    zero_terminal_snr: bool = False,
    depth: Depth = 2,
) -> Path:
    """Write a tiny base below `folder` and return its path; the same arguments give the same weights in either form.

    A base already written there with these arguments is reused, so that a session-wide folder serves many tests.
    """
    name = f"tiny-{family}-{str(dtype).removeprefix('torch.')}-{seed}-{prediction}"
    name += f"{'-ztsnr' * zero_terminal_snr}{'-shallow' * (depth == 1)}"
    configs = tiny_configs(family, prediction=prediction, zero_terminal_snr=zero_terminal_snr, depth=depth)
    weights = {
        part: {key: tensor.to(dtype) for key, tensor in model.state_dict().items()}
        for part, model in tiny_models(family, seed, depth).items()
    }
    path = folder / (f"{name}.safetensors" if form == "single" else name)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if form == "single":
        save_file(
            single_file_tensors(family, weights, configs, prediction, zero_terminal_snr),
            path,
            single_file_metadata(family, configs),
        )
    else:
        write_folder(family, path, weights, configs)
    return path


def single_file_metadata(family: Family, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the metadata in which a small single file contains its own configs."""
    return {"format": "pt", "impasto.configs": json.dumps({"family": family, **configs})}


def models_on_meta(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, nn.Module]:
    """Return the models of a base by part, from configs of any size and family, without memory for their weights."""
    with torch.device("meta"):
        models: dict[str, nn.Module] = {
            "unet": UNet2DConditionModel.from_config(dict(configs["unet"])),
            "vae": AutoencoderKL.from_config(dict(configs["vae"])),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**configs["text_encoder"])),
        }
        if "text_encoder_2" in configs:
            models["text_encoder_2"] = CLIPTextModelWithProjection(CLIPTextConfig(**configs["text_encoder_2"]))
        return models


def single_file_tensors(
    family: Family,
    weights: Mapping[str, Mapping[str, Tensor]],
    configs: Mapping[str, Mapping[str, Any]],
    prediction: str = "epsilon",
    zero_terminal_snr: bool = False,
) -> dict[str, Tensor]:
    """Arrange the models' weights as in the family's single files, with markers and the usual extras."""
    clip = "cond_stage_model.transformer." if family == "sd15" else "conditioner.embedders.0.transformer."
    parts = {
        "model.diffusion_model.": unet_to_ldm(weights["unet"], configs["unet"]),
        "first_stage_model.": vae_to_ldm(weights["vae"], configs["vae"]),
        clip: with_text_model(weights["text_encoder"]),
    }
    if family == "sdxl":
        parts["conditioner.embedders.1.model."] = open_clip_to_ldm(with_text_model(weights["text_encoder_2"]))
    tensors = {prefix + name: tensor.contiguous() for prefix, part in parts.items() for name, tensor in part.items()}
    tensors[f"{clip}text_model.embeddings.position_ids"] = torch.arange(77)[None]
    tensors["alphas_cumprod"] = torch.linspace(0.999, 0.005, 1000)
    if prediction == "v":
        tensors["v_pred"] = torch.zeros(0)
    if zero_terminal_snr:
        tensors["ztsnr"] = torch.zeros(0)
    return tensors


def write_folder(
    family: Family, path: Path, weights: Mapping[str, Mapping[str, Tensor]], configs: Mapping[str, Mapping[str, Any]]
) -> None:
    classes = {
        "unet": ("diffusers", "UNet2DConditionModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    }
    index: dict[str, Any] = {
        "_class_name": "StableDiffusionPipeline" if family == "sd15" else "StableDiffusionXLPipeline"
    }
    for part, tensors in weights.items():
        library, class_name = classes[part]
        target = path / part
        target.mkdir(parents=True)
        model = "diffusion_pytorch_model" if library == "diffusers" else "model"
        named = tensors if library == "diffusers" else with_text_model(tensors)
        save_file(
            {key: tensor.contiguous() for key, tensor in named.items()},
            target / f"{model}.safetensors",
            {"format": "pt"},
        )
        naming = (
            {"_class_name": class_name}
            if library == "diffusers"
            else {"architectures": [class_name], "model_type": "clip_text_model"}
        )
        (target / "config.json").write_text(json.dumps({**naming, **configs[part]}, indent=1), encoding="utf-8")
        index[part] = [library, class_name]
    (path / "scheduler").mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text(
        json.dumps(configs["scheduler"], indent=1), encoding="utf-8"
    )
    index["scheduler"] = ["diffusers", configs["scheduler"]["_class_name"]]
    (path / "model_index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
