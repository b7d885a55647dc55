"""Translate what OneTrainer trains: the base, the adapter and its layers, rates, optimizer and schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from trainer.config.base import Family
from trainer.config.field_names import value_called
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.optimizers.others import OTHERS, is_argument
from trainer.importers.onetrainer.options import HARMLESS_ARGUMENTS, OPTIONS, PROGRAM
from trainer.importers.translation import Translation, shown

FAMILIES: dict[str, Family] = {"STABLE_DIFFUSION_15": "sd15", "STABLE_DIFFUSION_XL_10_BASE": "sdxl"}
ENCODERS = ("text_encoder", "text_encoder_2")
_ADAPTERS = {"LORA": "lora", "LOHA": "loha", "LOKR": "lokr", "OFT_2": "oft"}
# LAYER_PRESETS of BaseStableDiffusionSetup and BaseStableDiffusionXLSetup, as filters of diffusers' names.
_PRESETS = {"attn-mlp": "attentions", "attn-only": "attn", "full": ""}
_LAYERS = {"": "all", "attentions": "linear", "attn": "attention"}
_IN_TRANSFORMERS = ("attentions", "attn", "ff.net", "transformer_blocks", "to_q", "to_k", "to_v", "to_out")
_PLAIN_PATTERN = re.compile(r"[A-Za-z0-9_.]{1,100}")
_SCHEDULES = {
    "CONSTANT": "constant",
    "LINEAR": "linear",
    "COSINE": "cosine",
    "COSINE_WITH_HARD_RESTARTS": "restarts",
    "REX": "rex",
}
# Arguments with these values are the only ones that our optimizers have.
_FIXED = {"adafactor": {"eps": 1e-30, "eps2": 1e-3}, "came": {"eps": 1e-30, "eps2": 1e-16}}


def read_base(found: Translation, family: Family) -> None:
    """Read the base, and how it predicts."""
    found.carry("base_model_name", {"base.model": found["base_model_name"]})
    found.carry("model_type", {"base.family": family})
    found.carry("training_method", {})
    found.carry("vae.model_name", {"base.vae": found["vae.model_name"]} if found["vae.model_name"] else {})
    prediction = "v" if found["force_v_prediction"] else "epsilon" if found["force_epsilon_prediction"] else None
    found.carry("force_v_prediction force_epsilon_prediction", {"base.prediction": prediction} if prediction else {})
    zero = found["rescale_noise_scheduler_to_zero_terminal_snr"]
    found.carry("rescale_noise_scheduler_to_zero_terminal_snr", {"base.zero_terminal_snr": True} if zero else {})
    start = found["lora_model_name"]
    found.carry("lora_model_name", {"base.continue_from": start} if start else {})
    _read_layer_skip(found, family)


def _read_layer_skip(found: Translation, family: Family) -> None:
    """Read the skipped layers; OneTrainer counts them from the layer that a family uses, 0 being that one."""
    names, skips = zip(*((f"{part}_layer_skip", found[f"{part}_layer_skip"]) for part in ENCODERS), strict=True)
    if family == "sd15":
        found.carry(names[0], {"recipe.clip_skip": skips[0] + 1} if skips[0] else {})
        found.carry(names[1], {})
        return
    for name, skip in zip(names, skips, strict=True):
        if skip:
            found.lack(name, "SDXL always uses the penultimate layer, which is 0 in OneTrainer")
        else:
            found.carry(name, {})


def read_adapter(found: Translation) -> None:
    """Read the kind of adapter, its rank and alpha, and the layers that have one."""
    kind = _ADAPTERS.get(found["peft_type"])
    if kind == "lora" and found["lora_decompose"]:
        kind = "dora"
    if kind is None:
        note = f"there is no {shown(found['peft_type'])}; a LoRA is trained"
        found.change("peft_type lora_decompose", {"recipe.adapter": "lora"}, note)
    else:
        found.carry("peft_type lora_decompose", {"recipe.adapter": kind})
    rank = found["lokr_dim"] if kind == "lokr" else found["lora_rank"]
    used, unused = ("lokr_dim", "lora_rank") if kind == "lokr" else ("lora_rank", "lokr_dim")
    found.carry(used, {"recipe.rank": rank})
    found.carry(unused, {})
    found.carry("lora_alpha", {"recipe.alpha": found["lora_alpha"]})
    factor = found["lokr_decompose_factor"]
    found.carry("lokr_decompose_factor", {"recipe.lokr_factor": factor} if kind == "lokr" and factor > 1 else {})
    if kind == "oft":
        found.change("oft_block_size", {}, "the rank, here that of LyCORIS's OFT, says how large a block is")
    else:
        found.carry("oft_block_size", {})
    found.carry("dropout_probability", {"recipe.dropout": found["dropout_probability"]})
    _read_layers(found, rank)


def _read_layers(found: Translation, rank: int) -> None:
    """Read which layers of the UNet are trained; a filter lists parts of names, and "" is all of them."""
    names = "layer_filter layer_filter_preset layer_filter_regex"
    preset = found["layer_filter_preset"]
    is_custom = found.states("layer_filter") and preset not in ("attn-mlp", "attn-only")
    text = (found["layer_filter"] or "") if is_custom else _PRESETS.get(preset, "")
    patterns = [pattern.strip() for pattern in text.split(",")]
    if found["layer_filter_regex"] and not all(_PLAIN_PATTERN.fullmatch(pattern) for pattern in patterns):
        note = "regular expressions are not available; all layers are trained: select some with recipe.blocks"
        found.change(names, _all_layers(found, rank), note)
    elif patterns == [""]:
        note = "OneTrainer also trains the layers of the timestep and at the UNet's ends, which no plain LoRA here has"
        found.change(names, _all_layers(found, rank), note)
    elif len(patterns) == 1 and text in _LAYERS:
        found.carry(names, {"recipe.layers": _LAYERS[text]})
    elif all(_PLAIN_PATTERN.fullmatch(pattern) for pattern in patterns):
        is_linear = all(any(part in pattern for part in _IN_TRANSFORMERS) for pattern in patterns)
        found.carry(
            names, {**({"recipe.layers": "linear"} if is_linear else _all_layers(found, rank)), **_only(patterns)}
        )
    else:
        found.change(names, _all_layers(found, rank), "the filter cannot be read; all layers are trained")


def _all_layers(found: Translation, rank: int) -> dict[str, Any]:
    return {"recipe.layers": "all", "recipe.conv_rank": rank, "recipe.conv_alpha": found["lora_alpha"]}


def _only(patterns: list[str]) -> dict[str, Any]:
    """Return entries that train only layers of the UNet with one of these parts in their names; later ones win."""
    chosen = [{"match": f"unet.*{pattern}*", "rate_factor": 1.0} for pattern in patterns]
    return {"recipe.blocks": [{"match": "unet.*", "rate_factor": 0.0}, *chosen]}


def scale_of(scaler: str, found: Translation) -> int:
    """Return the factor of a loss or rate scaler, as LossScaler.get_scale and LearningRateScaler.get_scale do."""
    batch, accumulation = int(found["batch_size"]), int(found["gradient_accumulation_steps"])
    kind = scaler.removeprefix("GLOBAL_")
    return {"BATCH": batch, "GRADIENT_ACCUMULATION": accumulation, "BOTH": batch * accumulation}.get(kind, 1)


def read_rates(found: Translation, family: Family) -> None:
    """Read the rates, each a part's own or else the common one, times the root of the scaler."""
    scaler = found["learning_rate_scaler"]
    factor = math.sqrt(scale_of(scaler, found))
    if factor == 1.0:
        found.carry("learning_rate_scaler", {})
    else:
        note = f"rates are not scaled here, so each is multiplied by {factor:g}, as OneTrainer does"
        found.change("learning_rate_scaler", {}, note)
    parts = {"unet": "recipe.learning_rate"}
    parts |= {part: f"recipe.{part}.learning_rate" for part in (ENCODERS if family == "sdxl" else ENCODERS[:1])}
    common: dict[str, Any] = {}
    for part, key in parts.items():
        own = found[f"{part}.learning_rate"]
        rate = (found["learning_rate"] if own is None else own) * factor if found[f"{part}.train"] else 0.0
        found.carry(f"{part}.learning_rate {part}.train", {key: rate})
        if own is None:
            common[key] = rate
        _read_stop(found, part, key)
    found.carry("learning_rate", common)
    if family == "sd15":
        unused = "learning_rate train stop_training_after stop_training_after_unit dropout_probability"
        found.carry(" ".join(f"text_encoder_2.{name}" for name in unused.split()), {})


