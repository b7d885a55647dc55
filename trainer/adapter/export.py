"""Writes LoRA files: names from the fixed table, deterministic bytes, checked before they take the file's place."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from trainer.adapter.names import TEXT_ATTENTION, Slot
from trainer.config.base import ARCHITECTURES, BASE_VERSIONS, SIDE_FILE_VERSIONS, Family, Prediction
from trainer.config.presets.preset import RECIPE_KEY
from trainer.config.recipe import RecipeConfig
from trainer.errors import LoraFileError
from trainer.files.header import read_header
from trainer.files.rewriting import header_bytes, lora_hashes
from trainer.protocol import files
from trainer.protocol.reading import open_file, parse_json, read_bytes

Naming = Literal["kohya", "diffusers"]
# Two runs of one recipe differ in these keys of their files' metadata and in no other.
TIME_KEYS = ("ss_training_started_at", "modelspec.date")
# ComfyUI reads headers up to 1 MiB: a thousand tags keep far below it.
_MOST_TAGS = 1000
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
    """Write a LoRA file in one step and return the SHA-256 of its bytes; the hashes of its tensors join the metadata.

    `weights` are the masters (fp32 or wider) by the adapter's keys. "kohya" is the file that loads everywhere, with
    alpha as fp32 scalars; "diffusers" is PEFT's naming, which has no place for alpha, so it is folded into lora_B.
    Equal input gives equal bytes. Raises LoraFileError when a value is not finite in `dtype`, or the bytes on the disk
    are not what was meant; then, as on OSError, a file that was there before is left as it was.
    """
    serialised = safetensors.torch.save(_tensors(weights, adapter, dtype, naming))
    start = 8 + int.from_bytes(serialised[:8], "little")
    entries = parse_json(serialised[8:start])
    payload = memoryview(serialised)[start:]
    header = header_bytes(entries, {**metadata, **lora_hashes(entries, payload, metadata)})
    whole = hashlib.sha256(header)
    whole.update(payload)
    with files.staged(path) as temporary:
        with temporary.open("wb") as file:
            file.write(header)
            file.write(payload)
        _check_written(temporary, adapter.table, naming, whole.hexdigest())
    return whole.hexdigest()


def _keys(slot: Slot, naming: Naming) -> tuple[str, ...]:
    """Name the tensors of one layer: down, up, and alpha where the naming has one."""
    if naming == "kohya":
        return slot.down, slot.up, f"{slot.kohya}.alpha"
    return f"{slot.part}.{slot.module}.lora_A.weight", f"{slot.part}.{slot.module}.lora_B.weight"


def _tensors(weights: Mapping[str, Tensor], adapter: Adapter, dtype: torch.dtype, naming: Naming) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for slot in adapter.slots:
        alpha = adapter.alpha[slot.kohya]
        scale = 1.0 if naming == "kohya" else alpha / adapter.rank[slot.kohya]
        layer = (
            _cast(slot, weights[slot.down], 1.0, dtype),
            _cast(slot, weights[slot.up], scale, dtype),
            torch.tensor(alpha, dtype=torch.float32),
        )
        tensors.update(zip(_keys(slot, naming), layer, strict=False))  # alpha has no key in diffusers' naming
    for slot, trained in _missing_projections(adapter):
        # q, k, v and out of a CLIP layer have one shape.
        for key, other in zip(_keys(slot, naming), _keys(trained, naming), strict=True):
            tensors[key] = tensors[other].clone() if key.endswith(".alpha") else torch.zeros_like(tensors[other])
    return tensors


def _missing_projections(adapter: Adapter) -> Iterator[tuple[Slot, Slot]]:
    """Find the untrained projections of partly trained text layers, each with a trained one of that layer.

    A1111 and diffusers drop or refuse text layers in which q, k, v and out are not all there.
    """
    trained = {_layer_of(slot): slot for slot in adapter.slots if slot.module.endswith(TEXT_ATTENTION)}
    for slot in adapter.table:
        if slot.module.endswith(TEXT_ATTENTION) and slot.kohya not in adapter.rank and _layer_of(slot) in trained:
            yield slot, trained[_layer_of(slot)]


def _layer_of(slot: Slot) -> tuple[str, str]:
    return slot.part, slot.module.rpartition(".")[0]


def _cast(slot: Slot, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Scale and round on the CPU: saving asks the card for no memory, which it may be short of."""
    result = (tensor.detach().to("cpu") * scale).to(dtype).contiguous()
    if result.isfinite().all():
        return result
    diverged = not tensor.isfinite().all()
    raise LoraFileError(
        "lora.not_finite",
        f"The LoRA cannot be written: at {slot.kohya} it holds values that are "
        + ("not numbers (NaN or infinity)." if diverged else f"too large for {str(dtype).removeprefix('torch.')}."),
        "Go back to an earlier save and use a lower learning rate." if diverged else 'Set output.dtype = "bf16".',
    )


def _check_written(written: Path, table: Sequence[Slot], naming: Naming, digest: str) -> None:
    """Re-open what was written: names all in the table, pairs complete, values finite, bytes as `digest` says."""
    header = read_header(written, "lora")
    expected = {key: keys for slot in table if (keys := _keys(slot, naming)) for key in keys}
    unknown = [key for key in header.tensors if key not in expected]
    halved = [key for key in header.tensors if key in expected and not header.tensors.keys() >= set(expected[key])]
    with safe_open(written, framework="pt") as file:
        broken = [key for key in header.tensors if not file.get_tensor(key).isfinite().all()]
    if unknown or halved or broken or _digest(written) != digest:
        first = next(iter(unknown + halved + broken), "its bytes")
        raise LoraFileError(
            "lora.damaged",
            f"The LoRA file that was just written reads back wrong: {first} is not as it was meant.",
            "Check the disk; the last good checkpoint is kept, and saving can be tried again.",
        )


def _digest(written: Path) -> str:
    with open_file(written, "stream") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
