"""Translate the options of sd-scripts to a job: rates, optimizer, schedule, length, loss, captions, images and saving.

Every front end of sd-scripts (its TOML file, a pasted command line, the GUIs that write such files) leads here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from trainer.config.base import Family
from trainer.config.field_names import value_called
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.optimizers.others import OTHERS, is_argument
from trainer.config.recipe import ObjectiveConfig, ScheduleConfig
from trainer.config.schema import choices
from trainer.importers.sd_scripts.network import read_network
from trainer.importers.sd_scripts.options import CHOSEN_HERE, OPTIONS, PROGRAM, UNAVAILABLE
from trainer.importers.translation import Translation, named_values, shown

_LENGTH_NOTE = "an epoch here is as many steps as all its images fill, so it may have a few steps less than there"
_LONGEST_NUMBER = 9
_SCHEDULES = choices(ScheduleConfig.model_fields["kind"].annotation)
_LOSSES = choices(ObjectiveConfig.model_fields["loss"].annotation)


def translate(stated: Mapping[str, Any], family: Family | None) -> Translation:
    """Read the options that a file or command line states, for a base of this family (None: not known).

    The dataset and prompts are not read: `files.py` does. Raises JobError for values of a wrong type.
    """
    found = Translation(PROGRAM, stated, OPTIONS)
    for read in (
        _base,
        read_network,
        _rates,
        _optimizer,
        _schedule,
        _length,
        _loss,
        _noise,
        _captions,
        _images,
        _saving,
    ):
        read(found, family)
    for note, names in CHOSEN_HERE.items():
        for name in names.split():
            found.change(name, {}, note)
    for note, names in UNAVAILABLE.items():
        for name in names.split():
            found.lack(name, note)
    return found


def _base(found: Translation, family: Family | None) -> None:
    if found["pretrained_model_name_or_path"]:
        found.carry("pretrained_model_name_or_path", {"base.model": found["pretrained_model_name_or_path"]})
    found.carry("vae", {"base.vae": found["vae"]} if found["vae"] else {})
    found.carry("v_parameterization", {"base.prediction": "v"} if found["v_parameterization"] else {})
    found.carry("zero_terminal_snr", {"base.zero_terminal_snr": True} if found["zero_terminal_snr"] else {})
    found.carry("network_weights", {"base.continue_from": found["network_weights"]} if found["network_weights"] else {})
    if family == "sdxl" and found["clip_skip"]:
        found.change("clip_skip", {}, "SDXL always uses the penultimate layer; sd-scripts ignores it too")
    else:
        found.carry("clip_skip", {"recipe.clip_skip": found["clip_skip"]} if found["clip_skip"] else {})


def _rates(found: Translation, family: Family | None) -> None:
    """Read the rates: a part's own, else the common one; an own rate of 0 trains nothing there."""
    common = found["learning_rate"]
    unet = common if found["unet_lr"] is None else found["unet_lr"]
    listed = found["text_encoder_lr"] or [common]
    if found["network_train_text_encoder_only"]:
        unet = 0.0
    if found["network_train_unet_only"]:
        listed = [0.0]
    encoders = {"recipe.text_encoder.learning_rate": listed[0]}
    if family == "sdxl":
        encoders["recipe.text_encoder_2.learning_rate"] = listed[-1]
    own = {"recipe.learning_rate": unet}
    found.carry("unet_lr network_train_text_encoder_only", own)
    _, name = _optimizer_name(found)
    method = OPTIMIZERS[name].method if name else None
    if method and method.one_rate and unet and any(rate not in (0, unet) for rate in encoders.values()):
        encoders = {key: unet if rate else 0.0 for key, rate in encoders.items()}
        note = f"{method.title} finds one rate for all parts"
        found.change("text_encoder_lr network_train_unet_only", encoders, note)
    else:
        found.carry("text_encoder_lr network_train_unet_only", encoders)
    common_of = {**(own if found["unet_lr"] is None else {}), **({} if found["text_encoder_lr"] else encoders)}
    found.carry("learning_rate", common_of)


