"""Convert the metadata that kohya's sd-scripts stores in LoRA files (ss_*) to a recipe where possible.

The keys and values are those of sd-scripts' train_network.py; all of them are untrusted.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trainer.config.base import Family
from trainer.config.field_names import keys_called, value_called
from trainer.config.methods import ADAPTERS
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.optimizers.others import OTHERS, is_argument
from trainer.config.recipe import ObjectiveConfig, ScheduleConfig, parse_loss_mix
from trainer.config.schema import choices
from trainer.protocol.reading import UnusableFileError, parse_json

_LONGEST = 1 << 20  # characters of JSON to parse; the tags of a large dataset take less
_NONE = ("", "None", "none", "null")

# Numbers and Booleans with the same meaning in both programs.
_SAME_MEANING = (
    "ss_network_dropout", "ss_max_grad_norm", "ss_seed", "ss_max_train_steps", "ss_prior_loss_weight",
    "ss_noise_offset", "ss_ip_noise_gamma", "ss_debiased_estimation", "ss_caption_dropout_rate",
    "ss_caption_tag_dropout_rate", "ss_shuffle_caption", "ss_keep_tokens", "ss_flip_aug", "ss_enable_bucket",
)  # fmt: skip
_WHOLE = {"seed", "steps", "captions.keep_tokens"}

# Settings of sd-scripts that Impasto does not support, with the values that mean off.
_UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "ss_face_crop_aug_range": (),
    "ss_full_fp16": ("False",),
    "ss_fp8_base": ("False",),
    "ss_fp8_base_unet": ("False",),
}

_SCHEDULES = choices(ScheduleConfig.model_fields["kind"].annotation)
_LOSSES = choices(ObjectiveConfig.model_fields["loss"].annotation)
_HUBER_SCHEDULES = choices(ObjectiveConfig.model_fields["huber_schedule"].annotation)
_WITH_UNWRITTEN_SETTINGS = ("cosine_with_min_lr", "warmup_stable_decay", "piecewise", "piecewise_constant")
"""Schedules that depend on settings that sd-scripts does not write into files."""
_ARGUMENT = re.compile(r"(\w{1,40})=(\([^()]{0,100}\)|[^,()]{0,100})(?:,\s*|$)")


@dataclass
class Conversion:
    """Recipe values converted from a LoRA's metadata, and notes about what could not be converted."""

    recipe: dict[str, Any] = field(default_factory=dict)
    """Recipe values, in the form of a preset's [recipe] table."""
    notes: list[str] = field(default_factory=list)
    """Settings that could not be converted, as "key: reason"."""

    def set(self, key: str, value: Any) -> None:
        """Set a key of the recipe; do nothing if the value is None."""
        if value is None:
            return
        *tables, name = key.split(".")
        place = self.recipe
        for table in tables:
            place = place.setdefault(table, {})
        place[name] = value


@dataclass(frozen=True, slots=True)
class LoraParts:
    """Facts derived from a file's tensors, which are more reliable than its metadata."""

    family: Family
    unet: bool
    """Whether the UNet was trained."""
    text_encoder: bool
    text_encoder_2: bool
    ranks: tuple[int, ...]
    """All ranks in the file, ascending."""


def recipe_of_metadata(metadata: Mapping[str, str], parts: LoraParts) -> Conversion:
    """Convert a LoRA's ss_* metadata to a recipe without guessing; the values are validated later."""
    mapped = Conversion()
    values = {key: value for key, value in _with_dataset(metadata, mapped).items() if value not in _NONE}
    for read in (_network, _rates, _optimizer, _schedule, _images, _objective):
        read(values, parts, mapped)
    for key in _SAME_MEANING:
        target = next(keys_called(key)).removeprefix("recipe.")
        mapped.set(target, _value(values.get(key), whole=target in _WHOLE))
    every = _whole(values.get("ss_caption_dropout_every_n_epochs"))
    mapped.set("captions.dropout_every_epochs", every or None)  # 0 is off
    if parts.family == "sd15":
        mapped.set("clip_skip", _whole(values.get("ss_clip_skip")))
    if values.get("ss_weighted_captions") == "True":
        mapped.set("weighted_captions", True)
    for key, off in _UNSUPPORTED.items():
        if key in values and values[key] not in off:
            mapped.notes.append(f"{key}: was {_short(values[key])}, which is not supported")
    return mapped


