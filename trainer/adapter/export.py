"""Export LoRA files with fixed tensor names and deterministic bytes; check each before it replaces the old one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from trainer import __version__
from trainer.adapter.attach import Adapter
from trainer.adapter.names import TEXT_ATTENTION, Slot, file_key
from trainer.config.base import ARCHITECTURES, BASE_VERSIONS, SIDE_FILE_VERSIONS, Family, Prediction
from trainer.config.presets.preset import RECIPE_KEY
from trainer.config.recipe import ObjectiveConfig, RecipeConfig
from trainer.errors import LoraFileError
from trainer.files.header import read_header
from trainer.files.rewriting import header_bytes, lora_hashes
from trainer.protocol import files
from trainer.protocol.reading import open_file, parse_json, read_bytes

Naming = Literal["kohya", "diffusers"]
# The only metadata keys that differ between two runs of the same recipe.
TIME_KEYS = ("ss_training_started_at", "modelspec.date")
WEIGHTED_CAPTIONS = "ss_weighted_captions"
"""Metadata key of a LoRA whose captions were read with weights; others do not have it."""
# ComfyUI reads headers up to 1 MiB; 1000 tags stay far below that.
_MOST_TAGS = 1000
ALGORITHMS: dict[str, dict[str, str]] = {
    "dora": {"algo": "locon", "dora_wd": "True", "wd_on_output": "False"},
    "loha": {"algo": "loha"},
    "lokr": {"algo": "lokr"},
    "oft": {"algo": "diag-oft"},
}
"""Arguments of lycoris.kohya, by kind of adapter."""
_IMPLEMENTATIONS: dict[Family, str] = {
    "sd15": "diffusers",
    "sdxl": "https://github.com/Stability-AI/generative-models",
}


def export_lora(
    path: Path,
    weights: Mapping[str, Tensor],
    adapter: Adapter,
    metadata: Mapping[str, str],
    *,
    dtype: torch.dtype = torch.float16,
    naming: Naming = "kohya",
) -> str:
    """Write a LoRA file atomically and return its SHA-256; add hashes of the tensors to the metadata.

    `weights` are the master weights (fp32 or wider) by the adapter's keys. Files with "kohya" naming load
    everywhere and store alpha as fp32 scalars; "diffusers" is PEFT's naming, which has no key for alpha, so alpha is
    multiplied into lora_B. Equal input gives equal bytes. Raises LoraFileError if a value is not finite in `dtype`, or
    if the file reads back differently; in that case, as on OSError, an existing file stays unchanged.
    """
    # The metadata contains hashes of the tensors, so these are serialized first, and then the header is replaced.
    serialized = safetensors.torch.save(_tensors(weights, adapter, dtype, naming))
    start = 8 + int.from_bytes(serialized[:8], "little")
    entries = parse_json(serialized[8:start])
    payload = memoryview(serialized)[start:]
    header = header_bytes(entries, {**metadata, **lora_hashes(entries, payload, metadata)})
    digest = hashlib.sha256(header)
    digest.update(payload)
    with files.staged(path) as temporary:
        with temporary.open("wb") as file:
            file.write(header)
            file.write(payload)
        # Read back before the old file is replaced, so that a failing disk cannot cost the user both.
        _check_written(temporary, adapter, naming, digest.hexdigest())
    return digest.hexdigest()


def _keys(slot: Slot, naming: Naming, adapter: Adapter) -> tuple[str, ...]:
    """Return one layer's tensor names: its weights, and alpha if the naming has a key for it."""
    if naming == "kohya":
        return *adapter.keys(slot), file_key(slot, "alpha")
    return f"{slot.part}.{slot.module}.lora_A.weight", f"{slot.part}.{slot.module}.lora_B.weight"


