"""Translate OneTrainer's configuration to a job: length, loss, noise, images, captions, previews and saving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any

from trainer.config.base import Family
from trainer.errors import JobError
from trainer.importers.onetrainer.concepts import MASKS, mask_settings, resolutions_in
from trainer.importers.onetrainer.network import (
    FAMILIES,
    in_steps,
    read_adapter,
    read_base,
    read_optimizer,
    read_rates,
    read_schedule,
    scale_of,
)
from trainer.importers.onetrainer.options import CHOSEN_HERE, OPTIONS, PROGRAM, UNAVAILABLE, WITHOUT_EFFECT
from trainer.importers.translation import Translation, shown

_LENGTH_NOTE = (
    "OneTrainer leaves out images that do not fill a batch of their shape, so an epoch here may have a few steps more"
)
_LOSSES = {"mse_strength": "mse", "mae_strength": "l1", "log_cosh_strength": "log_cosh", "huber_strength": "huber"}
_WEIGHTINGS: Mapping[str, str] = {"MIN_SNR_GAMMA": "min_snr_gamma", "P2": "p2_gamma"}
_DTYPES = {"FLOAT_16": "fp16", "BFLOAT_16": "bf16"}
_QUANTIZED = ("FLOAT_8", "FLOAT_W8A8", "INT_W8A8", "GGUF")
_SAMPLERS = {
    "DDIM": "ddim",
    "EULER": "euler",
    "EULER_A": "euler_a",
    "DPMPP": "dpmpp_2m",
    "DPMPP_KARRAS": "dpmpp_2m_karras",
    "DPMPP_SDE": "dpmpp_2m_sde_karras",
    "DPMPP_SDE_KARRAS": "dpmpp_2m_sde_karras",
    "EULER_KARRAS": "euler",
    "UNIPC": "unipc",
    "UNIPC_KARRAS": "unipc",
}
_GENERIC_NAMES = ("lora", "model")


def translate(stated: Mapping[str, Any]) -> Translation:
    """Read the settings that a configuration states, with names of tables before those of settings in them.

    Concepts and samples are not read: see `trainer.importers.onetrainer.files`. Raises JobError for values of a wrong
    type, and for what cannot be trained here.
    """
    found = Translation(PROGRAM, stated, OPTIONS)
    family = _family(found)
    _require_counts(found)
    read_base(found, family)
    read_adapter(found)
    read_rates(found, family)
    read_optimizer(found)
    read_schedule(found)
    for read in (_length, _loss, _weighting, _noise, _timesteps, _images, _masks, _captions, _average, _memory):
        read(found)
    for read in (_previews, _saving):
        read(found)
    found.carry(WITHOUT_EFFECT, {})
    for note, names in CHOSEN_HERE.items():
        found.change(names, {}, note)
    for note, names in UNAVAILABLE.items():
        for name in names.split():
            lack_if_set(found, name, note)
    return found


def lack_if_set(found: Translation, name: str, note: str) -> None:
    """Record that there is nothing like a setting here, unless it is off or as by default."""
    if found[name] in (None, False, 0, "", OPTIONS[name].default):
        found.carry(name, {})
    else:
        found.lack(name, note)


def _family(found: Translation) -> Family:
    model, method = found["model_type"], found["training_method"]
    if model not in FAMILIES:
        sentence = f"Could not import this job: it trains {shown(model)}, and only SD 1.5 and SDXL can be trained here."
        raise JobError("import.model", sentence, "Import a job for one of these.")
    if method != "LORA":
        sentence = f"Could not import this job: its training_method is {shown(method)}, and only LoRAs can be trained."
        raise JobError("import.method", sentence, "Set training_method to LORA in OneTrainer, and save it again.")
    return FAMILIES[model]


def _require_counts(found: Translation) -> None:
    for name in ("batch_size", "gradient_accumulation_steps", "epochs", "ema_update_step_interval"):
        if found[name] < 1:
            raise JobError("import.value", f"{name} must be 1 or more, not {found[name]}.", "Correct it in the file.")


def _length(found: Translation) -> None:
    batch = found["batch_size"] * found["gradient_accumulation_steps"]
    found.carry("batch_size gradient_accumulation_steps", {"recipe.effective_batch": batch})
    resolutions = resolutions_in(found["resolution"])
    epochs = max(1, round(found["epochs"] / len(resolutions)))
    note = _LENGTH_NOTE
    if len(resolutions) > 1:
        note = f"each image is trained at all {len(resolutions)} resolutions in an epoch here, so there are less epochs"
    found.change("epochs", {"recipe.epochs": epochs}, note)
    scaler, clip = found["loss_scaler"], found["clip_grad_norm"] or 0.0
    scale = scale_of(scaler, found)
    ours = {"recipe.max_grad_norm": clip / scale}
    if scale == 1:
        found.carry("loss_scaler clip_grad_norm", ours)
    else:
        note = (
            f"the loss is not multiplied by {scale} here, so that gradients are clipped at 1/{scale} of clip_grad_norm"
        )
        found.change("loss_scaler clip_grad_norm", ours, note)


def _loss(found: Translation) -> None:
    mix = {ours: found[theirs] for theirs, ours in _LOSSES.items() if found[theirs]}
    names = " ".join((*_LOSSES, "huber_delta"))
    values: dict[str, Any] = {"recipe.objective.loss": next(iter(mix), "mse")}
    if "huber" in mix:
        mix["huber"] /= 2  # ours is e² for small errors e, torch's e²/2
        values["recipe.objective.huber_c"] = found["huber_delta"]
    if [*mix.values()] != [1.0]:
        values["recipe.objective.loss_mix"] = ",".join(f"{name}:{weight:g}" for name, weight in mix.items())
    if not mix:
        found.change(names, {"recipe.objective.loss": "mse"}, "no loss has a strength; mse is used")
    elif "huber" in mix:
        note = "Huber's loss is smooth here (pseudo-Huber) and twice as large, so that its share is half"
        found.change(names, values, note)
    else:
        found.carry(names, values)


def _weighting(found: Translation) -> None:
    weighting, strength = found["loss_weight_fn"], found["loss_weight_strength"]
    values: dict[str, Any] = {}
    if weighting in _WEIGHTINGS:
        values[f"recipe.objective.{_WEIGHTINGS[weighting]}"] = strength
    elif weighting == "DEBIASED_ESTIMATION":
        values["recipe.objective.debiased_estimation"] = True
    if weighting == "CONSTANT" or values:
        found.carry("loss_weight_fn loss_weight_strength", values)
    else:
        found.lack("loss_weight_fn", f"there is no {shown(weighting)}; recipe.objective.min_snr_gamma is the closest")
        found.carry("loss_weight_strength", {})


def _noise(found: Translation) -> None:
    offset, perturbation = found["offset_noise_weight"], found["perturbation_noise_weight"]
    found.carry("offset_noise_weight", {"recipe.objective.noise_offset": offset} if offset else {})
    if perturbation:
        note = "only the noisy image is perturbed here; in OneTrainer, the target is too"
        found.change("perturbation_noise_weight", {"recipe.objective.input_perturbation": perturbation}, note)
    else:
        found.carry("perturbation_noise_weight", {})


def _timesteps(found: Translation) -> None:
    first, end = (int(1000 * min(max(found[f"{edge}_noising_strength"], 0.0), 1.0)) for edge in ("min", "max"))
    limits = {"recipe.objective.timestep_min": first, "recipe.objective.timestep_max": end - 1}
    found.carry("min_noising_strength max_noising_strength", limits)
    shift = found["timestep_shift"]
    found.carry("timestep_shift", {"recipe.objective.timestep_shift": shift} if shift != 1.0 else {})
    kind, weight, bias = (found[name] for name in ("timestep_distribution", "noising_weight", "noising_bias"))
    names = "timestep_distribution noising_weight noising_bias"
    if kind == "UNIFORM" or (kind == "SIGMOID" and not weight):
        found.carry(names, {"recipe.objective.timesteps": "uniform"})
    elif kind == "LOGIT_NORMAL" and not weight and not bias:
        found.carry(names, {"recipe.objective.timesteps": "logit_normal"})
    elif kind == "LOGIT_NORMAL":
        note = "the logit-normal distribution has mean 0 and deviation 1 here"
        found.change(names, {"recipe.objective.timesteps": "logit_normal"}, note)
    else:
        note = f"there is no {shown(kind)}; uniform is used: see recipe.objective.timestep_bias"
        found.change(names, {"recipe.objective.timesteps": "uniform"}, note)


def _images(found: Translation) -> None:
    sides = resolutions_in(found["resolution"])
    values: dict[str, Any] = {"recipe.resolution": sides[0]}
    if "x" in found["resolution"]:
        found.change("resolution", values, f"{found['resolution']} becomes a square of that area")
    else:
        found.carry("resolution", values)
    values = {"recipe.images.buckets": found["aspect_ratio_bucketing"]}
    if found["aspect_ratio_bucketing"]:
        values["recipe.images.max_upscale"] = 16.0  # images are always enlarged there
        note = "OneTrainer has 17 shapes, up to 1:4; here each shape in steps of 64 pixels is one, so less is cropped"
        found.change("aspect_ratio_bucketing", values, note)
    else:
        found.carry("aspect_ratio_bucketing", values)


def _masks(found: Translation) -> None:
    names = ("masked_training", *MASKS)
    settings = mask_settings({name: found[name] for name in names})
    masks = {"dataset.masks": "auto" if found["masked_training"] else "none"}
    probability = settings.pop("recipe.objective.unmasked_probability", None)
    found.carry("masked_training unmasked_weight normalize_masked_area_loss", {**masks, **settings})
    ours = {} if probability is None else {"recipe.objective.unmasked_probability": probability}
    found.carry("unmasked_probability", ours)


def _captions(found: Translation) -> None:
    """Read the dropout of captions; a LoRA of SD 1.5 has one text encoder."""
    first = found["text_encoder.dropout_probability"]
    if first:
        note = "a dropped caption is an empty one here; OneTrainer sets its encoding to 0"
        found.change("text_encoder.dropout_probability", {"recipe.captions.dropout": first}, note)
    else:
        found.carry("text_encoder.dropout_probability", {})
    if found.values["base.family"] == "sdxl":
        second = found["text_encoder_2.dropout_probability"]
        if second != first:
            found.lack("text_encoder_2.dropout_probability", "captions are dropped for both text encoders at once")
        else:
            found.carry("text_encoder_2.dropout_probability", {})


def _average(found: Translation) -> None:
    """Read the moving average, which OneTrainer updates once in several steps."""
    names = "ema ema_decay ema_update_step_interval"
    if found["ema"] == "OFF":
        found.carry(names, {})
        return
    interval = found["ema_update_step_interval"]
    decay = max(found["ema_decay"], 0.0) ** (1 / interval)
    note = f"it is updated after each step, not each {interval}, with a decay that is the same in {interval} steps"
    if interval == 1:
        found.carry(names, {"recipe.ema_decay": decay})
    else:
        found.change(names, {"recipe.ema_decay": decay}, note)


def _memory(found: Translation) -> None:
    """Read dtypes that change what is learned."""
    dtype = found["unet.weight_dtype"]
    if dtype == "NFLOAT_4":
        found.carry("unet.weight_dtype", {"fit.quantize": "nf4"})
    elif dtype == "INT_8":
        found.carry("unet.weight_dtype", {"fit.quantize": "int8"})
    elif dtype.startswith(_QUANTIZED):
        note = "int8 takes as much memory, with less rounding error than 8-bit floats"
        found.change("unet.weight_dtype", {"fit.quantize": "int8"}, note)
    else:
        found.change("unet.weight_dtype", {}, "a plan for your GPU chooses this")
    vae = {"FLOAT_32": "fp32", "BFLOAT_16": "bf16"}.get(found["vae.weight_dtype"])
    if vae:
        found.carry("vae.weight_dtype", {"fit.vae_dtype": vae})
    else:
        found.change("vae.weight_dtype", {}, "the VAE computes in bf16 or fp32 here, as your GPU can")


def _interval(found: Translation, name: str, steps_key: str, nearest: str, epochs_key: str = "") -> None:
    """Read how often something is done, in steps or, if there is such a key, in epochs; not in minutes."""
    count, unit = found[name], found[f"{name}_unit"]
    names = f"{name} {name}_unit"
    if unit == "STEP" and count:
        found.carry(names, {steps_key: max(1, in_steps(found, count))})
    elif unit == "EPOCH" and count and epochs_key:
        found.carry(names, {epochs_key: max(1, round(count))})
    elif unit == "NEVER":
        found.carry(names, {})
    else:
        found.change(names, {}, nearest)


def _previews(found: Translation) -> None:
    nearest = "previews are made every so many steps or epochs: set report.previews.every"
    _interval(found, "sample_after", "report.previews.every", nearest, "report.previews.every_epochs")
    nearest = "the validation loss is computed every so many steps: set report.validation.every"
    if found["validation"]:
        _interval(found, "validate_after", "report.validation.every", nearest)
    else:
        found.carry("validate_after validate_after_unit", {})
    found.carry("validation", {})


def _saving(found: Translation) -> None:
    nearest = "checkpoints to resume from are written every so many steps: set report.saving.checkpoint_every"
    _interval(found, "backup_after", "report.saving.checkpoint_every", nearest)
    rolling = found["rolling_backup"]
    keep = {"report.saving.checkpoint_keep": int(found["rolling_backup_count"])} if rolling else {}
    found.carry("rolling_backup rolling_backup_count", keep)
    nearest = "LoRAs are saved every so many steps or epochs: set report.saving.every_steps"
    _interval(found, "save_every", "report.saving.every_steps", nearest, "report.saving.every_epochs")
    found.carry("output_dtype", {"output.dtype": _DTYPES.get(found["output_dtype"], "fp32")})
    found.change("tensorboard", {}, "runs have curves of their own; report.tensorboard = true writes TensorBoard's too")
    path = PureWindowsPath(found["output_model_destination"] or "")
    stated = found["save_filename_prefix"] or path.stem
    named = {"name": stated} if stated and stated not in _GENERIC_NAMES else {}
    found.change("output_model_destination", named, "the LoRA is in the run's folder")
    found.carry("save_filename_prefix", named if found["save_filename_prefix"] else {})


def preview_of(sample: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a sample as a preview. Raises ValueError and TypeError for invalid numbers."""
    side = 1024 if family == "sdxl" else 512
    return {
        "prompt": str(sample.get("prompt", "")),
        "negative": str(sample.get("negative_prompt") or ""),
        "width": _to_8(sample.get("width", side)),
        "height": _to_8(sample.get("height", side)),
        "seed": abs(int(sample.get("seed", 42))),
        "steps": int(sample.get("diffusion_steps", 30)),
        "guidance": float(sample.get("cfg_scale", 7.5)),
        "sampler": _SAMPLERS.get(str(sample.get("noise_scheduler", "EULER_A")), "euler_a"),
    }


def _to_8(side: Any) -> int:
    return int(side) // 8 * 8