def _optimizer_name(found: Translation) -> tuple[str, str | None]:
    """Return the optimizer's class as the file has it, and its name here, if there is one."""
    text = found["optimizer_type"] or "AdamW"
    text = "AdamW8bit" if found["use_8bit_adam"] else "Lion" if found["use_lion_optimizer"] else text
    word = text.rpartition(".")[2].lower()
    return text, word if word in OPTIMIZERS else value_called("recipe.optimizer.name", word)


def _optimizer(found: Translation, _: Family | None) -> None:
    text, name = _optimizer_name(found)
    word = text.rpartition(".")[2].lower()
    names = "optimizer_type use_8bit_adam use_lion_optimizer"
    arguments = named_values(found["optimizer_args"])
    if name is None and word in OTHERS:
        known = {key: value for key, value in arguments.items() if key in OTHERS[word].arguments and is_argument(value)}
        found.carry(names, {"recipe.optimizer": {"name": "other", "optimizer": word, "args": known}})
        _report_arguments(found, arguments.keys() - known.keys(), text)
        return
    if name is None:
        note = "this optimizer is not available; AdamW is used"
        found.change(names, {"recipe.optimizer": {"name": "adamw"}}, note)
        _report_arguments(found, arguments.keys(), text)
        return
    kind = OPTIMIZERS[name]
    values, rest = {"name": name, **kind.method.class_defaults}, set()
    for key, value in arguments.items():
        ours = kind.method.argument_names.get(key, key)
        if ours in kind.model_fields.keys() - {"name"} and isinstance(value, bool | int | float):
            values[ours] = value
        elif key == "betas" and isinstance(value, tuple | list):
            betas = (beta for beta in ("beta1", "beta2", "beta3") if beta in kind.model_fields)
            values.update(zip(betas, value, strict=False))
        elif value not in (None, False):
            rest.add(key)
    found.carry(names, {"recipe.optimizer": values})
    _report_arguments(found, rest, text)


def _report_arguments(found: Translation, lost: Set[str], who: str) -> None:
    if lost:
        found.change("optimizer_args", {}, f"{who} has no {', '.join(sorted(map(shown, lost)))} here")
    else:
        found.carry("optimizer_args", {})


def _schedule(found: Translation, _: Family | None) -> None:
    text = found["lr_scheduler"].lower()
    kind = text if text in _SCHEDULES else value_called("recipe.schedule.kind", text)
    if found["lr_scheduler_type"]:
        found.lack("lr_scheduler_type lr_scheduler_args", "no code of others is run; the schedule lr_scheduler is used")
    else:
        found.carry("lr_scheduler_type", {})
        found.lack("lr_scheduler_args", "arguments of schedules of others are not available")
    if kind is None:
        found.change(
            "lr_scheduler", {"recipe.schedule.kind": "constant"}, f"there is no {shown(text)}; constant is used"
        )
    else:
        found.carry("lr_scheduler", {"recipe.schedule.kind": kind})
    # sd-scripts has no warmup with "constant".
    warmup = 0 if text == "constant" or kind is None else _steps(found["lr_warmup_steps"])
    _schedule_part(found, "lr_warmup_steps", "warmup", warmup, is_used=text != "constant")
    _schedule_part(found, "lr_scheduler_num_cycles", "cycles", is_used=kind == "restarts")
    _schedule_part(found, "lr_scheduler_power", "power", is_used=kind == "polynomial")
    _schedule_part(found, "lr_scheduler_timescale", "timescale", is_used=kind == "inverse_sqrt")
    decay = _steps(found["lr_decay_steps"] or 0)
    _schedule_part(found, "lr_decay_steps", "decay", decay, is_used=kind == "warmup_stable_decay")
    lowest = text in ("cosine_with_min_lr", "warmup_stable_decay")
    _schedule_part(found, "lr_scheduler_min_lr_ratio", "end", is_used=lowest)