def _with_dataset(metadata: Mapping[str, str], mapped: Conversion) -> dict[str, str]:
    """Return the metadata with the batch, bucket and caption settings of `ss_datasets` added.

    sd-scripts stores them in `ss_datasets` for runs with a dataset file. They are added under the ss_* keys that it
    uses for runs without one.
    """
    values = dict(metadata)
    datasets = _json(metadata.get("ss_datasets"))
    first = datasets[0] if isinstance(datasets, list) and datasets else None
    if not isinstance(first, dict):
        return values
    subsets = first.get("subsets")
    trained = (
        [each for each in subsets if isinstance(each, dict) and not each.get("is_reg")]
        if isinstance(subsets, list)
        else []
    )
    subset = trained[0] if trained else {}
    if len(datasets) > 1 or len(trained) > 1:
        mapped.notes.append("ss_datasets: several; the caption and bucket settings of the first are used")
    stated = {
        "ss_resolution": first.get("resolution"),
        "ss_enable_bucket": first.get("enable_bucket"),
        "ss_min_bucket_reso": first.get("min_bucket_reso"),
        "ss_max_bucket_reso": first.get("max_bucket_reso"),
        "ss_batch_size_per_device": first.get("batch_size_per_device"),
        "ss_shuffle_caption": subset.get("shuffle_caption"),
        "ss_keep_tokens": subset.get("keep_tokens"),
        "ss_flip_aug": subset.get("flip_aug"),
        "ss_random_crop": subset.get("random_crop"),
        "ss_color_aug": subset.get("color_aug"),
    }
    mapped.set("captions.wildcards", True if subset.get("enable_wildcard") is True else None)
    for key, target in (
        ("caption_prefix", "prefix"),
        ("caption_suffix", "suffix"),
        ("keep_tokens_separator", "keep_separator"),
        ("secondary_separator", "secondary_separator"),
    ):
        text = subset.get(key)
        mapped.set(f"captions.{target}", text if isinstance(text, str) and text else None)
    values.update({key: str(value) for key, value in stated.items() if value is not None})
    return values


def _network(values: Mapping[str, str], parts: LoraParts, mapped: Conversion) -> None:
    """Convert rank, scale, layers, dropouts and norms; a rank missing from the metadata is read from the tensors."""
    arguments = _json(values.get("ss_network_args"))
    arguments = arguments if isinstance(arguments, dict) else {}
    _adapter(values.get("ss_network_module", ""), arguments, mapped)
    rank = _whole(values.get("ss_network_dim"))
    if rank is None and parts.ranks:
        rank = parts.ranks[-1]
        if len(parts.ranks) > 1:
            mapped.notes.append(f"ss_network_dim: ranks from {parts.ranks[0]} to {rank}; the largest is used")
    mapped.set("rank", rank)
    alpha = _number(values.get("ss_network_alpha"))
    mapped.set("alpha", rank if alpha == 0 else alpha)  # 0 means the rank, networks/lora.py
    conv_rank = _whole(arguments.pop("conv_dim", None))
    mapped.set("layers", "all" if conv_rank else "linear")
    if conv_rank:
        mapped.set("conv_rank", conv_rank)
        mapped.set("conv_alpha", _number(arguments.pop("conv_alpha", None)) or 1.0)  # default 1, networks/lora.py
    arguments.pop("conv_alpha", None)
    stabilized = str(arguments.pop("rs_lora", False)).lower() != "false"  # of lycoris.kohya, which reads it so
    mapped.set("rank_stabilized", stabilized or None)
    arguments.pop("dropout", None)  # same as ss_network_dropout
    for name in ("rank_dropout", "module_dropout"):
        mapped.set(name, _number(arguments.pop(name, None)))
    mapped.set("max_weight_norm", _number(values.get("ss_scale_weight_norms")) or None)
    _lora_plus(arguments, mapped)
    mapped.notes.extend(f"ss_network_args.{_short(key)}: not supported" for key in list(arguments)[:20])