def _tensors(weights: Mapping[str, Tensor], adapter: Adapter, dtype: torch.dtype, naming: Naming) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for slot in adapter.slots:
        alpha = adapter.alpha[slot.kohya]
        scale = 1.0 if naming == "kohya" else alpha / adapter.rank[slot.kohya]
        layer = [_cast(slot, weights[key], scale if key == slot.up else 1.0, dtype) for key in adapter.keys(slot)]
        layer.append(torch.tensor(adapter.file_alpha(slot), dtype=torch.float32))
        # Not strict: diffusers' naming has no alpha.
        tensors.update(zip(_keys(slot, naming, adapter), layer, strict=False))
    for slot, trained in _missing_projections(adapter):
        # The q, k, v and out projections of a CLIP layer have the same shape.
        for key, other in zip(_keys(slot, naming, adapter), _keys(trained, naming, adapter), strict=True):
            tensors[key] = tensors[other].clone() if key.endswith(".alpha") else torch.zeros_like(tensors[other])
    return tensors


def _missing_projections(adapter: Adapter) -> Iterator[tuple[Slot, Slot]]:
    """Yield each untrained projection of partly trained text encoder layers with a trained projection of its layer.

    A1111 and diffusers ignore or reject layers that do not have all of q, k, v and out.
    """
    if adapter.changes:
        return  # programs that read other methods read each layer by itself
    trained = {_layer_of(slot): slot for slot in adapter.slots if slot.module.endswith(TEXT_ATTENTION)}
    for slot in adapter.table:
        if slot.module.endswith(TEXT_ATTENTION) and slot.kohya not in adapter.rank and _layer_of(slot) in trained:
            yield slot, trained[_layer_of(slot)]


def _layer_of(slot: Slot) -> tuple[str, str]:
    return slot.part, slot.module.rpartition(".")[0]