def _schedule_part(found: Translation, theirs: str, ours: str, value: Any = None, *, is_used: bool) -> None:
    """Read a setting of a schedule, which sd-scripts ignores with other schedules."""
    value = found[theirs] if value is None else value
    if is_used:
        found.carry(theirs, {f"recipe.schedule.{ours}": value} if value else {})
    else:
        found.change(theirs, {}, f"has no effect with {shown(found['lr_scheduler'])}, also in sd-scripts")


def _steps(value: float) -> int | float:
    """Return a number of steps, or a share of the run below 1."""
    return value if 0 < value < 1 else int(value)


def _length(found: Translation, _: Family | None) -> None:
    batch = (found["train_batch_size"] or 1) * (found["gradient_accumulation_steps"] or 1)
    found.carry("train_batch_size gradient_accumulation_steps", {"recipe.effective_batch": batch})
    if found["max_train_epochs"]:
        found.change("max_train_epochs", {"recipe.epochs": found["max_train_epochs"]}, _LENGTH_NOTE)
        found.change("max_train_steps", {}, "max_train_epochs takes precedence in sd-scripts")
    else:
        found.carry("max_train_epochs", {})
        found.carry("max_train_steps", {"recipe.steps": found["max_train_steps"]})
    found.carry("max_grad_norm", {"recipe.max_grad_norm": found["max_grad_norm"]})
    if found["seed"] is None:
        found.carry("seed", {})
    else:
        found.carry("seed", {"recipe.seed": found["seed"]})


def _loss(found: Translation, _: Family | None) -> None:
    name = (
        found["loss_type"]
        if found["loss_type"] in _LOSSES
        else value_called("recipe.objective.loss", found["loss_type"])
    )
    values: dict[str, Any] = {"recipe.objective.loss": name}
    if name in ("huber", "smooth_l1"):
        values["recipe.objective.huber_c"] = found["huber_c"]
        values["recipe.objective.huber_schedule"] = found["huber_schedule"]
        if found["huber_schedule"] != "exponential":
            values["recipe.objective.huber_scale"] = found["huber_scale"]
    if name is None:
        found.change("loss_type", {"recipe.objective.loss": "mse"}, "this loss is not available; l2 is used")
        found.carry("huber_c huber_schedule huber_scale", {})
    else:
        found.carry("loss_type huber_c huber_schedule huber_scale", values)
    for theirs, ours in (
        ("min_snr_gamma", "min_snr_gamma"),
        ("debiased_estimation_loss", "debiased_estimation"),
        ("scale_v_pred_loss_like_noise_pred", "scale_v_pred_loss"),
        ("v_pred_like_loss", "v_pred_like_loss"),
    ):
        found.carry(theirs, {f"recipe.objective.{ours}": found[theirs]} if found[theirs] else {})
    found.carry("prior_loss_weight", {"recipe.objective.prior_weight": found["prior_loss_weight"]})
    found.carry("weighted_captions", {"recipe.weighted_captions": True} if found["weighted_captions"] else {})
    last = found["max_timestep"]
    limits = {"recipe.objective.timestep_min": found["min_timestep"] or 0}
    if last is not None:
        limits["recipe.objective.timestep_max"] = last - 1  # exclusive there
    found.carry("min_timestep max_timestep", limits)


def _noise(found: Translation, _: Family | None) -> None:
    values: dict[str, Any] = {}
    if found["noise_offset"]:
        values["recipe.objective.noise_offset"] = found["noise_offset"]
        if found["noise_offset_random_strength"]:
            values["recipe.objective.noise_offset_random_strength"] = True
        if found["adaptive_noise_scale"]:
            values["recipe.objective.adaptive_noise_scale"] = found["adaptive_noise_scale"]
    found.carry("noise_offset noise_offset_random_strength adaptive_noise_scale", values)
    values = {}
    if found["multires_noise_iterations"]:
        values["recipe.objective.multires_iterations"] = found["multires_noise_iterations"]
        values["recipe.objective.multires_discount"] = found["multires_noise_discount"]
    found.carry("multires_noise_iterations multires_noise_discount", values)
    values = {}
    if found["ip_noise_gamma"]:
        values["recipe.objective.input_perturbation"] = found["ip_noise_gamma"]
        if found["ip_noise_gamma_random_strength"]:
            values["recipe.objective.input_perturbation_random_strength"] = True
    found.carry("ip_noise_gamma ip_noise_gamma_random_strength", values)