def _read_stop(found: Translation, part: str, rate: str) -> None:
    """Read after how many steps or epochs a part is no longer trained."""
    names = f"{part}.stop_training_after {part}.stop_training_after_unit"
    after, unit = found[f"{part}.stop_training_after"] or 0, found[f"{part}.stop_training_after_unit"]
    if unit not in ("EPOCH", "STEP"):
        if unit == "NEVER" or not found[f"{part}.train"]:
            found.carry(names, {})
        else:
            found.lack(names, "a part is trained for steps or a share of the run: set stop_after")
        return
    is_over = unit == "EPOCH" and after >= found["epochs"]
    if is_over or not found[f"{part}.train"]:
        found.carry(names, {})
    elif after <= 0:
        found.carry(names, {rate: 0.0})
    elif part == "unet":
        found.lack(names, "the UNet is trained for the whole run")
    elif not found["unet.train"]:
        found.change(names, {}, "it is trained to the end, because nothing else is: shorten recipe.epochs instead")
    else:
        share = after / found["epochs"] if unit == "EPOCH" else max(1, in_steps(found, after))
        found.carry(names, {f"recipe.{part}.stop_after": share})


def in_steps(found: Translation, count: float) -> int:
    """Return a number of OneTrainer's steps, which are batches, as steps of the optimizer."""
    return round(count / int(found["gradient_accumulation_steps"]))


