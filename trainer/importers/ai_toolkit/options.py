"""The settings of ai-toolkit's jobs, with their defaults, and those that leave the result as it is.

Names and defaults are those of the classes in toolkit/config_modules.py. Settings of a process have their table before
their name, such as train.lr.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.importers.translation import Kind, Option

PROGRAM = "ai-toolkit"
TABLES = ("train", "network", "model", "save", "sample", "logging")
_READ: Mapping[Kind, Mapping[str, Any]] = {
    "whole": {
        "network.conv": None,
        "network.linear": None,
        "network.lokr_factor": -1,
        "network.rank": None,
        "sample.height": 512,
        "sample.sample_every": 100,
        "sample.sample_steps": 20,
        "sample.seed": 0,
        "sample.width": 512,
        "save.max_step_saves_to_keep": 5,
        "save.save_every": 1000,
        "train.batch_size": 1,
        "train.gradient_accumulation": 1,
        "train.gradient_accumulation_steps": 1,
        "train.max_denoising_steps": 999,
        "train.min_denoising_steps": 0,
        "train.steps": 1000,
        "training_seed": None,
    },
    "number": {
        "network.alpha": 1.0,
        "network.conv_alpha": None,
        "network.dropout": None,
        "network.linear_alpha": None,
        "sample.guidance_scale": 7,
        "train.ema_config.ema_decay": 0.999,
        "train.lr": 1e-6,
        "train.max_grad_norm": 1.0,
        "train.min_snr_gamma": None,
        "train.noise_offset": 0.0,
        "train.reg_weight": 1.0,
        "train.text_encoder_lr": None,
        "train.unet_lr": None,
    },
    "text": {
        "config.name": None,
        "model.arch": None,
        "model.lora_path": None,
        "model.name_or_path": None,
        "model.qtype": "qfloat8",
        "model.vae_path": None,
        "network.pretrained_lora_path": None,
        "network.type": "lora",
        "sample.neg": None,
        "sample.sampler": "ddpm",
        "save.dtype": "float16",
        "train.content_or_style": "balanced",
        "train.loss_type": "mse",
        "train.lr_scheduler": "constant",
        "train.noise_scheduler": "ddpm",
        "train.optimizer": "adamw",
        "trigger_word": None,
        "type": None,
    },
    "switch": {
        "model.is_v_pred": False,
        "model.is_xl": False,
        "model.quantize": False,
        "network.lokr_full_rank": True,
        "sample.walk_seed": False,
        "train.disable_sampling": False,
        "train.ema_config.use_ema": False,
        "train.force_first_sample": False,
        "train.skip_first_sample": False,
        "train.train_text_encoder": False,
        "train.train_unet": True,
    },
}
# Tables and lists, read on their own; a setting in the first three has its name behind the table's.
OPEN_TABLES = ("train.optimizer_params", "train.lr_scheduler_params", "network.network_kwargs")
LISTS = ("datasets", "sample.prompts", "sample.samples")

# Settings that change how ai-toolkit computes the same, and what happens here.
CHOSEN_HERE = {
    "a plan for your GPU chooses this, and the result stays the same": (
        "device model.compile model.block_compile model.cache_size_limit model.compile_dynamic model.compile_fullgraph "
        "model.compile_mode model.auto_memory model.dtype model.layer_offloading "
        "model.layer_offloading_text_encoder_percent model.layer_offloading_transformer_percent model.low_vram "
        "model.quantize_kwargs model.quantize_te model.qtype_te model.split_model_other_module_param_count_scale "
        "model.split_model_over_gpus model.te_device model.te_dtype model.text_encoder_bits model.vae_device "
        "model.vae_dtype network.layer_offloading train.dtype train.gradient_checkpointing train.single_item_batching "
        "train.unload_text_encoder train.cache_text_embeddings"
    ),
    "the fastest attention is measured on your GPU": "train.xformers train.sdp train.attention_backend",
    "runs are in the folder runs beside the job, with their logs": (
        "training_folder log_dir performance_log_every sqlite_db_path logging.log_every logging.verbose "
        "logging.use_ui_logger logging.project_name logging.run_name"
    ),
    "previews are .png files in the run's folder": "sample.format",
}
# Settings that do nothing for a LoRA of SD 1.5 or SDXL.
WITHOUT_EFFECT = (
    "job meta model.attn_masking model.extras_name_or_path model.in_context model.inference_lora_path "
    "model.is_auraflow model.is_flux model.is_lumina2 model.is_pixart model.is_pixart_sigma model.is_ssd model.is_v2 "
    "model.is_v3 model.is_vega model.model_kwargs model.model_paths model.te_name_or_path model.unet_sample_size "
    "model.use_flux_cfg model.latent_space_version network.old_lokr_format network.split_multistage_loras "
    "network.transformer_only sample.adapter_conditioning_scale sample.do_cfg_norm sample.extra_values sample.fps "
    "sample.num_frames sample.refiner_start_at torch_profiler train.adapter_lr train.audio_loss_multiplier "
    "train.bypass_guidance_embedding train.embedding_lr train.linear_timesteps train.linear_timesteps2 "
    "train.max_loss_debug train.refiner_lr train.switch_boundary_every train.timestep_type train.train_refiner "
    "train.next_sample_timesteps lorm_extract_mode lorm_extract_mode_param"
)
# Unless it has the value here, which is its default, each of these is unavailable for the reason above it.
_UNAVAILABLE: Mapping[str, Mapping[str, Any]] = {
    "uploading is not available; share the file from the run's folder": {
        "save.push_to_hub": False,
        "save.hf_repo_id": None,
        "save.hf_private": False,
    },
    "logging to wandb is not available; report.tensorboard writes TensorBoard files": {"logging.use_wandb": False},
    "only LoRAs are trained": {
        "adapter": None,
        "decorator": None,
        "do_lorm": False,
        "embedding": None,
        "guidance": None,
        "network.all_layers": False,
        "network.lorm": None,
        "slider": None,
        "train.adapter_assist_name_or_path": None,
        "train.adapter_assist_type": "t2i",
        "train.match_adapter_assist": False,
        "train.match_adapter_chance": 0.0,
    },
    "merging LoRAs into the base is not available; merge them into a checkpoint first": {
        "model.accuracy_recovery_adapter": None,
        "model.assistant_lora_path": None,
        "model.unconditional_lora_path": None,
        "train.merge_network_on_save": False,
        "train.merge_network_on_save_strength": 1.0,
    },
    "the base is one file or folder": {
        "model.experimental_xl": False,
        "model.refiner_name_or_path": None,
        "model.refiner_start_at": 0.5,
        "model.unet_path": None,
        "model.use_text_encoder_1": True,
        "model.use_text_encoder_2": True,
    },
    "select layers with network.network_kwargs or recipe.blocks": {
        "model.ignore_if_contains": None,
        "model.only_if_contains": None,
    },
    "LoRAs are saved as .safetensors, which every program loads; output.diffusers adds diffusers' format": {
        "save.save_format": "safetensors"
    },
    "previews show the LoRA at full strength": {"sample.network_multiplier": 1, "sample.guidance_rescale": 0.0},
    "previews start before the first step or after the first interval": {
        "first_sample": None,
        "sample.sample_start_step": 0,
    },
    "a run starts at step 0; continue from a LoRA with base.continue_from": {"train.start_step": None},
    "dropout of captions is set for each folder": {"train.prompt_dropout_prob": 0.0},
    "the average is saved beside the LoRA and does not change it": {
        "train.ema_config.param_multiplier": 1.0,
        "train.ema_config.use_feedback": False,
    },
    "recipe.objective.min_snr_gamma is the closest": {"train.snr_gamma": None, "train.learnable_snr_gos": False},
    "a set of images of the class with prior_prediction is the closest": {
        "train.blank_prompt_preservation": False,
        "train.blank_prompt_preservation_multiplier": 1.0,
        "train.diff_output_preservation": False,
        "train.diff_output_preservation_class": "",
        "train.diff_output_preservation_multiplier": 1.0,
        "train.inverted_mask_prior": False,
        "train.inverted_mask_prior_multiplier": 0.5,
    },
    "the validation loss is computed on images that are held out: set dataset.validation_share": {
        "train.validation_config": None
    },
    "this experiment with noise, latents or the loss is not available": {
        "train.adaptive_scaling_factor": False,
        "train.batch_noise_correction_scale": 0.1,
        "train.blended_blur_noise": False,
        "train.cfg_rescale": None,
        "train.cfg_scale": 1.0,
        "train.correct_pred_norm": False,
        "train.correct_pred_norm_multiplier": 1.0,
        "train.differential_guidance_scale": 3.0,
        "train.diffusion_feature_extractor_path": None,
        "train.diffusion_feature_extractor_weight": None,
        "train.do_batch_noise_correction": False,
        "train.do_blank_stabilization": False,
        "train.do_cfg": False,
        "train.do_differential_guidance": False,
        "train.do_fft_loss": False,
        "train.do_fft_velocity_equiv_weight": False,
        "train.do_guidance_loss": False,
        "train.do_guidance_loss_cfg_zero": False,
        "train.do_paramiter_swapping": False,
        "train.do_prior_divergence": False,
        "train.do_random_cfg": False,
        "train.do_signal_amplification": False,
        "train.do_signal_correction_noise": False,
        "train.dynamic_noise_offset": False,
        "train.force_consistent_noise": False,
        "train.free_u": False,
        "train.guidance_loss_schedule": "constant",
        "train.guidance_loss_target": 3.0,
        "train.img_multiplier": 1.0,
        "train.latent_feature_extractor_path": None,
        "train.latent_feature_loss_weight": 1.0,
        "train.latent_multiplier": 1.0,
        "train.loss_target": "noise",
        "train.match_noise_norm": False,
        "train.max_cfg_scale": None,
        "train.max_loss": None,
        "train.max_negative_prompts": 1,
        "train.negative_prompt": None,
        "train.noise_multiplier": 1.0,
        "train.noisy_latent_multiplier": 1.0,
        "train.num_train_timesteps": 1000,
        "train.optimal_noise_pairing_samples": 1,
        "train.paramiter_swapping_factor": 0.1,
        "train.pred_scaler": 1.0,
        "train.prompt_saturation_chance": 0.0,
        "train.random_noise_multiplier": 0.0,
        "train.random_noise_shift": 0.0,
        "train.short_and_long_captions": False,
        "train.short_and_long_captions_encoder_split": False,
        "train.show_turbo_outputs": False,
        "train.signal_amplification_strength": 0.5,
        "train.signal_correction_noise_scale": 1.0,
        "train.standardize_images": False,
        "train.standardize_latents": False,
        "train.t0_loss_target": False,
        "train.t0_velocity_equiv_weight": False,
        "train.target_noise_multiplier": 1.0,
        "train.target_norm_std": None,
        "train.target_norm_std_value": 1.0,
        "train.train_turbo": False,
        "train.unconditional_prompt": "",
        "train.weight_jitter": 0.0,
    },
}
UNAVAILABLE: Mapping[str, tuple[str, Any]] = {
    name: (note, default) for note, names in _UNAVAILABLE.items() for name, default in names.items()
}
"""Why each of these is unavailable, and the value with which it is off."""
_OTHERS = " ".join((*CHOSEN_HERE.values(), WITHOUT_EFFECT, *UNAVAILABLE, *LISTS)).split()
OPTIONS: Mapping[str, Option] = {
    **{name: Option("text") for name in _OTHERS},
    **{name: Option(kind, default) for kind, defaults in _READ.items() for name, default in defaults.items()},
}
"""Every setting of a job, except those in open tables."""
