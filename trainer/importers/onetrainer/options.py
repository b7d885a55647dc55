"""The settings of OneTrainer's configurations, with their defaults, and those that leave the result as it is.

Names and defaults are those of `TrainConfig.default_values` and of the tables in it. Settings in tables have names with
a dot, such as unet.train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.importers.translation import Kind, Option

PROGRAM = "OneTrainer"
_OFF = (
    "debug_mode offline_mode tensorboard_expose tensorboard_always_on validation continue_last_backup "
    "prevent_overwrites multi_gpu force_circular_padding compile only_cache generalized_offset_noise "
    "rescale_noise_scheduler_to_zero_terminal_snr force_v_prediction force_epsilon_prediction "
    "dynamic_timestep_shifting unet.attention_mask unet.activation_offloading text_encoder.attention_mask "
    "text_encoder.activation_offloading text_encoder_2.attention_mask text_encoder_2.activation_offloading "
    "vae.attention_mask vae.activation_offloading masked_training normalize_masked_area_loss "
    "custom_conditioning_image layer_filter_regex preserve_embedding_norm lora_decompose "
    "lora_decompose_output_axis oft_block_share oft_scaled lokr_decompose_both lokr_use_tucker "
    "lokr_weight_decompose lokr_full_matrix rolling_backup"
)
_OFF_OF_OPTIMIZERS = (
    "adam_w_mode amsgrad bias_correction block_wise capturable centered decouple differentiable foreach "
    "fsdp_in_use fused fused_back_pass is_paged maximize nesterov no_prox relative_step safeguard_warmup "
    "scale_parameter use_bias_correction use_triton warmup_init decoupled_decay fixed_decay rectify "
    "degenerated_to_sgd ams_bound adanorm adam_debias cautious use_speed use_cautious use_grams use_adopt "
    "use_orthograd nnmf_factor orthogonal_gradient use_atan2 use_AdEMAMix Simplified_AdEMAMix kourkoutas_beta "
    "MuonWithAuxAdam muon_adam_regex normuon_variant low_rank_ortho accelerated_ns cautious_wd approx_mars "
    "auto_kappa_p compile"
)
_ON = (
    "tensorboard fused_gradient_reduce async_gradient_reduce async_offloading aspect_ratio_bucketing "
    "latent_caching clear_cache_before_training enable_autocast_cache unet.include unet.train "
    "unet.train_embedding unet.gradient_checkpointing text_encoder.include text_encoder.train "
    "text_encoder.train_embedding text_encoder.gradient_checkpointing text_encoder_2.include text_encoder_2.train "
    "text_encoder_2.train_embedding text_encoder_2.gradient_checkpointing vae.include vae.train "
    "vae.train_embedding vae.gradient_checkpointing lora_decompose_norm_epsilon bundle_additional_embeddings "
    "lokr_dora_on_output lokr_vec_trick samples_to_tensorboard non_ema_sampling backup_before_save"
)
_ON_OF_OPTIMIZERS = (
    "stochastic_rounding weight_decay_by_lr split_groups split_groups_mean factored factored_fp32 use_stableadamw "
    "d_limiter use_schedulefree rms_rescaling"
)
_NUMBERS = (
    "unet.learning_rate text_encoder.learning_rate text_encoder_2.learning_rate vae.stop_training_after "
    "vae.learning_rate embedding_learning_rate"
)
_NUMBERS_OF_OPTIMIZERS = (
    "alpha beta1 beta2 beta3 clip_threshold d0 d_coef dampening decay_rate eps eps2 growth_rate "
    "initial_accumulator_value initial_accumulator log_every lr_decay max_unorm min_8bit_size quant_block_size "
    "momentum optim_bits percentile_clipping r weight_decay weight_lr_power k xi n_sma_threshold slice_p "
    "prodigy_steps beta3_ema alpha_grad beta1_warmup min_beta1 schedulefree_c ns_steps muon_adam_lr "
    "muon_te1_adam_lr muon_te2_adam_lr beta2_normuon ortho_rank"
)
TABLES = (
    "concepts scheduler_params prior transformer unconditional_transformer quantization text_encoder_3 "
    "text_encoder_4 effnet_encoder decoder decoder_text_encoder decoder_vqgan embedding additional_embeddings "
    "cloud optimizer_defaults samples secrets "
    "optimizer.muon_adam_config"
)
"""Settings that are tables or lists: concepts and samples are read on their own, the others are for other models."""
# Former names, from the migrations of TrainConfig.
RENAMED = {
    "lora_layer_preset": "layer_filter_preset",
    "lora_layers": "layer_filter",
    "lora_layers_regex": "layer_filter_regex",
    "save_after": "save_every",
    "save_after_unit": "save_every_unit",
}
FORMER = (
    "__version enable_activation_offloading enable_async_offloading gradient_checkpointing layer_offload_fraction "
    "weight_dtype"
)
"""Settings of former versions that say how a model fits in memory, and the version of the file."""
_DEFAULTS: Mapping[Kind, Mapping[str, Any]] = {
    "whole": {
        "batch_size": 1,
        "ema_update_step_interval": 5,
        "epochs": 100,
        "gradient_accumulation_steps": 1,
        "lokr_decompose_factor": -1,
        "lokr_dim": 16,
        "lora_rank": 16,
        "oft_block_size": 32,
        "rolling_backup_count": 3,
        "text_encoder_2_layer_skip": 0,
        "text_encoder_layer_skip": 0,
    },
    "number": {
        "async_gradient_reduce_buffer": 100,
        "backup_after": 30,
        "clip_grad_norm": 1.0,
        "dataloader_threads": 2,
        "dropout_probability": 0.0,
        "ema_decay": 0.999,
        "huber_delta": 1.0,
        "huber_strength": 0.0,
        "learning_rate": 3e-06,
        "learning_rate_cycles": 1.0,
        "learning_rate_min_factor": 0.0,
        "learning_rate_warmup_steps": 200.0,
        "log_cosh_strength": 0.0,
        "lora_alpha": 1.0,
        "loss_weight_strength": 5.0,
        "mae_strength": 0.0,
        "masked_prior_preservation_weight": 0.0,
        "max_noising_strength": 1.0,
        "min_noising_strength": 0.0,
        "mse_strength": 1.0,
        "noising_bias": 0.0,
        "noising_weight": 0.0,
        "offset_noise_weight": 0.0,
        "perturbation_noise_weight": 0.0,
        "sample_after": 10,
        "sample_skip_first": 0,
        "save_every": 0,
        "save_skip_first": 0,
        "tensorboard_port": 6006,
        "text_encoder.dropout_probability": 0.0,
        "text_encoder.guidance_scale": 1.0,
        "text_encoder.offload_fraction": 0.0,
        "text_encoder.stop_training_after": 30,
        "text_encoder_2.dropout_probability": 0.0,
        "text_encoder_2.guidance_scale": 1.0,
        "text_encoder_2.offload_fraction": 0.0,
        "text_encoder_2.stop_training_after": 30,
        "text_encoder_2_sequence_length": 77,
        "text_encoder_3_layer_skip": 0,
        "text_encoder_4_layer_skip": 0,
        "text_encoder_sequence_length": 512,
        "timestep_shift": 1.0,
        "unet.dropout_probability": 0.0,
        "unet.guidance_scale": 1.0,
        "unet.offload_fraction": 0.0,
        "unet.stop_training_after": 0,
        "unmasked_probability": 0.1,
        "unmasked_weight": 0.1,
        "vae.dropout_probability": 0.0,
        "vae.guidance_scale": 1.0,
        "vae.offload_fraction": 0.0,
        "validate_after": 1,
        "vb_loss_strength": 1.0,
    },
    "text": {
        "attention_mechanism": "SDP",
        "backup_after_unit": "MINUTE",
        "base_model_name": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "cache_dir": "workspace-cache/run",
        "concept_file_name": "training_concepts/concepts.json",
        "debug_dir": "debug",
        "device_indexes": None,
        "ema": "OFF",
        "embedding_weight_dtype": "FLOAT_32",
        "fallback_train_dtype": "BFLOAT_16",
        "frames": "25",
        "gradient_reduce_precision": "FLOAT_32_STOCHASTIC",
        "huggingface_cache_dir": None,
        "include_train_config": "NONE",
        "layer_filter": None,
        "layer_filter_preset": "full",
        "learning_rate_scaler": "NONE",
        "learning_rate_scheduler": "CONSTANT",
        "lora_model_name": None,
        "lora_weight_dtype": "FLOAT_32",
        "loss_scaler": "NONE",
        "loss_weight_fn": "CONSTANT",
        "model_type": "STABLE_DIFFUSION_15",
        "optimizer.optimizer": "ADAMW",
        "output_dtype": "FLOAT_32",
        "output_model_destination": "models/model.safetensors",
        "output_model_format": "SAFETENSORS",
        "peft_type": "LORA",
        "resolution": "512",
        "sample_after_unit": "MINUTE",
        "sample_audio_format": "MP3",
        "sample_definition_file_name": "training_samples/samples.json",
        "sample_image_format": "JPG",
        "sample_video_format": "MP4",
        "save_every_unit": "NEVER",
        "save_filename_prefix": None,
        "temp_device": "cpu",
        "text_encoder.model_name": None,
        "text_encoder.stop_training_after_unit": "EPOCH",
        "text_encoder.weight_dtype": "FLOAT_32",
        "text_encoder_2.model_name": None,
        "text_encoder_2.stop_training_after_unit": "EPOCH",
        "text_encoder_2.weight_dtype": "FLOAT_32",
        "timestep_distribution": "UNIFORM",
        "train_device": "cuda",
        "train_dtype": "FLOAT_16",
        "training_method": "FINE_TUNE",
        "unet.model_name": None,
        "unet.stop_training_after_unit": "NEVER",
        "unet.weight_dtype": "FLOAT_32",
        "vae.model_name": None,
        "vae.stop_training_after_unit": "NEVER",
        "vae.weight_dtype": "FLOAT_32",
        "validate_after_unit": "EPOCH",
        "workspace_dir": "workspace/run",
    },
    "switch": {
        **dict.fromkeys(_OFF.split(), False),
        **dict.fromkeys(_ON.split(), True),
        **{f"optimizer.{name}": False for name in _OFF_OF_OPTIMIZERS.split()},
        **{f"optimizer.{name}": True for name in _ON_OF_OPTIMIZERS.split()},
    },
}
_WITHOUT_DEFAULT: Mapping[str, Kind] = {
    **dict.fromkeys(_NUMBERS.split(), "number"),
    **{f"optimizer.{name}": "number" for name in _NUMBERS_OF_OPTIMIZERS.split()},
    **dict.fromkeys((*TABLES.split(), *FORMER.split()), "text"),
    "custom_learning_rate_scheduler": "text",
    "optimizer.muon_hidden_layers": "text",
}
OPTIONS: Mapping[str, Option] = {
    **{name: Option(kind, default) for kind, defaults in _DEFAULTS.items() for name, default in defaults.items()},
    **{name: Option(kind) for name, kind in _WITHOUT_DEFAULT.items()},
}
"""Every setting of a configuration."""

# Settings that change how OneTrainer computes the same, and what happens here.
CHOSEN_HERE = {
    "a plan for your GPU chooses this, and the result stays the same": (
        "train_dtype fallback_train_dtype enable_autocast_cache async_offloading compile temp_device train_device "
        "multi_gpu device_indexes gradient_reduce_precision fused_gradient_reduce async_gradient_reduce "
        "async_gradient_reduce_buffer unet.gradient_checkpointing unet.offload_fraction unet.activation_offloading "
        "text_encoder.gradient_checkpointing text_encoder.offload_fraction text_encoder.activation_offloading "
        "text_encoder_2.gradient_checkpointing text_encoder_2.offload_fraction text_encoder_2.activation_offloading "
        "vae.gradient_checkpointing vae.offload_fraction vae.activation_offloading text_encoder.weight_dtype "
        f"text_encoder_2.weight_dtype {FORMER}"
    ),
    "the fastest attention is measured on your GPU": "attention_mechanism",
    "latents and encoded captions are always cached on disk, in one folder for all runs": (
        "latent_caching clear_cache_before_training cache_dir huggingface_cache_dir"
    ),
    "loader threads are added as training needs them": "dataloader_threads",
    "the LoRA's weights are kept in fp32": "lora_weight_dtype",
    "previews are .png files in the run's folder": "sample_image_format samples_to_tensorboard",
    "runs are in the folder runs beside the job": "workspace_dir",
    "a checkpoint is written before the run ends": "backup_before_save",
}
# Settings that do nothing for a LoRA of SD 1.5 or SDXL.
WITHOUT_EFFECT = (
    "prior transformer unconditional_transformer text_encoder_3 text_encoder_3_layer_skip text_encoder_4 "
    "text_encoder_4_layer_skip effnet_encoder decoder decoder_text_encoder decoder_vqgan quantization frames "
    "sample_video_format sample_audio_format vb_loss_strength dynamic_timestep_shifting embedding_weight_dtype "
    "embedding_learning_rate preserve_embedding_norm embedding text_encoder_sequence_length "
    "text_encoder_2_sequence_length optimizer_defaults tensorboard_expose tensorboard_always_on tensorboard_port "
    "unet.model_name unet.include unet.train_embedding unet.attention_mask unet.guidance_scale "
    "unet.dropout_probability text_encoder.model_name text_encoder.include text_encoder.train_embedding "
    "text_encoder.attention_mask text_encoder.guidance_scale text_encoder_2.model_name text_encoder_2.include "
    "text_encoder_2.train_embedding text_encoder_2.attention_mask text_encoder_2.guidance_scale vae.include vae.train "
    "vae.train_embedding vae.attention_mask vae.guidance_scale vae.dropout_probability vae.stop_training_after "
    "vae.stop_training_after_unit vae.learning_rate debug_dir offline_mode output_model_format "
    "bundle_additional_embeddings lokr_dora_on_output lokr_vec_trick"
)
# Each counts as unavailable only if it is not what it is by default.
UNAVAILABLE = {
    "uploading to other computers is not available; copy the job there": "cloud",
    "sign in to Hugging Face in the app instead": "secrets",
    "training embeddings is not available": "additional_embeddings",
    "checkpoints of OneTrainer cannot be resumed; continue from its LoRA with base.continue_from": (
        "continue_last_backup"
    ),
    "a run never overwrites another": "prevent_overwrites",
    "a run's folder has its whole job": "include_train_config",
    "only for looking at what is trained": "debug_mode only_cache",
    "images that tile are not available": "force_circular_padding",
    "conditioning images are not available": "custom_conditioning_image",
    "a prior outside masks is not available; concepts of the type PRIOR_PREDICTION are": (
        "masked_prior_preservation_weight"
    ),
    "noise_offset is the same at all timesteps here": "generalized_offset_noise",
    "no code of others is run": "custom_learning_rate_scheduler scheduler_params",
    "LoKr has one form here, that of LyCORIS without these": (
        "lokr_decompose_both lokr_use_tucker lokr_weight_decompose lokr_full_matrix"
    ),
    "OFT has one form here, that of LyCORIS without these": "oft_block_share oft_scaled",
    "each norm of DoRA is that of whole outputs": "lora_decompose_output_axis",
    "DoRA's norm has no epsilon": "lora_decompose_norm_epsilon",
    "previews and saved files start with the first interval": "sample_skip_first save_skip_first",
    "previews show the average, if there is one": "non_ema_sampling",
}
HARMLESS_ARGUMENTS = (
    "block_wise capturable compile differentiable factored_fp32 foreach fsdp_in_use fused fused_back_pass log_every "
    "min_8bit_size optim_bits quant_block_size stochastic_rounding use_triton"
)
"""Arguments of optimizers that change how fast or in how much memory a step is made."""