def read_optimizer(found: Translation) -> None:
    """Read the optimizer and its arguments."""
    text = found["optimizer.optimizer"]
    word = text.lower()
    name = word if word in OPTIMIZERS else value_called("recipe.optimizer.name", word)
    if name == "adamw8bit" and found["optimizer.is_paged"]:
        name = "paged_adamw8bit"
    other = next((each for each in (word, word.replace("_", "")) if each in OTHERS), None)
    if name is not None:
        found.carry("optimizer.optimizer optimizer.is_paged", {"recipe.optimizer.name": name})
        used = _arguments(found, name, word)
    elif other is not None:
        known = {each: _argument(found, each) for each in OTHERS[other].arguments}
        used = {f"optimizer.{each}": "" for each, value in known.items() if value is not None}
        betas = [found["optimizer.beta1"], found["optimizer.beta2"]]
        if "betas" in known and None not in betas:
            known["betas"] = betas
            used |= {"optimizer.beta1": "", "optimizer.beta2": ""}
        stated = {each: value for each, value in known.items() if value is not None}
        ours = {"name": "other", "optimizer": other, "args": stated}
        found.carry("optimizer.optimizer", {f"recipe.optimizer.{key}": value for key, value in ours.items()})
    else:
        found.change(
            "optimizer.optimizer", {"recipe.optimizer.name": "adamw"}, f"{text} is not available; AdamW is used"
        )
        used = {}
    for argument, ours_key in used.items():
        found.carry(argument, {ours_key: found.values[ours_key]} if ours_key else {})
    _lack_arguments(found, used.keys() | {"optimizer.optimizer", "optimizer.is_paged"}, name or "", text)


def _argument(found: Translation, name: str) -> Any:
    """Return an argument of another optimizer that the file states and that is not off."""
    value = found[f"optimizer.{name}"] if f"optimizer.{name}" in OPTIONS else None
    return value if value not in (None, False) and is_argument(value) else None