_CAPTIONS = {
    "caption_prefix": "prefix",
    "caption_suffix": "suffix",
    "caption_separator": "separator",
    "shuffle_caption": "shuffle",
    "keep_tokens": "keep_tokens",
    "keep_tokens_separator": "keep_separator",
    "secondary_separator": "secondary_separator",
    "caption_dropout_rate": "dropout",
    "caption_tag_dropout_rate": "tag_dropout",
    "caption_dropout_every_n_epochs": "dropout_every_epochs",
}


def _captions(found: Translation, _: Family | None) -> None:
    for theirs, ours in _CAPTIONS.items():
        value = found[theirs]
        found.carry(theirs, {f"recipe.captions.{ours}": value} if value else {})
    wildcards = {"recipe.captions.wildcards": True, "dataset.lines": "variants"} if found["enable_wildcard"] else {}
    found.carry("enable_wildcard", wildcards)
    warmup: dict[str, Any] = {}
    if found["token_warmup_step"]:
        warmup["recipe.captions.token_warmup_step"] = _steps(found["token_warmup_step"])
        warmup["recipe.captions.token_warmup_min"] = found["token_warmup_min"]
    found.carry("token_warmup_step token_warmup_min", warmup)
    extension = found["caption_extension"] if found.states("caption_extension") else found["caption_extention"]
    extension = f".{(extension or found['caption_extension']).removeprefix('.')}"
    found.carry("caption_extension caption_extention", {"dataset.caption_sources": [extension]})
    tokens = found["max_token_length"] or 75
    found.carry("max_token_length", {"recipe.token_chunks": tokens, "recipe.caption_padding": "limit"})


def _images(found: Translation, family: Family | None) -> None:
    parts = [side for side in (found["resolution"] or "").replace("x", ",").split(",") if side.strip()]
    sides = [found.typed("resolution", side[:_LONGEST_NUMBER], "whole") for side in parts[:2]]
    if len(set(sides)) > 1:
        side = round(math.sqrt(max(math.prod(sides), 0)) / 8) * 8
        found.change("resolution", {"recipe.resolution": side}, f"{sides[0]}x{sides[1]} becomes a square of that area")
    else:
        found.carry("resolution", {"recipe.resolution": sides[0]} if sides else {})
    values: dict[str, Any] = {"recipe.images.buckets": found["enable_bucket"]}
    step = found["bucket_reso_steps"]
    if found["enable_bucket"]:
        values["recipe.images.bucket_step"] = max(math.ceil(step / 8) * 8, 8)
        values["recipe.images.max_upscale"] = 1.0 if found["bucket_no_upscale"] else 16.0
        if not found["bucket_no_upscale"]:  # which ignores both, as sd-scripts says
            values["recipe.images.bucket_min"] = found["min_bucket_reso"]
            values["recipe.images.bucket_max"] = found["max_bucket_reso"]
    found.carry("enable_bucket bucket_no_upscale min_bucket_reso max_bucket_reso", values)
    if found["enable_bucket"] and step % 8:
        found.change("bucket_reso_steps", {}, "sides are multiples of 8, as those of latents are")
    else:
        found.carry("bucket_reso_steps", {})
    found.carry("flip_aug", {"recipe.images.flip": found["flip_aug"]})
    found.carry("color_aug", {"recipe.images.color_jitter": True} if found["color_aug"] else {})
    found.carry("random_crop", {"recipe.images.crop": "random" if found["random_crop"] else "center"})
    found.carry("no_half_vae", {"fit.vae_dtype": "fp32"} if found["no_half_vae"] else {})
    if found["fp8_base"] or found["fp8_base_unet"]:
        note = "int8 has a third of fp8's rounding error and takes as much memory"
        found.change("fp8_base fp8_base_unet", {"fit.quantize": "int8"}, note)
    else:
        found.carry("fp8_base fp8_base_unet", {})
    masked = found["masked_loss"] or found["alpha_mask"]
    masks: dict[str, Any] = {"recipe.objective.unmasked_weight": 0.0} if masked else {}
    if found["alpha_mask"]:
        masks["dataset.masks"] = "alpha"
    found.carry("masked_loss alpha_mask", masks)
    found.carry("validation_split", {"dataset.validation_share": found["validation_split"]})


