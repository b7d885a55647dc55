"""What a LoRA file says of itself: kohya's ss_* keys, ModelSpec, and the small files beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trainer import __version__
from trainer.adapter.attach import Adapter
from trainer.config.base import Family, Prediction
from trainer.config.presets.preset import RECIPE_KEY
from trainer.config.recipe import RecipeConfig
from trainer.files.modelspec import ARCHITECTURES, BASE_VERSIONS, SIDE_FILE_VERSIONS
from trainer.protocol import files
from trainer.protocol.reading import read_bytes

# Two runs of one recipe differ in these keys of their files' metadata and in no other.
TIME_KEYS = ("ss_training_started_at", "modelspec.date")

# ComfyUI reads headers up to 1 MiB: a thousand tags keep far below it.
_MOST_TAGS = 1000
_IMPLEMENTATIONS: dict[Family, str] = {
    "sd15": "diffusers",
    "sdxl": "https://github.com/Stability-AI/generative-models",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts:
    """What a LoRA file tells about its making; all of it from the frozen job, so that a resumed run writes the same."""

    title: str
    """The LoRA's name."""
    family: Family
    """Which architecture the base is."""
    prediction: Prediction
    """What the base predicts."""
    zero_terminal_snr: bool
    """Whether the base's noise schedule ends in pure noise."""
    base_name: str
    """The base's file name or Hub id, without folders."""
    base_sha256: str | None
    """SHA-256 of the base's single file, 64 hex digits; None for a diffusers folder."""
    recipe: RecipeConfig
    """The resolved recipe: resolution and steps are stated."""
    dtype: str
    """The base's number format: fp16, bf16 or fp32."""
    step: int
    """Optimizer steps done when this file is written."""
    epoch: int
    """Epochs begun by then."""
    epochs: int
    """Epochs begun by the end of the run."""
    pictures: int
    """How many pictures are trained on, without repeats and regularisation."""
    regularisation_pictures: int
    """How many regularisation pictures there are."""
    started_at: float
    """When the job was frozen, in unix seconds."""
    trigger_words: tuple[str, ...] = ()
    """The words that call up what was learned, each once."""
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """How many pictures each bucket (width, height in pixels) has."""
    author: str = ""
    """Who made it; empty: not said."""
    licence: str = ""
    """Its licence; empty: not said."""
    description: str = ""
    """What it does; empty: not said."""
    tags: Mapping[str, int] | None = None
    """How often each tag was trained, from `count_tags`; None (the default of a job) keeps captions private."""


def lora_metadata(facts: ExportFacts, adapter: Adapter, output_name: str) -> dict[str, str]:
    """Return the metadata of one file, hashes apart, which its export adds.

    `output_name` is the file's stem: A1111 and Forge make it the name by which prompts call the LoRA, so each saved
    step needs its own. Keys and their texts are sd-scripts' and ModelSpec 1.0.1's
    (https://github.com/Stability-AI/ModelSpec); one more holds the whole recipe, for presets made of the file.
    """
    told = {**_network(facts, adapter), **_training(facts), "ss_output_name": output_name, **_model_spec(facts)}
    return {**told, RECIPE_KEY: facts.recipe.model_dump_json(by_alias=True, exclude_none=True)}


def count_tags(captions: Iterable[str], separator: str = ",") -> dict[str, int]:
    """Count in how many captions each tag stands."""
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update({tag.strip() for tag in caption.split(separator)} - {""})
    return dict(counts)


def write_side_files(lora: Path, facts: ExportFacts, preview: Path | None) -> None:
    """Write `<stem>.json` beside a LoRA and copy a preview picture to `<stem>.png`.

    A1111, Forge and InvokeAI show both. Raises OSError when the folder cannot be written.
    """
    files.write_json(
        lora.with_suffix(".json"),
        {
            "description": facts.description,
            "sd version": SIDE_FILE_VERSIONS[facts.family],
            "activation text": ", ".join(facts.trigger_words),
            "preferred weight": 1.0,
            "negative text": "",
            "notes": f"{facts.step} steps on {facts.base_name}, made with Impasto {__version__}",
        },
    )
    if preview is not None:
        files.write_bytes(lora.with_suffix(".png"), read_bytes(preview, "image"))


