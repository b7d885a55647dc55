"""Read jobs from the JSON files of kohya_ss, a GUI that writes a --config_file of sd-scripts and starts it.

What becomes of its settings is decided by `train_model` in its kohya_gui/lora_gui.py. Defaults are those
of its page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.base import Family
from trainer.errors import JobError
from trainer.importers.sd_scripts.files import options_in, read_options
from trainer.importers.sd_scripts.options import OPTIONS
from trainer.importers.translation import ImportedJob, Moves, Option, Origin, Translation
from trainer.protocol.reading import read_json

PROGRAM = "kohya_ss"
# Values of its page for what older files do not state, where they are not the defaults of sd-scripts.
_DEFAULTS: Mapping[str, Any] = {
    "LoRA_type": "Standard",
    "LyCORIS_preset": "full",
    "bucket_no_upscale": True,
    "caption_extension": ".txt",
    "conv_alpha": 1,
    "conv_dim": 1,
    "enable_bucket": True,
    "epoch": 1,
    "factor": -1,
    "learning_rate": 1e-4,
    "lr_scheduler": "cosine",
    "lr_warmup": 10,
    "max_bucket_reso": 2048,
    "max_resolution": "512,512",
    "max_train_steps": 0,
    "network_alpha": 1,
    "network_dim": 8,
    "noise_offset_type": "Original",
    "optimizer": "AdamW8bit",
    "output_name": "last",
    "sample_sampler": "euler_a",
    "save_every_n_epochs": 1,
    "save_precision": "fp16",
    "text_encoder_lr": 1e-4,
    "unet_lr": 1e-4,
    "xformers": "xformers",
}
# Its settings that are an option of another name.
_RENAMED = {
    "LoRA_type": "network_module",
    "epoch": "max_train_epochs",
    "lora_network_weights": "network_weights",
    "lr_warmup": "lr_warmup_steps",
    "max_resolution": "resolution",
    "optimizer": "optimizer_type",
    "sdxl_cache_text_encoder_outputs": "cache_text_encoder_outputs",
    "sdxl_no_half_vae": "no_half_vae",
}
_OF_LORA = (
    "down_lr_weight mid_lr_weight up_lr_weight block_lr_zero_threshold block_dims block_alphas conv_block_dims "
    "conv_block_alphas rank_dropout module_dropout"
)
_OF_LYCORIS = (
    "conv_dim conv_alpha use_tucker rank_dropout module_dropout rank_dropout_scale train_norm use_scalar dora_wd "
    "bypass_mode"
)
_RATIOS = "loraplus_lr_ratio loraplus_unet_lr_ratio loraplus_text_encoder_lr_ratio"
_LYCORIS = {"LyCORIS_preset": "preset", "constrain": "constraint", "unit": "block_size"}
# Module, algorithm of LyCORIS, and arguments of each kind of LoRA.
_KINDS: Mapping[str, tuple[str, str, str]] = {
    "Standard": ("networks.lora", "", _OF_LORA),
    "Kohya LoCon": ("networks.lora", "", f"{_OF_LORA} conv_dim conv_alpha"),
    "LoRA-FA": ("networks.lora_fa", "", _OF_LORA),
    "Kohya DyLoRA": ("networks.dylora", "", f"{_OF_LORA} conv_dim conv_alpha unit"),
    "Kohya LoHa": ("networks.loha", "", "conv_dim conv_alpha use_tucker rank_dropout module_dropout"),
    "Kohya LoKr": ("networks.lokr", "", "conv_dim conv_alpha use_tucker rank_dropout module_dropout factor"),
    "LoCon": ("lycoris.kohya", "locon", _OF_LYCORIS),
    "LyCORIS/LoCon": ("lycoris.kohya", "locon", _OF_LYCORIS),
    "LyCORIS/LoHa": ("lycoris.kohya", "loha", _OF_LYCORIS),
    "LyCORIS/LoKr": ("lycoris.kohya", "lokr", f"{_OF_LYCORIS} factor use_cp decompose_both"),
    "LyCORIS/BOFT": ("lycoris.kohya", "boft", _OF_LYCORIS),
    "LyCORIS/Diag-OFT": ("lycoris.kohya", "diag-oft", f"{_OF_LYCORIS} constrain rescaled"),
    "LyCORIS/DyLoRA": ("lycoris.kohya", "dylora", f"{_OF_LYCORIS} unit"),
    "LyCORIS/GLoRA": ("lycoris.kohya", "glora", _OF_LYCORIS),
    "LyCORIS/iA3": ("lycoris.kohya", "ia3", "conv_dim conv_alpha train_on_input"),
    "LyCORIS/Native Fine-Tuning": ("lycoris.kohya", "full", "rank_dropout module_dropout train_norm"),
}
_MULTIRES = ("multires_noise_iterations", "multires_noise_discount")
_OTHER_MODELS = {
    "flux1_checkbox": "Flux",
    "sd3_checkbox": "SD 3",
    "hunyuan_image_checkbox": "HunyuanImage",
    "anima_checkbox": "Anima",
    "lumina_checkbox": "Lumina",
}
_NOTES = {
    "only for other kinds of models": (
        "ae apply_t5_attn_mask blocks_to_swap clip_g clip_g_dropout_rate clip_l discrete_flow_shift "
        "double_blocks_to_swap enable_all_linear fp8_base_unet guidance_scale img_attn_dim img_mlp_dim img_mod_dim "
        "in_dims logit_mean logit_std mem_eff_save mode_scale model_prediction_type model_type "
        "pos_emb_random_crop_rate save_clip save_t5xxl show_timesteps show_timesteps_resolution single_blocks_to_swap "
        "single_dim single_mod_dim "
        "split_mode split_qkv t5xxl t5xxl_device t5xxl_dtype t5xxl_lr t5xxl_max_token_length timestep_sampling "
        "train_blocks train_double_block_indices train_lora_ggpo train_single_block_indices train_t5xxl txt_attn_dim "
        "txt_mlp_dim txt_mod_dim weighting_scheme ggpo_beta ggpo_sigma cpu_offload_checkpointing "
        "flux1_cache_text_encoder_outputs flux1_cache_text_encoder_outputs_to_disk "
        "anima_attn_mode anima_cache_text_encoder_outputs anima_cache_text_encoder_outputs_to_disk "
        "anima_compile anima_compile_backend anima_compile_cache_size_limit anima_compile_dynamic "
        "anima_compile_fullgraph anima_compile_mode anima_discrete_flow_shift anima_llm_adapter_path "
        "anima_qwen3 anima_qwen3_max_token_length anima_qwen_image_vae_2d anima_sigmoid_scale "
        "anima_split_attn anima_t5_max_token_length anima_t5_tokenizer_path anima_timestep_sampling "
        "anima_torch_compile anima_unsloth_offload_checkpointing anima_vae anima_vae_chunk_size "
        "anima_vae_disable_cache hunyuan_attn_mode hunyuan_byt5 hunyuan_discrete_flow_shift "
        "hunyuan_fp8_scaled hunyuan_fp8_vl hunyuan_image_cache_text_encoder_outputs "
        "hunyuan_image_cache_text_encoder_outputs_to_disk hunyuan_model_prediction_type hunyuan_sigmoid_scale "
        "hunyuan_split_attn hunyuan_text_encoder hunyuan_text_encoder_cpu hunyuan_timestep_sampling "
        "hunyuan_vae hunyuan_vae_chunk_size lumina_ae lumina_cache_text_encoder_outputs "
        "lumina_cache_text_encoder_outputs_to_disk lumina_discrete_flow_shift lumina_gemma2 "
        "lumina_gemma2_max_token_length lumina_model_prediction_type lumina_sigmoid_scale "
        "lumina_system_prompt lumina_timestep_sampling lumina_use_flash_attn lumina_use_sage_attn "
        "sd3_cache_text_encoder_outputs sd3_cache_text_encoder_outputs_to_disk sd3_clip_l "
        "sd3_clip_l_dropout_rate sd3_disable_mmap_load_safetensors sd3_enable_scaled_pos_embed "
        "sd3_fused_backward_pass sd3_t5_dropout_rate sd3_t5xxl sd3_text_encoder_batch_size"
    ),
    "how the program is started, which changes no result": (
        "dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph extra_accelerate_launch_args gpu_ids headless "
        "dynamo_backend main_process_port model_list multi_gpu num_cpu_threads_per_process num_machines num_processes "
        "print_only save_as_bool lowvram"
    ),
    "kohya_ss ignores it": "conv_alphas conv_dims no_token_padding",
    "kohya_ss ignores it; set recipe.text_encoder.stop_after": (
        "stop_text_encoder_training stop_text_encoder_training_pct"
    ),
    "inpainting models cannot be trained": "train_inpainting",
}
_PASSED = (
    "adaptive_noise_scale async_upload bucket_no_upscale bucket_reso_steps cache_latents cache_latents_to_disk "
    "caption_dropout_every_n_epochs caption_dropout_rate caption_extension clip_skip color_aug dataset_config "
    "debiased_estimation_loss dim_from_weights enable_bucket flip_aug fp8_base full_bf16 full_fp16 "
    "gradient_accumulation_steps gradient_checkpointing highvram huber_c huber_scale huber_schedule "
    "huggingface_path_in_repo huggingface_repo_id huggingface_repo_type huggingface_repo_visibility huggingface_token "
    "ip_noise_gamma ip_noise_gamma_random_strength keep_tokens learning_rate log_config log_tracker_config "
    "log_tracker_name log_with logging_dir loss_type lr_scheduler lr_scheduler_args lr_scheduler_num_cycles "
    "lr_scheduler_power lr_scheduler_type lr_warmup_steps masked_loss max_bucket_reso max_data_loader_n_workers "
    "max_grad_norm max_timestep max_token_length max_train_epochs max_train_steps mem_eff_attn metadata_author "
    "metadata_description metadata_license metadata_tags metadata_title min_bucket_reso min_snr_gamma min_timestep "
    "mixed_precision multires_noise_discount multires_noise_iterations network_alpha network_dim network_dropout "
    "network_weights noise_offset noise_offset_random_strength optimizer_args output_dir output_name "
    "persistent_data_loader_workers pretrained_model_name_or_path prior_loss_weight random_crop reg_data_dir resume "
    "resume_from_huggingface sample_every_n_epochs sample_every_n_steps sample_sampler save_every_n_epochs "
    "save_every_n_steps save_last_n_epochs save_last_n_epochs_state save_last_n_steps save_last_n_steps_state "
    "save_model_as save_precision save_state save_state_on_train_end save_state_to_huggingface "
    "scale_v_pred_loss_like_noise_pred scale_weight_norms seed shuffle_caption skip_cache_check text_encoder_lr "
    "train_batch_size train_data_dir training_comment unet_lr v2 v_parameterization v_pred_like_loss vae "
    "vae_batch_size wandb_api_key wandb_run_name weighted_captions"
)
"""Settings that are passed on under the same name."""
_ARGUMENTS = sorted(
    {name for _, _, names in _KINDS.values() for name in names.split()} | {*_RATIOS.split(), "LyCORIS_preset"}
)
_TYPES: Mapping[str, Option] = {
    **{name: Option("text") for name in (*_RENAMED, *_ARGUMENTS, *" ".join(_NOTES.values()).split())},
    **{name: Option(OPTIONS[name].kind) for name in _PASSED.split()},
    **dict.fromkeys(("text_encoder_lr", "lr_warmup"), Option("number")),
    **dict.fromkeys(("sdxl", "sdxl_no_half_vae", "sdxl_cache_text_encoder_outputs"), Option("switch")),
    **dict.fromkeys(("additional_parameters", "noise_offset_type", "sample_prompts", "xformers"), Option("text")),
    **dict.fromkeys(_OTHER_MODELS, Option("switch")),
    "epoch": Option("whole"),
}
"""Its settings, whose defaults are in `_DEFAULTS`."""


def is_kohya_ss(data: Any) -> bool:
    """Return whether the data of a JSON file are settings of its LoRA page."""
    return isinstance(data, dict) and "LoRA_type" in data and "network_dim" in data


def read_kohya_ss(path: Path, moved: Moves = ()) -> ImportedJob:
    """Read a job from the settings that kohya_ss saved; paths are relative to the file.

    Raises JobError for other kinds of models and values of a wrong type, and ImpastoError and OSError for the files
    that it names.
    """
    stated: dict[str, Any] = read_json(path, "config")
    for name, model in _OTHER_MODELS.items():
        if stated.get(name) is True:
            sentence = f"Could not read {path}: it trains {model}, not SD 1.5 or SDXL."
            raise JobError("import.model", sentence, "Choose a file for SD 1.5 or SDXL.")
    gui = Translation(PROGRAM, {**_DEFAULTS, **stated}, _TYPES)
    extra = options_in((gui["additional_parameters"] or "").replace('"', "").split())
    options = {**_options(gui), **extra}
    family: Family = "sdxl" if gui["sdxl"] else "sd15"
    imported = read_options(options, path.parent, family, moved, prompts=gui["sample_prompts"])
    imported.found.restate(PROGRAM, stated, _origins(gui, extra), _TYPES)
    return imported


def _origins(gui: Translation, extra: Iterable[str]) -> dict[str, Origin]:
    """Return where the outcome of each setting comes from."""
    origins = {name: Origin(options=(name,)) for name in _PASSED.split()}
    origins |= {name: Origin(options=(option,)) for name, option in _RENAMED.items()}
    origins["additional_parameters"] = Origin(options=tuple(extra))
    origins["sample_prompts"] = Origin(options=("sample_sampler",))
    origins |= {name: Origin() for name in ("sdxl", "noise_offset_type", *_OTHER_MODELS)}
    origins["use_wandb"] = Origin(note="logging to wandb is not available")
    origins["xformers"] = Origin(options=("xformers", "sdpa"))
    used = {*_KINDS.get(gui["LoRA_type"], _KINDS["Standard"])[2].split(), *_RATIOS.split()}
    used |= {"LyCORIS_preset"} if gui["LoRA_type"].startswith("LyC") else set()
    for name in _ARGUMENTS:
        argument = _LYCORIS.get(name, name)
        origins[name] = Origin(argument=argument) if name in used else Origin(note="has no effect with this LoRA_type")
    for note, names in _NOTES.items():
        origins |= {name: Origin(note=note) for name in names.split()}
    return origins


def _options(gui: Translation) -> dict[str, Any]:
    """Return the options of sd-scripts that the GUI writes; 0, false and empty ones are left out, as there."""
    options = {name: gui[name] for name in _PASSED.split()}
    options |= {option: gui[name] for name, option in _RENAMED.items()}
    options |= _rates(gui) | _network(gui) | _length(gui)
    multires = gui["noise_offset_type"] == "Multires"
    unused = ("noise_offset", "noise_offset_random_strength", "adaptive_noise_scale") if multires else _MULTIRES
    options |= dict.fromkeys(unused)
    for name in ("optimizer_args", "lr_scheduler_args"):
        options[name] = [argument.replace('"', "") for argument in gui[name] or ()]
    for name in ("no_half_vae", "cache_text_encoder_outputs"):
        options[name] = gui["sdxl"] and gui[f"sdxl_{name}"]
    attention = (gui["xformers"] or "").lower()  # older files have a switch
    options |= {"xformers": attention in ("true", "xformers"), "sdpa": attention == "sdpa"}
    return {name: value for name, value in options.items() if value}


def _rates(gui: Translation) -> dict[str, Any]:
    """Return the rates: if only one of them is 0, its part is not trained; if both are, the common one is used."""
    encoder, unet = gui["text_encoder_lr"], gui["unet_lr"]
    return {
        "text_encoder_lr": [encoder, encoder] if encoder else None,
        "unet_lr": unet,
        "network_train_unet_only": bool(unet and not encoder),
        "network_train_text_encoder_only": bool(encoder and not unet),
    }


def _network(gui: Translation) -> dict[str, Any]:
    """Return the module and its arguments, which each kind of LoRA has of its own."""
    kind = gui["LoRA_type"]
    if kind not in _KINDS:
        return {"network_module": kind}
    module, algorithm, names = _KINDS[kind]
    arguments = {_LYCORIS.get(name, name): gui[name] for name in (*names.split(), *_RATIOS.split())}
    if algorithm:
        arguments |= {"algo": algorithm, "preset": gui["LyCORIS_preset"]}
    listed = [f"{name}={value}" for name, value in arguments.items() if value not in (None, "", "0", "0.0", "False")]
    return {"network_module": module, "network_args": listed}


def _length(gui: Translation) -> dict[str, Any]:
    """Return steps, epochs, warmup and cycles; without steps, the GUI counts those of its epochs."""
    steps, epochs = gui["max_train_steps"], gui["max_train_epochs"]
    if not steps and not gui["dataset_config"]:
        epochs = epochs or gui["epoch"]
    return {
        "max_train_epochs": epochs,
        "max_train_steps": steps,
        "lr_warmup_steps": int(gui["lr_warmup_steps"] or 0) or (gui["lr_warmup"] or 0) / 100,
        "lr_scheduler_num_cycles": gui["lr_scheduler_num_cycles"] or 1,
    }