MODULES = {"networks.loha": "loha", "networks.lokr": "lokr", "networks.oft": "oft"}
"""Kinds of adapters other than LoRA by their modules in sd-scripts."""
# Arguments of lycoris.kohya and their defaults.
_LYCORIS_SWITCHES = {"dora_wd": False, "wd_on_output": True}


def _adapter(module: str, arguments: dict[str, Any], mapped: Conversion) -> None:
    """Convert the algorithm, which lycoris.kohya has among its arguments, and sd-scripts as modules."""
    algorithm = str(arguments.pop("algo", MODULES.get(module, "lora"))).lower()
    if module == "networks.oft":
        mapped.notes.append("ss_network_dim: the number of blocks there; here the rank is their size")
    on = {name: str(arguments.pop(name, default)).lower() == "true" for name, default in _LYCORIS_SWITCHES.items()}
    kind = value_called("recipe.adapter", algorithm) or algorithm
    if on["dora_wd"]:
        if kind == "lora":
            kind = "dora"
            if on["wd_on_output"]:
                mapped.notes.append("ss_network_args.wd_on_output: magnitudes are trained per input instead")
        else:
            mapped.notes.append(f"ss_network_args.dora_wd: not supported with algo={_short(algorithm)}")
    if kind not in ADAPTERS:
        mapped.notes.append(f"ss_network_args.algo: {_short(algorithm)} is not supported")
        return
    mapped.set("adapter", kind if kind != "lora" else None)
    factor = _whole(arguments.pop("factor", None))
    if kind == "lokr" and factor and factor > 1:
        mapped.set("lokr_factor", factor)


def _lora_plus(arguments: dict[str, Any], mapped: Conversion) -> None:
    """Convert LoRA+ ratios, of which 0 means off: the UNet's is used for all parts."""
    common, unet, encoder = (
        _number(arguments.pop(f"loraplus_{part}lr_ratio", None)) or None for part in ("", "unet_", "text_encoder_")
    )
    mapped.set("lora_plus_ratio", unet or common)
    if (encoder or common) != (unet or common):
        what = "the UNet's ratio is used for all parts" if unet or common else "only the UNet's ratio is supported"
        mapped.notes.append(f"ss_network_args.loraplus_text_encoder_lr_ratio: {what}")


def _rates(values: Mapping[str, str], parts: LoraParts, mapped: Conversion) -> None:
    """Convert learning rates: each model's own rate, else the common one; 0 for models that are not in the file."""
    common = _number(values.get("ss_learning_rate"))
    unet = _number(values.get("ss_unet_lr")) or common
    listed = re.findall(r"[^\[\](), ]+", values.get("ss_text_encoder_lr", ""))[:2]
    own = [_number(text) for text in listed]
    first = (own[0] if own else None) or common
    second = (own[-1] if own else None) or common
    mapped.set("learning_rate", unet if parts.unet else 0.0)
    mapped.set("text_encoder.learning_rate", first if parts.text_encoder else 0.0)
    if parts.family == "sdxl":
        mapped.set("text_encoder_2.learning_rate", second if parts.text_encoder_2 else 0.0)


