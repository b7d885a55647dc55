"""Translate a job of ai-toolkit: base, network, rates, optimizer, schedule, length, noise, previews and saving."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.config.base import Family
from trainer.config.field_names import value_called
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.errors import JobError
from trainer.importers.ai_toolkit.options import (
    CHOSEN_HERE,
    OPEN_TABLES,
    OPTIONS,
    PROGRAM,
    UNAVAILABLE,
    WITHOUT_EFFECT,
)
from trainer.importers.translation import Option, Translation, plain, shown

_PROCESSES = ("sd_trainer", "diffusion_trainer", "ui_trainer")
_FAMILIES: dict[str, Family] = {"sd1": "sd15", "sdxl": "sdxl"}
_LARGEST_RANK = 1024  # of recipe.rank
_ADAPTERS = {"lora": "lora", "locon": "lora", "lokr": "lokr", "dora": "dora"}
_OPTIMIZERS = {"adam8": "adam8bit", "adamw8": "adamw8bit", "dadaptationadam": "dadaptation"}
_LOSSES = {"mse": "mse", "mae": "l1", "pseudo_huber": "huber"}
_EPS = 1e-6  # of toolkit/optimizer.py, for optimizers that have one
_PATTERN = re.compile(r"[A-Za-z0-9_.]{1,100}")
_SCHEDULES = ("constant", "constant_with_warmup", "cosine", "cosine_with_restarts", "linear", "polynomial")
_FIRST_STEPS = 1000  # the default of num_warmup_steps


def translate(stated: Mapping[str, Any]) -> Translation:
    """Read the settings of a job, named as train.lr; values may be text, as in YAML.

    Datasets and prompts are not read: see `trainer.importers.ai_toolkit.files`. Raises JobError for values of a wrong
    type, and for what cannot be trained here.
    """
    opened = {name: Option("text") for name in stated if name.rpartition(".")[0] in OPEN_TABLES}
    found = Translation(PROGRAM, {name: _value(name, value) for name, value in stated.items()}, {**OPTIONS, **opened})
    family = _family(found)
    _base(found, family)
    for read in (_network, _layers, _rates, _optimizer, _schedule, _length, _loss, _noise, _average, _saving):
        read(found)
    found.carry(WITHOUT_EFFECT, {})
    for note, names in CHOSEN_HERE.items():
        found.change(names, {}, note)
    for name, (note, off) in UNAVAILABLE.items():
        value = plain(found[name])
        if value in (None, off) or not (value or off):
            found.carry(name, {})
        else:
            found.lack(name, note)
    return found


def _value(name: str, value: Any) -> Any:
    """Return a value for its option: switches and nothing as YAML has them, and the default for nothing."""
    option = OPTIONS.get(name)
    made = plain(value)
    if option is None:
        return made
    if made is None:
        return option.default
    if option.kind != "text":
        return made
    return str(value).lower() if isinstance(value, bool) else str(value)


def _family(found: Translation) -> Family:
    kind = found["type"]
    if kind not in _PROCESSES:
        sentence = f"Could not import this job: its process is {shown(kind)}, and only LoRAs can be trained here."
        raise JobError("import.method", sentence, "Import a job whose process has the type sd_trainer.")
    arch = (found["model.arch"] or ("sdxl" if found["model.is_xl"] else "sd1")).partition(":")[0]
    others = (name for name in ("flux", "v3", "v2", "pixart", "lumina2", "auraflow", "ssd", "vega", "pixart_sigma"))
    stated = next((name for name in others if plain(found[f"model.is_{name}"])), arch)
    if stated not in _FAMILIES:
        sentence = (
            f"Could not import this job: it trains {shown(stated)}, and only SD 1.5 and SDXL can be trained here."
        )
        raise JobError("import.model", sentence, "Import a job for one of these.")
    return _FAMILIES[stated]


def _base(found: Translation, family: Family) -> None:
    model = found["model.name_or_path"]
    found.carry("model.name_or_path", {"base.model": model} if model else {})
    found.carry("type model.arch model.is_xl", {"base.family": family})
    found.carry("model.is_v_pred", {"base.prediction": "v"} if found["model.is_v_pred"] else {})
    found.carry("model.vae_path", {"base.vae": found["model.vae_path"]} if found["model.vae_path"] else {})
    start = found["network.pretrained_lora_path"] or found["model.lora_path"]
    found.carry("network.pretrained_lora_path model.lora_path", {"base.continue_from": start} if start else {})
    if found["model.quantize"]:
        note = "int8 takes as much memory as an 8-bit float, with less rounding error"
        found.change("model.quantize model.qtype", {"fit.quantize": "int8"}, note)
    else:
        found.carry("model.quantize model.qtype", {})
    if found["train.noise_scheduler"] == "flowmatch":
        note = "the base says whether it predicts noise or flow: see base.prediction"
        found.change("train.noise_scheduler", {}, note)
    else:
        found.carry("train.noise_scheduler", {})
    name = found["config.name"]
    found.carry("config.name", {"name": name} if name else {})


def _network(found: Translation) -> None:
    kind = found["network.type"].lower()
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        found.change("network.type", {"recipe.adapter": "lora"}, f"there is no {shown(kind)}; a LoRA is trained")
    else:
        note = "ai-toolkit also trains the layers of the timestep in the UNet, which no plain LoRA here has"
        found.change("network.type", {"recipe.adapter": adapter}, note)
    rank = found["network.rank"] or found["network.linear"] or 4
    alpha = found["network.alpha"] if found["network.linear_alpha"] is None else found["network.linear_alpha"]
    names = "network.rank network.linear network.alpha network.linear_alpha network.lokr_full_rank"
    if kind == "lokr" and found["network.lokr_full_rank"]:
        note = f"ai-toolkit trains a whole matrix; here the largest rank is {_LARGEST_RANK}"
        found.change(names, {"recipe.rank": _LARGEST_RANK, "recipe.alpha": float(_LARGEST_RANK)}, note)
    else:
        found.carry(names, {"recipe.rank": rank, "recipe.alpha": alpha})
    factor = found["network.lokr_factor"]
    found.carry("network.lokr_factor", {"recipe.lokr_factor": factor} if kind == "lokr" and factor > 1 else {})
    conv = found["network.conv"]
    values: dict[str, Any] = {"recipe.layers": "all" if conv else "linear"}
    if conv:
        conv_alpha = conv if found["network.conv_alpha"] is None else found["network.conv_alpha"]
        values |= {"recipe.conv_rank": conv, "recipe.conv_alpha": conv_alpha}
    found.carry("network.conv network.conv_alpha", values)
    found.carry("network.dropout", {"recipe.dropout": found["network.dropout"] or 0.0})


def _arguments(found: Translation, table: str) -> dict[str, str]:
    """Return the names of the settings in an open table, by their last parts."""
    return {name.removeprefix(f"{table}."): name for name in found.stated if name.startswith(f"{table}.")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _layers(found: Translation) -> None:
    """Read the filters of layers, which list parts of their names."""
    blocks: list[dict[str, Any]] = []
    for argument, name in _arguments(found, "network.network_kwargs").items():
        parts = [part.strip() for part in str(found[name] or "").split(",") if part.strip()]
        if argument not in ("only_if_contains", "ignore_if_contains"):
            found.lack(name, "set recipe.blocks or keys of [recipe] instead")
        elif not all(_PATTERN.fullmatch(part) for part in parts):
            found.lack(name, "the names of layers cannot be read: select layers with recipe.blocks")
        else:
            is_only = argument == "only_if_contains"
            entries = [{"match": f"unet.*{part}*", "rate_factor": float(is_only)} for part in parts]
            own = [{"match": "unet.*", "rate_factor": 0.0}, *entries] if is_only and parts else entries
            blocks = [*own, *blocks] if is_only else [*blocks, *own]  # later ones win
            found.carry(name, {"recipe.blocks": own} if own else {})
    if blocks:
        found.values["recipe.blocks"] = blocks


def _rates(found: Translation) -> None:
    """Read the rates; Prodigy and D-Adaptation take rates below 0.1 as 1."""
    optimizer = found["train.optimizer"].lower()
    common = found["train.lr"]
    finds_rates = optimizer.startswith(("prodigy", "dadaptation"))
    unet, encoder = (
        common if found[f"train.{part}_lr"] is None else found[f"train.{part}_lr"] for part in ("unet", "text_encoder")
    )
    if finds_rates:
        unet, encoder = (rate if rate >= 0.1 else 1.0 for rate in (unet, encoder))
    rates = {
        "recipe.learning_rate": unet if found["train.train_unet"] else 0.0,
        "recipe.text_encoder.learning_rate": encoder if found["train.train_text_encoder"] else 0.0,
    }
    if found.values["base.family"] == "sdxl":
        rates["recipe.text_encoder_2.learning_rate"] = rates["recipe.text_encoder.learning_rate"]
    names = "train.lr train.unet_lr train.text_encoder_lr train.train_unet train.train_text_encoder"
    if finds_rates and common < 0.1:
        found.change(names, rates, f"{optimizer} finds the rate itself and takes {common:g} as 1, as there")
    else:
        found.carry(names, rates)


def _optimizer(found: Translation) -> None:
    text = found["train.optimizer"]
    word = {"adam8": "adamw8bit", "adamw8": "adamw8bit", "dadaptationadam": "dadaptation"}.get(
        text.lower(), text.lower()
    )
    name = word if word in OPTIMIZERS else value_called("recipe.optimizer.name", word)
    if word == "prodigy8bit":
        name = "prodigy"
    if name is None:
        note = "this optimizer is not available; AdamW is used"
        found.change("train.optimizer", {"recipe.optimizer.name": "adamw"}, note)
    elif word in ("prodigy8bit", "dadaptation"):
        note = "its state is in 32 bits here" if word == "prodigy8bit" else "it is D-Adaptation Adam here"
        found.change("train.optimizer", {"recipe.optimizer.name": name}, note)
    else:
        found.carry("train.optimizer", {"recipe.optimizer.name": name})
    kind = OPTIMIZERS[name or "adamw"]
    values: dict[str, Any] = {**kind.method.class_defaults, "scale_parameter": False, "relative_step": False}
    if word in ("adam", "adam8bit"):
        values["weight_decay"] = 0.0  # torch's default for Adam
    values["eps"] = _EPS
    for argument, setting in _arguments(found, "train.optimizer_params").items():
        ours = kind.method.argument_names.get(argument, argument)
        stated = plain(found[setting])
        betas = [plain(beta) for beta in str(stated).split(",")] if argument == "betas" else []
        is_pair = len(betas) == 2 and all(map(_is_number, betas))
        if name is not None and is_pair and "beta2" in kind.model_fields:
            values |= {"beta1": betas[0], "beta2": betas[1]}
            found.carry(setting, {"recipe.optimizer.beta1": betas[0], "recipe.optimizer.beta2": betas[1]})
        elif name is not None and ours in kind.model_fields and isinstance(stated, bool | int | float):
            values[ours] = stated
            found.carry(setting, {f"recipe.optimizer.{ours}": stated})
        else:
            found.lack(setting, f"{text} has no such setting in recipe.optimizer")
    used = {f"recipe.optimizer.{key}": value for key, value in values.items() if key in kind.model_fields}
    found.values.update(used)


def _schedule(found: Translation) -> None:
    text = found["train.lr_scheduler"]
    arguments = _arguments(found, "train.lr_scheduler_params")
    stated = {argument: value for argument, name in arguments.items() if _is_number(value := plain(found[name]))}
    values: dict[str, Any] = {}
    note = ""
    used: set[str] = set()
    if text == "constant_with_warmup":
        used = {"num_warmup_steps"}
        values["warmup"] = in_steps(found, stated.get("num_warmup_steps", _FIRST_STEPS))
    elif text == "cosine":
        used = {"eta_min"}
        values["end"] = min(1.0, stated.get("eta_min", 0.0) / (found["train.lr"] or 1.0))
    elif text == "cosine_with_restarts":
        used = {"T_0"}
        steps = found["train.steps"]
        values["cycles"] = max(1, round(steps / (stated.get("T_0") or steps or 1)))
    elif text == "linear" and stated.get("start_factor") == 1:
        used = {"start_factor", "end_factor"}
        values["end"] = stated.get("end_factor", 1.0)
    elif text == "linear":
        note = "ai-toolkit's default rises from a third of the rate to the whole; constant is used"
    elif text not in _SCHEDULES:
        note = f"there is no {shown(text)}; constant is used"
    kind = "constant" if note else value_called("recipe.schedule.kind", text) or text
    ours = {"recipe.schedule.kind": kind, **{f"recipe.schedule.{key}": value for key, value in values.items()}}
    if note:
        found.change("train.lr_scheduler", ours, note)
    else:
        found.carry("train.lr_scheduler", ours)
    for argument, name in arguments.items():
        if argument in used and argument in stated:
            found.carry(name, {key: value for key, value in ours.items() if not key.endswith("kind")})
        else:
            found.lack(name, "this schedule has no such setting here: see recipe.schedule")


def in_steps(found: Translation, count: float) -> int:
    """Return a number of ai-toolkit's steps as steps of the optimizer; with the older accumulation, it has fewer."""
    return max(1, round(count / max(1, int(found["train.gradient_accumulation_steps"]))))