def _network(facts: ExportFacts, adapter: Adapter) -> dict[str, str]:
    """Say what kind of LoRA it is; ranks that differ between parts are "Dynamic", as resized files have them."""
    plain = [slot.kohya for slot in adapter.slots if slot.kernel == 1]
    convolutions = [slot.kohya for slot in adapter.slots if slot.kernel == 3]
    arguments = {}
    if convolutions:
        arguments["conv_dim"] = str(adapter.rank[convolutions[0]])
        arguments["conv_alpha"] = str(adapter.alpha[convolutions[0]])
    return {
        "ss_v2": "False",
        "ss_base_model_version": BASE_VERSIONS[facts.family],
        "ss_network_module": "networks.lora",
        "ss_network_dim": _common(adapter.rank[name] for name in plain),
        "ss_network_alpha": _common(adapter.alpha[name] for name in plain),
        "ss_network_args": json.dumps(arguments),
        "ss_network_dropout": _or_none(facts.recipe.dropout),
    }


def _training(facts: ExportFacts) -> dict[str, str]:
    recipe, objective = facts.recipe, facts.recipe.objective
    values: dict[str, object] = {
        "ss_sd_model_name": facts.base_name,
        "ss_new_sd_model_hash": facts.base_sha256,
        "ss_resolution": f"({recipe.resolution}, {recipe.resolution})",
        "ss_num_train_images": facts.pictures,
        "ss_num_reg_images": facts.regularisation_pictures,
        "ss_num_epochs": facts.epochs,
        "ss_epoch": facts.epoch,
        "ss_steps": facts.step,
        "ss_max_train_steps": recipe.steps,
        "ss_total_batch_size": recipe.effective_batch,
        "ss_learning_rate": recipe.learning_rate,
        "ss_unet_lr": recipe.learning_rate,
        "ss_text_encoder_lr": _text_rates(facts),
        "ss_optimizer": recipe.optimizer.name,
        "ss_lr_scheduler": recipe.schedule.kind,
        "ss_lr_warmup_steps": recipe.schedule.warmup,
        "ss_max_grad_norm": recipe.clip_gradient,
        "ss_mixed_precision": "no" if facts.dtype == "fp32" else facts.dtype,
        "ss_clip_skip": recipe.clip_skip,
        "ss_max_token_length": recipe.token_chunks,
        "ss_seed": recipe.seed,
        "ss_loss_type": "l2" if objective.loss == "mse" else "huber",
        "ss_noise_offset": objective.noise_offset or None,
        "ss_multires_noise_discount": objective.multires_discount or None,
        "ss_multires_noise_iterations": objective.multires_levels if objective.multires_discount else None,
        "ss_ip_noise_gamma": objective.input_perturbation or None,
        "ss_min_snr_gamma": objective.min_snr_gamma,
        "ss_debiased_estimation": objective.debiased,
        "ss_zero_terminal_snr": facts.zero_terminal_snr,
        "ss_prior_loss_weight": objective.prior_weight,
        "ss_training_started_at": facts.started_at,
        "ss_training_comment": f"Impasto {__version__}",
    }
    return {key: str(value) for key, value in values.items()} | _pictures(facts)


def _pictures(facts: ExportFacts) -> dict[str, str]:
    """Describe the dataset without naming folders: the tags' one folder is called by the LoRA's title."""
    sizes = {
        str(number): {"resolution": list(size), "count": count}
        for number, (size, count) in enumerate(sorted(facts.buckets.items()))
    }
    metadata = {"ss_bucket_info": json.dumps({"buckets": sizes})} if sizes else {}
    if facts.tags is not None:
        most = dict(sorted(facts.tags.items(), key=lambda item: (-item[1], item[0]))[:_MOST_TAGS])
        metadata["ss_tag_frequency"] = json.dumps({facts.title: most}, ensure_ascii=False)
    return metadata


def _model_spec(facts: ExportFacts) -> dict[str, str]:
    recipe = facts.recipe
    values = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{ARCHITECTURES[facts.family]}/lora",
        "implementation": _IMPLEMENTATIONS[facts.family],
        "title": facts.title,
        "resolution": f"{recipe.resolution}x{recipe.resolution}",
        "date": datetime.fromtimestamp(int(facts.started_at), UTC).isoformat(),
        "author": facts.author,
        "license": facts.licence,
        "description": facts.description,
        "trigger_phrase": ", ".join(facts.trigger_words),
        "prediction_type": facts.prediction,
        "timestep_range": f"{recipe.objective.timestep_min},{recipe.objective.timestep_max + 1}",
        "encoder_layer": str(recipe.clip_skip or 1) if facts.family == "sd15" else "",
    }
    return {f"modelspec.{key}": value for key, value in values.items() if value}


def _text_rates(facts: ExportFacts) -> float | list[float]:
    first, second = facts.recipe.text_encoder.learning_rate, facts.recipe.text_encoder_2.learning_rate
    return first if facts.family == "sd15" else [first, second]


def _common(values: Iterable[float]) -> str:
    distinct = set(values)
    return str(distinct.pop()) if len(distinct) == 1 else "Dynamic"


def _or_none(value: float) -> str:
    return str(value or None)