def _optimizer(values: Mapping[str, str], _: LoraParts, mapped: Conversion) -> None:
    """Convert the optimizer's class name, and its arguments that have the same meaning in Impasto."""
    text = values.get("ss_optimizer")
    if text is None:
        return
    path, _bracket, arguments = text.partition("(")
    word = path.rpartition(".")[2].lower()
    name = word if word in OPTIMIZERS else value_called("recipe.optimizer.name", word)
    if name is None and word in OTHERS:
        mapped.set("optimizer", _other_optimizer(word, arguments, mapped))
        return
    if name is None:
        mapped.notes.append(f"ss_optimizer: {_short(path.rpartition('.')[2])} is not supported")
        return
    kind = OPTIMIZERS[name]
    stated: dict[str, Any] = {"name": name, **kind.method.class_defaults}
    for key, value in ((kind.method.argument_names.get(key, key), value) for key, value in _arguments(arguments)):
        if key in kind.model_fields.keys() - {"name"} and isinstance(value, bool | int | float):
            stated[key] = value
        elif key == "betas" and isinstance(value, tuple):
            betas = (name for name in ("beta1", "beta2", "beta3") if name in kind.model_fields)
            stated.update(zip(betas, value, strict=False))
        elif value not in (None, False):
            mapped.notes.append(f"ss_optimizer.{key}: not supported")
    mapped.set("optimizer", stated)
    if kind.method.one_rate:
        _one_rate(mapped, kind.method.title)


def _other_optimizer(name: str, arguments: str, mapped: Conversion) -> dict[str, Any]:
    """Return an optimizer by its class's name, with the arguments that it is known to have."""
    stated = {key: list(value) if isinstance(value, tuple) else value for key, value in _arguments(arguments)}
    known = {key: value for key, value in stated.items() if key in OTHERS[name].arguments and is_argument(value)}
    mapped.notes += [f"ss_optimizer.{key}: not supported" for key in stated if key not in known]
    return {"name": "other", "optimizer": name, "args": known}


def _one_rate(mapped: Conversion, who: str) -> None:
    """Set all trained models to the UNet's rate, because the optimizer finds one rate for all of them."""
    unet = mapped.recipe.get("learning_rate")
    for part in ("text_encoder", "text_encoder_2"):
        table = mapped.recipe.get(part, {})
        if unet and table.get("learning_rate") not in (None, 0.0, unet):
            mapped.notes.append(f"ss_text_encoder_lr: is set to {unet:g}: {who} finds one rate for all parts")
            table["learning_rate"] = unet


def _schedule(values: Mapping[str, str], _: LoraParts, mapped: Conversion) -> None:
    """Convert the schedule and its warmup; sd-scripts ignores warmup with "constant"."""
    text = values.get("ss_lr_scheduler")
    if text is None:
        return
    kind = text.lower() if text.lower() in _SCHEDULES else value_called("recipe.schedule.kind", text)
    if kind is None:
        mapped.notes.append(f"ss_lr_scheduler: {_short(text)} is not supported")
        return
    mapped.set("schedule.kind", kind)
    if text.lower() in _WITH_UNWRITTEN_SETTINGS:
        mapped.notes.append(f"ss_lr_scheduler: {_short(text)}; its further settings are not in the file")
    mapped.set("schedule.warmup", 0 if text == "constant" else _warmup(values.get("ss_lr_warmup_steps")))


def _warmup(text: str | None) -> int | float | None:
    """Return a warmup in steps or, if below 1, as a share of the run; None if it is not a number."""
    number = _number(text)
    return number if number is None or 0 < number < 1 else int(number)