def _saving(found: Translation, _: Family | None) -> None:
    found.carry("output_name", {"name": found["output_name"]} if found["output_name"] else {})
    found.carry("output_dir", {"output.runs": found["output_dir"]} if found["output_dir"] else {})
    dtypes = {"fp16": "fp16", "bf16": "bf16"}
    found.carry("save_precision", {"output.dtype": dtypes.get(found["save_precision"] or "", "fp32")})
    if found["save_model_as"] not in (None, "safetensors"):
        found.change("save_model_as", {}, "LoRAs are saved as .safetensors, which every program loads")
    else:
        found.carry("save_model_as", {})
    epochs, steps = found["save_every_n_epochs"], found["save_every_n_steps"]
    if steps:
        found.carry("save_every_n_steps", {"report.saving.every_steps": steps})
        found.lack("save_every_n_epochs save_n_epoch_ratio", "one interval is possible; save_every_n_steps is used")
    else:
        found.carry("save_every_n_epochs save_every_n_steps", {"report.saving.every_epochs": epochs} if epochs else {})
        found.lack("save_n_epoch_ratio", "set report.saving.every_epochs instead")
    _keep(found)
    _previews(found)
    validation = found["validate_every_n_steps"]
    found.carry("validate_every_n_steps", {"report.validation.every": validation} if validation else {})
    found.lack("validate_every_n_epochs", "validation happens every so many steps: set report.validation.every")
    board = found["log_with"] in ("tensorboard", "all") or (found["logging_dir"] and found["log_with"] is None)
    if found["log_with"] in ("wandb", "all"):
        found.change("log_with logging_dir", {"report.tensorboard": bool(board)}, "wandb is not available")
    else:
        found.carry("log_with logging_dir", {"report.tensorboard": True} if board else {})
    for theirs, ours in (("author", "author"), ("license", "license"), ("description", "description")):
        text = found[f"metadata_{theirs}"]
        found.carry(f"metadata_{theirs}", {f"output.{ours}": text} if text else {})
    comment = found["training_comment"]
    taken = comment and not found["metadata_description"]
    found.carry("training_comment", {"output.description": comment} if taken else {})


def _previews(found: Translation) -> None:
    """Read when previews are made; sd-scripts ignores the interval in steps if there is one in epochs."""
    steps, epochs = max(found["sample_every_n_steps"] or 0, 0), max(found["sample_every_n_epochs"] or 0, 0)
    if epochs:
        found.carry("sample_every_n_epochs", {"report.previews.every_epochs": epochs})
        found.change("sample_every_n_steps", {}, "sample_every_n_epochs takes precedence in sd-scripts")
    else:
        values = {"report.previews.every": steps} if steps else {}
        found.carry("sample_every_n_steps sample_every_n_epochs", values)
    found.carry("sample_at_first", {"report.previews.first": found["sample_at_first"]})


def _keep(found: Translation) -> None:
    """Read how many saved LoRAs are kept: a number of files with epochs, a span of steps with steps."""
    steps, span = found["save_every_n_steps"], found["save_last_n_steps"]
    epochs, last = found["save_every_n_epochs"], found["save_last_n_epochs"]
    # Line "remove_step_no" of library/train_util.py also keeps the file at the start of the span.
    kept = span // steps + 1 if steps and span else last if epochs and last and not steps else None
    found.carry("save_last_n_steps save_last_n_epochs", {"report.saving.keep": kept} if kept else {})