def _length(found: Translation) -> None:
    names = "train.batch_size train.gradient_accumulation train.gradient_accumulation_steps"
    older = found["train.gradient_accumulation_steps"]
    batch = max(1, found["train.batch_size"]) * max(1, found["train.gradient_accumulation"]) * max(1, older)
    if older < 1:
        found.change(names, {"recipe.effective_batch": batch}, "accumulation over a whole epoch is not available")
    else:
        found.carry(names, {"recipe.effective_batch": batch})
    steps = in_steps(found, found["train.steps"])
    if older > 1:
        found.change("train.steps", {"recipe.steps": steps}, f"a step is one of the optimizer, of {older} batches")
    else:
        found.carry("train.steps", {"recipe.steps": steps})
    found.carry("train.max_grad_norm", {"recipe.max_grad_norm": found["train.max_grad_norm"]})
    seed = found["training_seed"]
    found.carry("training_seed", {} if seed is None else {"recipe.seed": seed})


def _loss(found: Translation) -> None:
    loss = _LOSSES.get(found["train.loss_type"])
    if loss is None:
        note = f"there is no {shown(found['train.loss_type'])}; mse is used"
        found.change("train.loss_type", {"recipe.objective.loss": "mse"}, note)
    else:
        found.carry("train.loss_type", {"recipe.objective.loss": loss})
    gamma = found["train.min_snr_gamma"]
    found.carry("train.min_snr_gamma", {"recipe.objective.min_snr_gamma": gamma} if gamma else {})
    found.carry("train.reg_weight", {"recipe.objective.prior_weight": found["train.reg_weight"]})