def _images(values: Mapping[str, str], _: LoraParts, mapped: Conversion) -> None:
    """Convert resolution, buckets, crop, batch size and token length."""
    sides = [int(digits) for digits in re.findall(r"(?<!\d)\d{1,9}(?!\d)", values.get("ss_resolution", ""))[:2]]
    if sides:
        mapped.set("resolution", round(math.sqrt(sides[0] * sides[-1]) / 8) * 8)
        if sides[0] != sides[-1]:
            mapped.notes.append(f"ss_resolution: {sides[0]}x{sides[1]} is converted to the square of the same area")
    if values.get("ss_enable_bucket") == "True":
        mapped.set("images.bucket_min", _whole(values.get("ss_min_bucket_reso")))
        mapped.set("images.bucket_max", _whole(values.get("ss_max_bucket_reso")))
    if values.get("ss_bucket_no_upscale") == "True":
        mapped.set("images.max_upscale", 1.0)
    if values.get("ss_random_crop") == "True":
        mapped.set("images.crop", "random")
    if values.get("ss_color_aug") == "True":
        mapped.set("images.color_jitter", True)
    total = _whole(values.get("ss_total_batch_size"))
    single, parts = _whole(values.get("ss_batch_size_per_device")), _whole(values.get("ss_gradient_accumulation_steps"))
    mapped.set("effective_batch", total or (single * (parts or 1) if single else None))
    tokens = values.get("ss_max_token_length")
    mapped.set("token_chunks", _whole(tokens) if tokens else 75)
    mapped.set("caption_padding", "limit" if tokens in ("150", "225") else None)  # as sd-scripts always does


def _objective(values: Mapping[str, str], _: LoraParts, mapped: Conversion) -> None:
    """Convert loss, min-SNR and multires noise, for which 0 means off."""
    mapped.set("objective.min_snr_gamma", _number(values.get("ss_min_snr_gamma")) or None)
    for kohya, ours in (("noise_offset", "noise_offset"), ("ip_noise_gamma", "input_perturbation")):
        is_random = values.get(f"ss_{kohya}_random_strength") == "True"
        mapped.set(f"objective.{ours}_random_strength", is_random or None)
    mapped.set("objective.adaptive_noise_scale", _number(values.get("ss_adaptive_noise_scale")) or None)
    levels = _whole(values.get("ss_multires_noise_iterations"))
    if levels:
        mapped.set("objective.multires_iterations", levels)
        mapped.set("objective.multires_discount", _number(values.get("ss_multires_noise_discount")))
    loss = values.get("ss_loss_type", "l2")
    with suppress(ValueError):
        if ":" in loss and parse_loss_mix(loss):  # written by Impasto
            mapped.set("objective.loss_mix", loss)
            loss = "l2"
    name = loss if loss in _LOSSES else value_called("recipe.objective.loss", loss)
    if name is None:
        mapped.notes.append(f"ss_loss_type: {_short(loss)} is not supported")
    mapped.set("objective.loss", name)
    if name in ("huber", "smooth_l1"):
        mapped.set("objective.huber_c", _number(values.get("ss_huber_c")))
        mapped.set("objective.huber_scale", _number(values.get("ss_huber_scale")))
        schedule = values.get("ss_huber_schedule")
        known = schedule if schedule in _HUBER_SCHEDULES else None
        mapped.set("objective.huber_schedule", known)
        if schedule and not known:
            mapped.notes.append(f"ss_huber_schedule: {_short(schedule)} is not supported")


def _arguments(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each argument in a string such as "weight_decay=0.1,betas=(0.9, 0.99)".

    Values that are not Python literals stay strings.
    """
    for key, value in _ARGUMENT.findall(text.removesuffix(")")[:2000]):
        try:
            yield key, ast.literal_eval(value.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that it raises, by its docs
            yield key, value


def _value(text: str | None, *, whole: bool) -> bool | int | float | None:
    if text in ("True", "False"):
        return text == "True"
    return _whole(text) if whole else _number(text)


def _number(value: object) -> float | None:
    """Return a value from metadata or JSON as a finite number, parsing strings; None if it is not a number."""
    try:
        number = float(str(value)[:40])
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _json(text: str | None) -> Any:
    if text is None or len(text) > _LONGEST:
        return None
    try:
        return parse_json(text)
    except UnusableFileError:
        return None


def _short(text: object) -> str:
    return str(text)[:60]
