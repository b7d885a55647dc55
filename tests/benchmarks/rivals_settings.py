"""The settings of each trainer that is compared: the same settings in the terms of its own command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.config.base import Family
from trainer.config.toml_file import toml_value
from trainer.protocol import files

RATE = 1e-4
TOKENIZERS = ("openai_clip-vit-large-patch14", "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k")
Layers = Literal["attention", "linear"]


@dataclass(frozen=True)
class Settings:
    """Settings that all trainers share."""

    resolution: int
    batch: int
    steps: int
    """The step that ends the measurement, warm-up included."""
    small: bool
    """Tiny models in fp32; otherwise whole ones in bf16."""
    device: Literal["cpu", "cuda"]
    warm_up: int = 5
    rank: int = 16
    family: Family = "sdxl"


@dataclass(frozen=True)
class Place:
    """Paths: bases in both forms, images in each layout, and an output folder."""

    folder: Path
    single: Path
    diffusers: Path
    pictures: Path
    """Images with caption files."""
    listed: Path
    """The same with metadata.jsonl instead."""
    repeated: Path
    """A folder that contains `1000_pictures`."""
    tokenizers: Path
    """A folder with a tokenizer under each name of TOKENIZERS, for trainers that would download it."""


Command = Callable[[Settings, Place, Path], list[str]]


@dataclass(frozen=True)
class Rival:
    """A trainer: its command line, and the layers that its LoRA adapts."""

    name: str
    layers: Layers
    command: Command
    """From settings, place and checkout: a script with its arguments, or "-m", a module and its arguments."""
    inside: str = "."
    """The folder of the checkout in which it starts and from which it imports."""
    environment: Mapping[str, str] = field(default_factory=dict)


def ours(layers: Layers, *, graphs: bool = False) -> Rival:
    """Return this trainer, as a user starts it, or with the experimental CUDA graphs."""
    name = f"Impasto, {layers}" + (", graphs" if graphs else "")

    def command(settings: Settings, place: Place, checkout: Path) -> list[str]:
        job = place.folder / "job.toml"
        values: Mapping[str, Any] = {
            "name": name,
            "base.model": str(place.single),
            "recipe.layers": layers,
            "recipe.rank": settings.rank,
            "recipe.alpha": float(settings.rank),
            "recipe.resolution": settings.resolution,
            "recipe.effective_batch": settings.batch,
            "recipe.learning_rate": RATE,
            "recipe.steps": settings.steps + 2,
            "fit.device": settings.device,
            "fit.dtype": "fp32" if settings.small else "bf16",
            "fit.micro_batch": settings.batch,
            "fit.gradient_checkpointing": "none",
            "fit.quantize": "none",
            "fit.cuda_graphs": graphs,
            "report.validation.every": 10**6,
            "report.saving.every_steps": 10**6,
            "report.saving.checkpoint_every": 10**6,
            "report.previews.prompts": [],
        }
        lines = ["schema = 1", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
        folders = f"[[dataset.folders]]\npath = {toml_value(str(place.pictures))}\n"
        files.write_text(job, "\n".join(lines) + "\n" + folders)
        return ["-m", "trainer", "train", str(job)]

    return Rival(name, layers, command)


def _diffusers(settings: Settings, place: Place, checkout: Path) -> list[str]:
    name = {"sdxl": "train_text_to_image_lora_sdxl.py", "sd15": "train_text_to_image_lora.py"}[settings.family]
    return [
        str(checkout / "examples" / "text_to_image" / name),
        f"--pretrained_model_name_or_path={place.diffusers}",
        f"--train_data_dir={place.listed}",
        "--caption_column=text",
        f"--resolution={settings.resolution}",
        f"--train_batch_size={settings.batch}",
        f"--max_train_steps={settings.steps + 2}",
        "--checkpointing_steps=1000000",
        f"--rank={settings.rank}",
        f"--learning_rate={RATE}",
        "--lr_warmup_steps=0",
        "--dataloader_num_workers=2",
        f"--mixed_precision={'no' if settings.small else 'bf16'}",
        f"--output_dir={place.folder / 'out'}",
        f"--cache_dir={place.folder / 'hub'}",
    ]


def _sd_scripts(settings: Settings, place: Place, checkout: Path) -> list[str]:
    precision = "no" if settings.small else "bf16"
    xl = settings.family == "sdxl"
    return [
        str(checkout / ("sdxl_train_network.py" if xl else "train_network.py")),
        f"--pretrained_model_name_or_path={place.single}",
        f"--train_data_dir={place.repeated}",
        f"--tokenizer_cache_dir={place.tokenizers}",
        "--caption_extension=.txt",
        f"--resolution={settings.resolution}",
        f"--train_batch_size={settings.batch}",
        f"--max_train_steps={settings.steps + 2}",
        "--network_module=networks.lora",
        f"--network_dim={settings.rank}",
        f"--network_alpha={settings.rank}",
        "--network_train_unet_only",
        "--cache_latents",
        *(["--cache_text_encoder_outputs"] if xl else []),  # it has no such cache for SD 1.5
        f"--learning_rate={RATE}",
        "--optimizer_type=AdamW",
        f"--mixed_precision={precision}",
        "--no_half_vae",
        "--sdpa",
        "--persistent_data_loader_workers",
        "--max_data_loader_n_workers=2",
        f"--output_dir={place.folder / 'out'}",
    ]


def _onetrainer(settings: Settings, place: Place, checkout: Path) -> list[str]:
    dtype = "FLOAT_32" if settings.small else "BFLOAT_16"
    part = {"train": False, "weight_dtype": dtype}
    model, preset = {
        "sdxl": ("STABLE_DIFFUSION_XL_10_BASE", "SDXL/#sdxl 1.0 LoRA.json"),
        "sd15": ("STABLE_DIFFUSION_15", "SD1.5/#sd 1.5 LoRA.json"),
    }[settings.family]
    config = {
        "training_method": "LORA",
        "model_type": model,
        "base_model_name": str(place.diffusers),  # for a single file it would download the configurations
        "output_model_format": "KOHYA_LORA",
        "output_model_destination": str(place.folder / "out" / "lora.safetensors"),
        "workspace_dir": str(place.folder / "workspace"),
        "cache_dir": str(place.folder / "cache"),
        "tensorboard": False,
        "concepts": [
            {
                "name": "pictures",
                "path": str(place.pictures),
                "text": {"prompt_source": "sample"},
                "image": {"enable_crop_jitter": False},
            }
        ],
        "samples": [],
        "resolution": str(settings.resolution),
        "aspect_ratio_bucketing": False,
        "batch_size": settings.batch,
        "epochs": 1000,
        "learning_rate": RATE,
        "learning_rate_warmup_steps": 0,
        # What its window sets for AdamW; otherwise, it would replace the step by one of its own, which calls no hook.
        "optimizer": {"optimizer": "ADAMW", "fused": True, "stochastic_rounding": False},
        "train_dtype": dtype,
        "train_device": settings.device,
        "lora_rank": settings.rank,
        "lora_alpha": float(settings.rank),
        "layer_filter_preset": "attn-mlp",
        "layer_filter": "attentions",
        "unet": {"train": True, "weight_dtype": dtype, "gradient_checkpointing": False},
        "text_encoder": part,
        "text_encoder_2": part,
        "vae": {"weight_dtype": "FLOAT_32"},
    }
    path = place.folder / "onetrainer.json"
    files.write_json(path, config)
    presets = checkout / "training_presets"
    return [str(checkout / "scripts" / "train.py"), f"--preset-path={presets / preset}", f"--config-path={path}"]


def _unsloth(settings: Settings, place: Place, checkout: Path) -> list[str]:
    return [
        "-m",
        "core.training.diffusion_lora_trainer",
        f"--base-model={place.diffusers}",
        f"--data-dir={place.pictures}",
        f"--output-dir={place.folder / 'out'}",
        f"--resolution={settings.resolution}",
        f"--train-steps={settings.steps + 2}",
        f"--learning-rate={RATE}",
        f"--train-batch-size={settings.batch}",
        f"--lora-rank={settings.rank}",
        f"--mixed-precision={'no' if settings.small else 'bf16'}",
        "--no-snr",
        "--no-gradient-checkpointing",
    ]


RIVALS: dict[Family, dict[str, Rival]] = {
    "sdxl": {
        "diffusers": Rival("diffusers, train_text_to_image_lora_sdxl.py", "attention", _diffusers),
        "sd_scripts": Rival("sd-scripts, sdxl_train_network.py", "linear", _sd_scripts),
        "onetrainer": Rival("OneTrainer, SDXL LoRA", "linear", _onetrainer),
        "unsloth": Rival(
            "Unsloth Studio, SDXL LoRA",
            "attention",
            _unsloth,
            inside="studio/backend",
            environment={"UNSLOTH_DIFFUSION_FP32_OPTIM": "1"},  # AdamW with fp32 state, as in the others
        ),
    },
    "sd15": {
        "diffusers": Rival("diffusers, train_text_to_image_lora.py", "attention", _diffusers),
        "sd_scripts": Rival("sd-scripts, train_network.py", "linear", _sd_scripts),
        "onetrainer": Rival("OneTrainer, SD 1.5 LoRA", "linear", _onetrainer),
    },
}
"""Trainers that can train a LoRA of each family; Unsloth Studio does not support SD 1.5."""