def _arguments(found: Translation, name: str, word: str) -> dict[str, str]:
    """Set the arguments of one of our optimizers; return their keys by OneTrainer's names."""
    kind = OPTIMIZERS[name]
    theirs = {ours: name for name, ours in kind.method.argument_names.items()}
    defaults: dict[str, Any] = {**kind.method.class_defaults}
    if word == "adam":  # OneTrainer's default, unlike AdamW's
        defaults["weight_decay"] = 0.0
    if name == "schedulefree":
        defaults["weight_decay"] = 0.01
        warmup = found["learning_rate_warmup_steps"]
        defaults["warmup_steps"] = in_steps(found, warmup) if warmup > 1 else 0
    used: dict[str, str] = {}
    for field in kind.model_fields.keys() - {"name"}:
        argument, key = f"optimizer.{theirs.get(field, field)}", f"recipe.optimizer.{field}"
        value = found[argument] if argument in OPTIONS else None
        if value is not None:
            used[argument] = key
        else:
            value = defaults.get(field)
        if value is not None:
            found.values[key] = value
    return used


def _lack_arguments(found: Translation, used: set[str], name: str, text: str) -> None:
    """Record the arguments that nothing was made of: lost, unless they are off, as by default or for speed alone."""
    fixed = {f"optimizer.{argument}": value for argument, value in _FIXED.get(name, {}).items()}
    harmless = {f"optimizer.{argument}" for argument in HARMLESS_ARGUMENTS.split()}
    for argument in OPTIONS.keys() - used:
        if not argument.startswith("optimizer."):
            continue
        value = found[argument]
        is_off = value in (None, False, 0, OPTIONS[argument].default, fixed.get(argument))
        if is_off or argument in harmless or (argument, value) == ("optimizer.percentile_clipping", 100):
            found.carry(argument, {})
        else:
            found.lack(argument, f"{text} has no such setting in {_here(name)}")


def _here(name: str) -> str:
    return f"recipe.optimizer ({name})" if name else "recipe.optimizer"


def read_schedule(found: Translation) -> None:
    """Read the schedule; its warmup is a number of batches or, up to 1, a share of the run."""
    text = found["learning_rate_scheduler"]
    warmup = found["learning_rate_warmup_steps"]
    averages = OPTIMIZERS[found.values["recipe.optimizer.name"]].method.averages if _is_ours(found) else False
    if averages:
        kind = "constant"
        found.carry("learning_rate_scheduler", {"recipe.schedule.kind": kind})
        found.carry("learning_rate_warmup_steps", {})
    else:
        kind = _SCHEDULES.get(text, "restarts" if text == "COSINE_WITH_RESTARTS" else "constant")
        _read_kind(found, text, kind)
        ours = max(0, in_steps(found, warmup)) if warmup > 1 else min(max(warmup, 0.0), 0.999)
        found.carry("learning_rate_warmup_steps", {"recipe.schedule.warmup": ours or 0})
    for name, key, value, is_used in _shape(found, kind):
        if is_used:
            found.carry(name, {key: value})
        elif value == OPTIONS[name].default:
            found.carry(name, {})
        else:
            found.change(name, {}, f"has no effect with {shown(text)}, also in {PROGRAM}")


def _is_ours(found: Translation) -> bool:
    return found.values.get("recipe.optimizer.name") in OPTIMIZERS


def _read_kind(found: Translation, text: str, kind: str) -> None:
    ours = {"recipe.schedule.kind": kind}
    if text in _SCHEDULES:
        found.carry("learning_rate_scheduler", ours)
    elif kind == "restarts":
        found.change("learning_rate_scheduler", ours, "the rate rises again at once, not along a cosine")
    else:
        found.change("learning_rate_scheduler", ours, f"there is no {shown(text)}; constant is used")


def _shape(found: Translation, kind: str) -> Iterator[tuple[str, str, Any, bool]]:
    cycles, end = found["learning_rate_cycles"], found["learning_rate_min_factor"]
    yield "learning_rate_cycles", "recipe.schedule.cycles", max(1, round(cycles)), kind == "restarts"
    yield "learning_rate_min_factor", "recipe.schedule.end", end, kind != "constant"