def _cast(slot: Slot, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the scaled tensor in `dtype`, computed on the CPU because the GPU may not have enough free memory."""
    result = (tensor.detach().to("cpu") * scale).to(dtype).contiguous()
    if result.isfinite().all():
        return result
    diverged = not tensor.isfinite().all()
    raise LoraFileError(
        "lora.not_finite",
        f"Could not save the LoRA: {slot.kohya} contains values that are "
        + ("NaN or infinity." if diverged else f"too large for {str(dtype).removeprefix('torch.')}."),
        "Use an earlier save, and train with a lower learning rate." if diverged else 'Set output.dtype = "bf16".',
    )


def _check_written(written: Path, adapter: Adapter, naming: Naming, digest: str) -> None:
    """Raise LoraFileError unless the written file has known names, complete pairs, finite values and this digest."""
    header = read_header(written, "lora")
    expected = {key: keys for slot in adapter.table if (keys := _keys(slot, naming, adapter)) for key in keys}
    unknown = [key for key in header.tensors if key not in expected]
    incomplete = [key for key in header.tensors if key in expected and not header.tensors.keys() >= set(expected[key])]
    with safe_open(written, framework="pt") as file:
        not_finite = [key for key in header.tensors if not file.get_tensor(key).isfinite().all()]
    if unknown or incomplete or not_finite or _digest(written) != digest:
        first = next(iter(unknown + incomplete + not_finite), "its bytes")
        raise LoraFileError(
            "lora.damaged",
            f"Could not save the LoRA: the file that was just written is damaged ({first}).",
            "Check the disk, then save again. The last good checkpoint is kept.",
        )


def _digest(written: Path) -> str:
    with open_file(written, "stream") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts:
    """Facts for a LoRA file's metadata. All come from the frozen job, so a resumed run writes the same metadata."""

    title: str
    """Name of the LoRA."""
    family: Family
    """Architecture of the base."""
    prediction: Prediction
    """What the base predicts."""
    zero_terminal_snr: bool
    """Whether the base's noise schedule ends in pure noise."""
    base_name: str
    """File name or Hub id of the base, without folders."""
    base_sha256: str | None
    """SHA-256 of the base's single file, 64 hex digits; None for a diffusers folder."""
    recipe: RecipeConfig
    """Resolved recipe, with resolution and steps set."""
    ema: bool = False
    """Whether the weights are the moving average of those of the last steps."""
    dtype: str
    """Dtype of the base: fp16, bf16 or fp32."""
    step: int
    """Number of optimizer steps completed when the file is written."""
    epoch: int
    """Number of epochs started when the file is written."""
    epochs: int
    """Number of epochs that will have started by the end of the run."""
    images: int
    """Number of training images, not counting repeats or regularization images."""
    regularization_images: int
    """Number of regularization images."""
    started_at: float
    """Unix time in seconds when the job was frozen."""
    trigger_words: tuple[str, ...] = ()
    """Trigger words, without duplicates."""
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Number of images per bucket (width, height in pixels)."""
    author: str = ""
    """Author; empty if not given."""
    license: str = ""
    """License; empty if not given."""
    description: str = ""
    """Description; empty if not given."""
    tags: Mapping[str, int] | None = None
    """Number of captions per tag, from `count_tags`; None, the default in a job, keeps captions private."""


def lora_metadata(facts: ExportFacts, adapter: Adapter, output_name: str) -> dict[str, str]:
    """Return one file's metadata without the hashes, which `export_lora` adds.

    `output_name` is the file's stem. A1111 and Forge use it as the LoRA's name in prompts, so each saved step needs its
    own name. Keys and values follow sd-scripts and ModelSpec 1.0.1 (https://github.com/Stability-AI/ModelSpec); one
    additional key holds the whole recipe, so that a preset can be made from the file.
    """
    metadata = {**_network(facts, adapter), **_training(facts), "ss_output_name": output_name, **_model_spec(facts)}
    return {**metadata, RECIPE_KEY: facts.recipe.model_dump_json(by_alias=True, exclude_none=True)}


def count_tags(captions: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return, for each tag, the number of captions that contain it; each caption comes with its tag separator."""
    counts: Counter[str] = Counter()
    for caption, separator in captions:
        counts.update({tag.strip() for tag in caption.split(separator)} - {""})
    return dict(counts)


def write_side_files(lora: Path, facts: ExportFacts, preview: Path | None) -> None:
    """Write `<stem>.json` next to a LoRA and copy a preview image to `<stem>.png`.

    A1111, Forge and InvokeAI show both. Raises OSError if the folder is not writable.
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
    """Return the network metadata; the rank is "Dynamic" if it differs between parts, as in resized LoRAs."""
    recipe = facts.recipe
    plain = [slot.kohya for slot in adapter.slots if slot.kernel == 1]
    convolutions = [slot.kohya for slot in adapter.slots if slot.kernel == 3]
    arguments = dict(ALGORITHMS.get(recipe.adapter, {})) if adapter.changes else {}
    if recipe.adapter == "lokr" and adapter.changes:
        arguments["factor"] = str(recipe.lokr_factor or -1)
    if recipe.lora_plus_ratio:
        arguments["loraplus_lr_ratio"] = str(recipe.lora_plus_ratio)
    if convolutions:
        arguments["conv_dim"] = str(adapter.rank[convolutions[0]])
        arguments["conv_alpha"] = str(adapter.alpha[convolutions[0]])
    return {
        "ss_v2": "False",
        "ss_base_model_version": BASE_VERSIONS[facts.family],
        "ss_network_module": "lycoris.kohya" if adapter.changes else "networks.lora",
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
        "ss_num_train_images": facts.images,
        "ss_num_reg_images": facts.regularization_images,
        "ss_num_epochs": facts.epochs,
        "ss_epoch": facts.epoch,
        "ss_steps": facts.step,
        "ss_max_train_steps": recipe.steps,
        "ss_total_batch_size": recipe.effective_batch,
        "ss_learning_rate": recipe.learning_rate,
        "ss_unet_lr": recipe.learning_rate,
        "ss_text_encoder_lr": _text_rates(facts),
        "ss_optimizer": recipe.optimizer.registered_name,
        "ss_lr_scheduler": recipe.schedule.kind,
        "ss_lr_warmup_steps": recipe.schedule.warmup,
        "ss_max_grad_norm": recipe.max_grad_norm,
        "ss_mixed_precision": "no" if facts.dtype == "fp32" else facts.dtype,
        "ss_clip_skip": recipe.clip_skip,
        "ss_max_token_length": recipe.token_chunks,
        "ss_seed": recipe.seed,
        "ss_loss_type": objective.loss_mix or ("l2" if objective.loss == "mse" else objective.loss),
        **_later_settings(objective),
        "ss_noise_offset": objective.noise_offset or None,
        "ss_multires_noise_discount": objective.multires_discount or None,
        "ss_multires_noise_iterations": objective.multires_iterations if objective.multires_discount else None,
        "ss_ip_noise_gamma": objective.input_perturbation or None,
        "ss_min_snr_gamma": objective.min_snr_gamma,
        "ss_debiased_estimation": objective.debiased_estimation,
        "ss_zero_terminal_snr": facts.zero_terminal_snr,
        "ss_prior_loss_weight": objective.prior_weight,
        "ss_training_started_at": facts.started_at,
        "ss_training_comment": f"Impasto {__version__}",
    }
    if recipe.captions.dropout_every_epochs is not None:
        values["ss_caption_dropout_every_n_epochs"] = recipe.captions.dropout_every_epochs
    if recipe.weighted_captions:
        values[WEIGHTED_CAPTIONS] = True
    if recipe.max_weight_norm is not None:
        values["ss_scale_weight_norms"] = recipe.max_weight_norm
    if facts.ema:
        values["impasto_ema_decay"] = recipe.ema_decay
    return {key: str(value) for key, value in values.items()} | _dataset(facts)


def _later_settings(objective: ObjectiveConfig) -> dict[str, object]:
    """Return the metadata of settings that only newer files have, leaving out those that are not used."""
    values: dict[str, object] = {}
    if objective.has_threshold and (objective.huber_schedule or objective.huber_scale):
        values["ss_huber_schedule"] = objective.huber_schedule or "constant"
        values["ss_huber_scale"] = objective.huber_scale or 1.0
        values["ss_huber_c"] = objective.huber_c
    if objective.noise_offset_random_strength:
        values["ss_noise_offset_random_strength"] = True
    if objective.input_perturbation_random_strength:
        values["ss_ip_noise_gamma_random_strength"] = True
    if objective.adaptive_noise_scale:
        values["ss_adaptive_noise_scale"] = objective.adaptive_noise_scale
    return values


def _dataset(facts: ExportFacts) -> dict[str, str]:
    """Return the dataset metadata, which lists all tags under the LoRA's title to keep folder names private."""
    sizes = {
        str(number): {"resolution": list(size), "count": count}
        for number, (size, count) in enumerate(sorted(facts.buckets.items()))
    }
    metadata = {"ss_bucket_info": json.dumps({"buckets": sizes})} if sizes else {}
    if facts.tags is not None:
        frequent = dict(sorted(facts.tags.items(), key=lambda item: (-item[1], item[0]))[:_MOST_TAGS])
        metadata["ss_tag_frequency"] = json.dumps({facts.title: frequent}, ensure_ascii=False)
    return metadata


def _model_spec(facts: ExportFacts) -> dict[str, str]:
    recipe = facts.recipe
    values = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{ARCHITECTURES[facts.family]}/lora",
        "implementation": _IMPLEMENTATIONS[facts.family],
        "title": f"{facts.title} (EMA)" if facts.ema else facts.title,
        "resolution": f"{recipe.resolution}x{recipe.resolution}",
        # The start of the run, because the time of saving would make each export differ.
        "date": datetime.fromtimestamp(int(facts.started_at), UTC).isoformat(),
        "author": facts.author,
        "license": facts.license,
        "description": facts.description,
        "trigger_phrase": ", ".join(facts.trigger_words),
        "prediction_type": facts.prediction,
        # The upper limit is exclusive, as in sd-scripts.
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
