"""The options of sd-scripts' train_network.py and sdxl_train_network.py, and those that leave the result as it is.

Names, types and defaults are those of their argument parsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.importers.translation import Kind, Option

PROGRAM = "sd-scripts"
_SWITCHES = (
    "alpha_mask async_upload bucket_no_upscale cache_info cache_latents cache_latents_to_disk "
    "cache_text_encoder_outputs cache_text_encoder_outputs_to_disk color_aug cpu_offload_checkpointing "
    "ddp_gradient_as_bucket_view ddp_static_graph debiased_estimation_loss debug_dataset deepspeed dim_from_weights "
    "disable_mmap_load_safetensors enable_bucket enable_wildcard flip_aug fp16_master_weights_and_gradients fp8_base "
    "fp8_base_unet full_bf16 full_fp16 fused_backward_pass gradient_checkpointing highvram "
    "ip_noise_gamma_random_strength log_config lowram masked_loss mem_eff_attn network_train_text_encoder_only "
    "network_train_unet_only no_half_vae no_metadata noise_offset_random_strength output_config "
    "persistent_data_loader_workers random_crop resume_from_huggingface sample_at_first save_state "
    "save_state_on_train_end save_state_to_huggingface scale_v_pred_loss_like_noise_pred sdpa shuffle_caption "
    "skip_cache_check skip_until_initial_step torch_compile use_8bit_adam use_lion_optimizer v2 "
    "v_parameterization weighted_captions xformers zero3_init_flag zero3_save_16bit_model zero_terminal_snr"
)
_DEFAULTS: Mapping[Kind, Mapping[str, Any]] = {
    "whole": {
        "bucket_reso_steps": 64,
        "caption_dropout_every_n_epochs": 0,
        "clip_skip": None,
        "dataset_repeats": 1,
        "ddp_timeout": None,
        "gradient_accumulation_steps": 1,
        "initial_epoch": None,
        "initial_step": None,
        "keep_tokens": 0,
        "lr_scheduler_num_cycles": 1,
        "lr_scheduler_timescale": None,
        "max_bucket_reso": 1024,
        "max_data_loader_n_workers": 8,
        "max_timestep": None,
        "max_token_length": None,
        "max_train_epochs": None,
        "max_train_steps": 1600,
        "max_validation_steps": None,
        "min_bucket_reso": 256,
        "min_timestep": None,
        "multires_noise_iterations": None,
        "network_dim": None,
        "sample_every_n_epochs": None,
        "sample_every_n_steps": None,
        "save_every_n_epochs": None,
        "save_every_n_steps": None,
        "save_last_n_epochs": None,
        "save_last_n_epochs_state": None,
        "save_last_n_steps": None,
        "save_last_n_steps_state": None,
        "save_n_epoch_ratio": None,
        "seed": None,
        "token_warmup_min": 1,
        "train_batch_size": 1,
        "vae_batch_size": 1,
        "validate_every_n_epochs": None,
        "validate_every_n_steps": None,
        "validation_seed": None,
        "zero_stage": 2,
    },
    "number": {
        "adaptive_noise_scale": None,
        "caption_dropout_rate": 0.0,
        "caption_tag_dropout_rate": 0.0,
        "huber_c": 0.1,
        "huber_scale": 1.0,
        "ip_noise_gamma": None,
        "learning_rate": 2e-6,
        "lr_decay_steps": 0,
        "lr_scheduler_min_lr_ratio": None,
        "lr_scheduler_power": 1.0,
        "lr_warmup_steps": 0,
        "max_grad_norm": 1.0,
        "min_snr_gamma": None,
        "multires_noise_discount": 0.3,
        "network_alpha": 1.0,
        "network_dropout": None,
        "noise_offset": None,
        "prior_loss_weight": 1.0,
        "scale_weight_norms": None,
        "token_warmup_step": 0.0,
        "unet_lr": None,
        "v_pred_like_loss": None,
        "validation_split": 0.0,
    },
    "text": {
        "caption_extension": ".caption",
        "caption_extention": None,
        "caption_prefix": None,
        "caption_separator": ",",
        "caption_suffix": None,
        "conditioning_data_dir": None,
        "config_file": None,
        "dataset_class": None,
        "dataset_config": None,
        "dynamo_backend": "inductor",
        "face_crop_aug_range": None,
        "huber_schedule": "snr",
        "huggingface_path_in_repo": None,
        "huggingface_repo_id": None,
        "huggingface_repo_type": None,
        "huggingface_repo_visibility": None,
        "huggingface_token": None,
        "in_json": None,
        "keep_tokens_separator": "",
        "log_prefix": None,
        "log_tracker_config": None,
        "log_tracker_name": None,
        "log_with": None,
        "logging_dir": None,
        "loss_type": "l2",
        "lr_scheduler": "constant",
        "lr_scheduler_type": None,
        "mixed_precision": "no",
        "network_module": None,
        "network_weights": None,
        "offload_optimizer_device": None,
        "offload_optimizer_nvme_path": None,
        "offload_param_device": None,
        "offload_param_nvme_path": None,
        "optimizer_type": "",
        "output_dir": None,
        "output_name": None,
        "pretrained_model_name_or_path": None,
        "reg_data_dir": None,
        "resize_interpolation": None,
        "resolution": None,
        "resume": None,
        "sample_prompts": None,
        "sample_sampler": "ddim",
        "save_model_as": "safetensors",
        "save_precision": None,
        "secondary_separator": None,
        "tokenizer_cache_dir": None,
        "train_data_dir": None,
        "training_comment": None,
        "vae": None,
        "wandb_api_key": None,
        "wandb_run_name": None,
        "metadata_author": None,
        "metadata_description": None,
        "metadata_license": None,
        "metadata_tags": None,
        "metadata_title": None,
        "metadata_usage_hint": None,
        "metadata_thumbnail": None,
        "metadata_merged_from": None,
        "metadata_trigger_phrase": None,
        "metadata_preprocessor": None,
        "metadata_is_negative_embedding": None,
    },
    "list": {
        "base_weights": (),
        "lr_scheduler_args": (),
        "network_args": (),
        "optimizer_args": (),
    },
    "numbers": {"base_weights_multiplier": None, "text_encoder_lr": None},
    "switch": dict.fromkeys(_SWITCHES.split(), False),
}
OPTIONS: Mapping[str, Option] = {
    name: Option(kind, default) for kind, defaults in _DEFAULTS.items() for name, default in defaults.items()
}
"""Every option of the two programs."""

# Settings that change how fast or in how much memory sd-scripts computes the same, and what happens here.
CHOSEN_HERE = {
    "a plan for your GPU chooses this, and the result stays the same": (
        "cpu_offload_checkpointing gradient_checkpointing highvram lowram mixed_precision cache_latents "
        "cache_text_encoder_outputs vae_batch_size fused_backward_pass skip_cache_check deepspeed zero_stage "
        "offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path "
        "zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients disable_mmap_load_safetensors"
    ),
    "the fastest attention is measured on your GPU": "xformers sdpa mem_eff_attn",
    "latents and encoded captions are always cached on disk": (
        "cache_latents_to_disk cache_text_encoder_outputs_to_disk cache_info"
    ),
    "loader threads are added as training needs them": "max_data_loader_n_workers persistent_data_loader_workers",
    "the LoRA's weights are kept in fp32, which is more precise and takes a few MB more": "full_fp16 full_bf16",
    "checkpoints to resume from are always written; fit their number with report.saving": (
        "save_state save_state_on_train_end save_last_n_epochs_state save_last_n_steps_state"
    ),
    "images are resized with the filter that suits the direction": "resize_interpolation",
    "the vocabulary is part of Impasto": "tokenizer_cache_dir",
}
UNAVAILABLE = {
    "uploading is not available; share the file from the run's folder": (
        "async_upload huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_repo_visibility "
        "huggingface_token resume_from_huggingface save_state_to_huggingface"
    ),
    "logging to wandb is not available; report.tensorboard writes TensorBoard files": (
        "wandb_api_key wandb_run_name log_tracker_config log_tracker_name log_prefix log_config"
    ),
    "training on several GPUs is not available": "ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph",
    "states of sd-scripts cannot be resumed; continue from its LoRA with base.continue_from": (
        "resume initial_epoch initial_step skip_until_initial_step"
    ),
    "merging LoRAs into the base before training is not available; merge them into a checkpoint first": (
        "base_weights base_weights_multiplier"
    ),
    "no code of others is run": "dataset_class",
    "set crops in the app instead": "face_crop_aug_range",
    "only for looking at a dataset; `check` shows it": "debug_dataset output_config",
    "the file says what it was trained on and by which settings": (
        "no_metadata metadata_tags metadata_usage_hint metadata_thumbnail metadata_merged_from metadata_preprocessor "
        "metadata_is_negative_embedding metadata_trigger_phrase metadata_title"
    ),
    "SD 2 cannot be trained": "v2",
    "compiling is experimental here: set fit.compile": "torch_compile dynamo_backend",
    "validation takes all images that are held out": "max_validation_steps validation_seed",
}
PATHS = (
    "conditioning_data_dir",
    "dataset_config",
    "in_json",
    "network_weights",
    "output_dir",
    "pretrained_model_name_or_path",
    "reg_data_dir",
    "sample_prompts",
    "train_data_dir",
    "vae",
)
"""Options whose values are paths on the PC that the file comes from."""