def _noise(found: Translation) -> None:
    offset = found["train.noise_offset"]
    found.carry("train.noise_offset", {"recipe.objective.noise_offset": offset} if offset else {})
    # Timesteps are drawn as places in 999, 998, ..., 0: from the first plus 1 up to the last minus 2.
    first, last = found["train.min_denoising_steps"], found["train.max_denoising_steps"]
    limits = {
        "recipe.objective.timestep_min": min(max(1001 - last, 0), 999),
        "recipe.objective.timestep_max": min(max(998 - first, 0), 999),
    }
    found.carry("train.min_denoising_steps train.max_denoising_steps", limits)
    focus = found["train.content_or_style"]
    if focus not in ("content", "style"):
        found.carry("train.content_or_style", {})
        return
    # Cubes of uniform numbers: 63 % of them (the cube root of 0.25) are below a quarter.
    bias = {"timestep_bias": "later" if focus == "content" else "earlier", "timestep_bias_portion": 0.25}
    ours = {f"recipe.objective.{key}": value for key, value in bias.items()}
    share = 0.25 ** (1 / 3)
    ours["recipe.objective.timestep_bias_multiplier"] = round(3 * share / (1 - share), 2)
    found.change(
        "train.content_or_style", ours, "as many timesteps are drawn from that quarter, without the cubic curve"
    )


def _average(found: Translation) -> None:
    is_used = found["train.ema_config.use_ema"]
    ours = {"recipe.ema_decay": found["train.ema_config.ema_decay"]} if is_used else {}
    found.carry("train.ema_config.use_ema train.ema_config.ema_decay", ours)


def _saving(found: Translation) -> None:
    every = found["save.save_every"]
    found.carry("save.save_every", {"report.saving.every_steps": in_steps(found, every)} if every else {})
    keep = found["save.max_step_saves_to_keep"]
    found.carry("save.max_step_saves_to_keep", {"report.saving.keep": keep} if keep else {})
    dtype = value_called("output.dtype", found["save.dtype"]) or found["save.dtype"]
    if dtype in ("fp16", "bf16", "fp32"):
        found.carry("save.dtype", {"output.dtype": dtype})
    else:
        found.change("save.dtype", {"output.dtype": "fp16"}, f"there is no {shown(dtype)}; fp16 is used")
