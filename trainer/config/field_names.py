"""What kohya's sd-scripts, OneTrainer, ai-toolkit and diffusers call our job settings; the only such table.

It is used for keys of `--set`, the search of the window's form, messages about unknown keys ("did you mean
recipe.rank?") and imported metadata. A name may belong to several settings; the first one in the table is suggested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer.config.optimizers.kinds import OPTIMIZERS

FIELD_NAMES: Mapping[str, tuple[str, ...]] = {
    "name": ("output_name", "save_filename_prefix", "lora_name"),
    "base.model": ("pretrained_model_name_or_path", "base_model_name", "base_model", "checkpoint", "sd_model_name"),
    "base.family": ("model_type", "sdxl", "v2"),
    "base.prediction": ("v_parameterization", "prediction_type", "v_prediction"),
    "base.zero_terminal_snr": ("rescale_betas_zero_snr", "zsnr", "rescale_noise_scheduler_to_zero_terminal_snr"),
    "base.vae": ("vae_path", "pretrained_vae_model_name_or_path", "vae_override"),
    "base.revision": ("model_revision",),
    "base.continue_from": ("network_weights", "lora_model_name", "dim_from_weights", "pretrained_lora"),
    "dataset.folders": ("concepts", "datasets", "subsets"),
    "dataset.folders.*.path": ("image_dir", "train_data_dir", "instance_data_dir", "dataset_name", "in_json"),
    "dataset.folders.*.kind": ("is_reg", "reg_data_dir", "class_data_dir", "with_prior_preservation"),
    "dataset.folders.*.repeats": ("num_repeats", "dataset_repeats", "balancing"),
    "dataset.folders.*.recursive": ("include_subdirectories",),
    "dataset.folders.*.trigger": ("trigger_word", "activation_text", "instance_prompt"),
    "dataset.folders.*.class_words": ("class_tokens", "class_prompt"),
    "dataset.folders.*.mask_folder": ("conditioning_data_dir",),
    "dataset.folders.*.weight": ("loss_weight",),
    "dataset.caption_sources": ("caption_extension", "caption_ext", "prompt_source"),
    "dataset.masks": ("masked_training", "masked_loss", "alpha_mask"),
    "dataset.validation_share": ("validation_split",),
    "recipe.adapter": ("network_module", "training_method", "peft_type", "algo", "lycoris"),
    "recipe.layers": ("target_modules", "layer_filter", "lora_layers"),
    "recipe.rank": ("network_dim", "lora_rank", "dim", "r", "lora_dim"),
    "recipe.alpha": ("network_alpha", "lora_alpha"),
    "recipe.rank_stabilized": ("use_rslora", "rs_lora", "rslora"),
    "recipe.conv_rank": ("conv_dim", "network_conv_dim"),
    "recipe.conv_alpha": ("network_conv_alpha",),
    "recipe.learning_rate": ("unet_lr", "lr", "unet_learning_rate"),
    "recipe.blocks": ("block_dims", "block_lr_weight", "network_reg_dims", "network_reg_lrs", "layer_rank"),
    "recipe.blocks.*.rate_factor": ("down_lr_weight", "mid_lr_weight", "up_lr_weight"),
    "recipe.lora_plus_ratio": ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"),
    "recipe.text_encoder.learning_rate": (
        "text_encoder_lr", "text_encoder_lr1", "te_lr", "train_text_encoder", "network_train_unet_only",
        "learning_rate_te1", "learning_rate_te",
    ),
    "recipe.text_encoder.rank": ("text_encoder_dim", "te_rank"),
    "recipe.text_encoder.alpha": ("text_encoder_alpha", "te_alpha"),
    "recipe.text_encoder.stop_after": ("stop_training_after", "stop_text_encoder_training", "stop_after_steps"),
    "recipe.text_encoder_2.learning_rate": ("text_encoder_lr2", "learning_rate_te2", "te2_lr"),
    "recipe.dropout": ("network_dropout", "lora_dropout", "dropout_probability"),
    "recipe.optimizer.name": ("optimizer_type", "use_8bit_adam", "use_lion_optimizer", "optimizer_name"),
    "recipe.optimizer.beta1": ("adam_beta1", "betas"),
    "recipe.optimizer.beta2": ("adam_beta2",),
    "recipe.optimizer.eps": ("adam_epsilon", "epsilon"),
    "recipe.optimizer.weight_decay": ("adam_weight_decay",),
    "recipe.optimizer.d_coef": ("d_coefficient", "prodigy_d_coef"),
    "recipe.optimizer.safeguard_warmup": ("prodigy_safeguard_warmup",),
    "recipe.optimizer.bias_correction": ("use_bias_correction", "prodigy_use_bias_correction"),
    "recipe.schedule.kind": ("lr_scheduler", "learning_rate_scheduler", "scheduler", "lr_scheduler_type"),
    "recipe.schedule.warmup": ("lr_warmup_steps", "learning_rate_warmup_steps", "warmup_ratio", "lr_warmup_ratio"),
    "recipe.schedule.end": ("lr_scheduler_min_lr_ratio", "learning_rate_min_factor", "min_lr"),
    "recipe.schedule.cycles": ("lr_scheduler_num_cycles", "lr_num_cycles", "learning_rate_cycles", "num_cycles"),
    "recipe.schedule.power": ("lr_scheduler_power", "lr_power"),
    "recipe.schedule.timescale": ("lr_scheduler_timescale",),
    "recipe.schedule.decay": ("lr_decay_steps", "num_decay_steps"),
    "recipe.steps": ("max_train_steps", "max_steps", "total_steps"),
    "recipe.epochs": ("max_train_epochs", "num_train_epochs", "num_epochs"),
    "recipe.images_seen": ("samples_seen",),
    "recipe.effective_batch": ("train_batch_size", "batch_size", "gradient_accumulation_steps", "total_batch_size"),
    "recipe.max_grad_norm": ("clip_grad_norm", "gradient_clipping"),
    "recipe.max_weight_norm": ("scale_weight_norms",),
    "recipe.ema_decay": ("ema", "use_ema", "ema_config"),
    "recipe.clip_skip": ("text_encoder_layer_skip", "clip_skip_layers"),
    "recipe.token_chunks": ("max_token_length", "tokenizer_max_length"),
    "recipe.weighted_captions": (),
    "recipe.resolution": ("reso", "image_size"),
    "recipe.images.buckets": ("enable_bucket", "aspect_ratio_bucketing"),
    "recipe.images.bucket_step": ("bucket_reso_steps", "aspect_ratio_bucketing_quantization"),
    "recipe.images.bucket_min": ("min_bucket_reso",),
    "recipe.images.bucket_max": ("max_bucket_reso",),
    "recipe.images.max_upscale": ("bucket_no_upscale",),
    "recipe.images.crop": ("random_crop", "center_crop", "enable_crop_jitter"),
    "recipe.images.rotation": ("random_rotate_max_angle", "enable_random_rotate", "random_rotate"),
    "recipe.images.color_jitter": ("color_aug", "color_augmentation"),
    "recipe.images.flip": ("flip_aug", "random_flip", "enable_random_flip"),
    "recipe.captions.prefix": ("caption_prefix",),
    "recipe.captions.suffix": ("caption_suffix",),
    "recipe.captions.separator": ("caption_separator", "tag_delimiter"),
    "recipe.captions.shuffle": ("shuffle_caption", "enable_tag_shuffling", "shuffle_tags"),
    "recipe.captions.keep_tokens": ("keep_tags_count", "keep_tags"),
    "recipe.captions.keep_separator": ("keep_tokens_separator",),
    "recipe.captions.secondary_separator": (),
    "recipe.captions.dropout": ("caption_dropout_rate", "proportion_empty_prompts", "caption_dropout"),
    "recipe.captions.dropout_every_epochs": ("caption_dropout_every_n_epochs",),
    "recipe.captions.token_warmup_step": (),
    "recipe.captions.token_warmup_min": (),
    "recipe.captions.tag_dropout": ("caption_tag_dropout_rate", "tag_dropout_probability"),
    "recipe.captions.wildcards": ("enable_wildcard",),
    "recipe.objective.loss_mix": ("mse_strength", "mae_strength", "log_cosh_strength", "huber_strength"),
    "recipe.objective.loss": ("loss_type", "loss_fn"),
    "recipe.objective.huber_c": ("huber_delta", "huber_strength"),
    "recipe.objective.min_snr_gamma": ("snr_gamma", "loss_weight_strength", "min_snr"),
    "recipe.objective.debiased_estimation": ("debiased_estimation_loss",),
    "recipe.objective.p2_gamma": ("p2_loss_weight", "p2"),
    "recipe.objective.scale_v_pred_loss": ("scale_v_pred_loss_like_noise_pred",),
    "recipe.objective.noise_offset": ("offset_noise_weight", "offset_noise"),
    "recipe.objective.multires_discount": ("multires_noise_discount",),
    "recipe.objective.multires_iterations": ("multires_noise_iterations",),
    "recipe.objective.input_perturbation": ("ip_noise_gamma", "perturbation_noise_weight"),
    "recipe.objective.input_perturbation_random_strength": ("ip_noise_gamma_random_strength",),
    "recipe.objective.timestep_shift": ("discrete_flow_shift", "flow_shift"),
    "recipe.objective.prior_weight": ("prior_loss_weight",),
    "recipe.objective.prior_prediction": ("with_prior_preservation", "diff_output_preservation"),
    "recipe.objective.unmasked_weight": (),
    "recipe.objective.unmasked_probability": (),
    "recipe.objective.normalize_masked_loss": ("normalize_masked_area_loss",),
    "recipe.objective.timesteps": ("timestep_sampling", "timestep_distribution", "weighting_scheme"),
    "recipe.objective.timestep_bias": ("timestep_bias_strategy",),
    "recipe.objective.timestep_min": ("min_timestep", "min_noising_strength"),
    "recipe.objective.timestep_max": ("max_timestep", "max_noising_strength"),
    "recipe.seed": ("random_seed",),
    "fit.device": ("train_device", "gpu_ids", "cuda_device"),
    "fit.dtype": ("mixed_precision", "train_dtype", "full_bf16", "full_fp16", "weight_dtype"),
    "fit.quantize": ("fp8_base", "quantization", "load_in_4bit", "load_in_8bit", "weight_quantization"),
    "fit.vae_dtype": ("no_half_vae", "vae_weight_dtype"),
    "fit.micro_batch": ("per_device_train_batch_size", "batch_size_per_device", "micro_batch_size"),
    "fit.gradient_checkpointing": ("activation_checkpointing",),
    "fit.stream": ("blocks_to_swap", "block_swap", "layer_offload_fraction", "layer_offloading", "group_offload"),
    "fit.attention": ("xformers", "sdpa", "mem_eff_attn", "enable_xformers_memory_efficient_attention",
                      "attention_mechanism"),
    "fit.vae_tiling": ("enable_vae_tiling", "vae_batch_size"),
    "fit.text_encoder_batch_size": ("text_encoder_outputs_batch_size", "cache_text_encoder_outputs_batch_size"),
    "fit.preview_offload": ("lowram", "enable_model_cpu_offload"),
    "fit.threads": ("num_cpu_threads", "num_cpu_threads_per_process"),
    "fit.loader_workers": ("max_data_loader_n_workers", "dataloader_num_workers", "dataloader_threads", "num_workers"),
    "fit.prefetch_batches": ("prefetch_factor",),
    "fit.compile": ("torch_compile",),
    "fit.cache_gigabytes": ("cache_latents_to_disk", "cache_latents", "latent_caching"),
    "report.previews.every": ("sample_every_n_steps", "sample_after", "validation_steps", "sample_every"),
    "report.previews.every_epochs": ("sample_every_n_epochs", "validation_epochs"),
    "report.previews.first": ("sample_at_first", "skip_first_sample"),
    "report.previews.prompts": ("sample_prompts", "samples", "validation_prompt", "sample_definition_file_name"),
    "report.previews.prompts.*.negative": ("negative_prompt",),
    "report.previews.prompts.*.steps": ("num_inference_steps", "diffusion_steps", "sample_steps"),
    "report.previews.prompts.*.guidance": ("guidance_scale", "cfg_scale", "cfg"),
    "report.previews.prompts.*.sampler": ("sample_sampler", "noise_scheduler"),
    "report.validation.every": ("validate_every_n_steps", "validate_after"),
    "report.validation.patience": ("early_stopping_patience",),
    "report.saving.every_steps": ("save_every_n_steps", "save_every"),
    "report.saving.every_epochs": ("save_every_n_epochs",),
    "report.saving.keep": ("save_last_n_steps", "save_last_n_epochs"),
    "report.saving.checkpoint_every": ("checkpointing_steps", "save_state", "backup_after"),
    "report.saving.checkpoint_keep": ("checkpoints_total_limit", "rolling_backup_count", "save_last_n_steps_state"),
    "report.tensorboard": ("log_with", "report_to", "logging_dir"),
    "output.runs": ("output_dir", "workspace_dir", "output_model_destination"),
    "output.dtype": ("save_precision", "output_dtype"),
    "output.diffusers": ("save_model_as", "output_model_format"),
    "output.author": ("metadata_author",),
    "output.license": ("metadata_license",),
    "output.description": ("metadata_description", "training_comment"),
}  # fmt: skip
"""Names in other programs, by job key. Keys that have the same name everywhere need no entry."""

FIELD_VALUES: Mapping[str, Mapping[str, str]] = {
    "base.family": {"sd1": "sd15", "sd1.5": "sd15", "sd_1.5": "sd15", "stable_diffusion_15": "sd15", "sd_v1": "sd15",
                    "sd_xl": "sdxl", "stable_diffusion_xl_10_base": "sdxl", "pony": "sdxl", "illustrious": "sdxl",
                    "noobai": "sdxl"},
    "base.prediction": {"eps": "epsilon", "noise": "epsilon", "v_prediction": "v", "vpred": "v", "v-prediction": "v",
                        "velocity": "v", "flow_matching": "flow", "rectified_flow": "flow"},
    "dataset.folders.kind": {"reg": "regularization", "regularization": "regularization", "class": "regularization",
                             "prior_prediction": "regularization", "instance": "train", "standard": "train",
                             "val": "validation"},
    "dataset.masks": {"alpha_mask": "alpha", "masklabel": "files"},
    "recipe.adapter": {"locon": "lora", "lycoris": "lora", "networks.lora": "lora", "peft": "lora", "t-lora": "tlora",
                       "t_lora": "tlora", "diag-oft": "oft", "diag_oft": "oft", "oft_2": "oft"},
    "recipe.layers": {"full": "all", "conv": "all", "attn-mlp": "linear", "attn-only": "attention"},
    "recipe.optimizer.name": {word: name for name, kind in OPTIMIZERS.items() for word in kind.method.names},
    "recipe.schedule.kind": {
        "constant_with_warmup": "constant", "cosine_with_restarts": "restarts", "cosine_with_hard_restarts": "restarts",
        "cosine_with_min_lr": "cosine", "poly": "polynomial", "warmup_stable": "warmup_stable_decay",
        "wsd": "warmup_stable_decay", "piecewise_constant": "piecewise",
    },
    "recipe.objective.loss": {"l2": "mse", "mae": "l1", "pseudo_huber": "huber"},
    "recipe.objective.timesteps": {"sigmoid": "logit_normal", "logit-normal": "logit_normal"},
    "fit.dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"},
    "fit.vae_dtype": {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"},
    "fit.quantize": {"4bit": "nf4", "8bit": "int8", "fp4": "nf4", "fp8": "int8", "qlora": "nf4", "no": "none"},
    "fit.attention": {"xformers": "efficient", "sdpa": "auto", "flash_attention": "flash", "flash_attn": "flash",
                      "mem_eff": "efficient", "default": "auto"},
    "output.dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float": "fp32", "half": "fp16"},
    "report.previews.prompts.sampler": {
        "euler_ancestral": "euler_a", "euler a": "euler_a", "k_euler": "euler", "k_euler_a": "euler_a",
        "dpm++ 2m": "dpmpp_2m", "dpm++_2m": "dpmpp_2m", "dpmsolver++": "dpmpp_2m",
        "dpm++ 2m karras": "dpmpp_2m_karras", "dpm++_2m_karras": "dpmpp_2m_karras",
        "dpm++ 2m sde karras": "dpmpp_2m_sde_karras",
        "k_heun": "heun",
        "uni_pc": "unipc", "unipcmultistep": "unipc",
    },
}  # fmt: skip
"""Values that other programs use and their equivalents here, by job key."""

UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("dylora", "glora", "ia3", "boft", "full_finetune"),
                    "this method is not supported; recipe.adapter is lora, tlora, dora, loha, lokr or oft"),
    "network_args": "set these as keys of [recipe], such as recipe.conv_rank",
    "optimizer_args": "set these as keys of [recipe.optimizer], such as recipe.optimizer.weight_decay",
    "lr_scheduler_args": "set these as keys of [recipe.schedule], such as recipe.schedule.cycles",
    "face_crop_aug_range": "cropping around faces is not supported; set crops in the app",
    "learning_rate_scaler": "learning rates are never scaled; set the final rate",
}  # fmt: skip
"""What to use instead of unsupported settings, by their names in other programs."""


RELATED: Mapping[str, str] = {
    **dict.fromkeys(("train_batch_size", "batch_size", "gradient_accumulation_steps"),
                    "recipe.effective_batch is the batch size times the steps of accumulation"),
    "train_text_encoder": "recipe.text_encoder.learning_rate is its rate; 0 does not train it",
    "stop_text_encoder_training": "recipe.text_encoder.stop_after is a step, or a share of the run below 1",
    "stop_training_after": "recipe.text_encoder.stop_after is a step, or a share of the run below 1",
    "text_encoder_layer_skip": "recipe.clip_skip counts from the last layer, which is 1",
    "tokenizer_max_length": "recipe.token_chunks is 75, 150 or 225",
    "min_lr": "recipe.schedule.end is a share of the learning rate",
    "loss_weight_strength": "recipe.objective.min_snr_gamma and recipe.objective.p2_gamma are keys of their own",
    "huber_strength": "recipe.objective.loss_mix states the shares of several losses",
    **dict.fromkeys(("min_noising_strength", "max_noising_strength"),
                    "recipe.objective.timestep_min and timestep_max are timesteps from 0 to 1000"),
    "with_prior_preservation": 'a folder of images of the class has kind = "regularization"',
    **dict.fromkeys(("blocks_to_swap", "layer_offload_fraction", "block_swap"),
                    'fit.stream is the number of streamed blocks, "full" or "none"'),
    **dict.fromkeys(("save_last_n_steps", "save_last_n_epochs", "checkpoints_total_limit", "save_last_n_steps_state"),
                    "report.saving.keep and checkpoint_keep are numbers of files"),
    "backup_after": "report.saving.checkpoint_every is a number of steps",
    "sample_after": "report.previews.every is a number of steps",
    "validate_after": "report.validation.every is a number of steps",
    "skip_first_sample": "report.previews.first = false skips it",
    "dim_from_weights": "base.continue_from starts from a LoRA and takes its ranks",
}  # fmt: skip
"""Names in the table whose values mean something else than those of the key, and what the key's values are."""


def meant_by(word: str) -> str | None:
    """Return the one key that another program's name or a last part (`seed`) means, with values that mean the same.

    None for names in RELATED, for those of keys in lists, and for last parts that several keys have.
    """
    plain = _plain(word)
    if plain in RELATED:
        return None
    keys = [key for key in keys_called(plain) if "*" not in key]
    named = [key for key in keys if plain in FIELD_NAMES[key]]
    return named[0] if named else keys[0] if len(keys) == 1 else None


def has_name(key: str, text: str) -> bool:
    """Return whether other programs call a setting so, or begin its name so: "network dim", "network_d", "--lr"."""
    plain = _plain("_".join(text.split()))
    return bool(plain) and any(f"_{name}".find(f"_{plain}") >= 0 for name in FIELD_NAMES.get(key, ()))


def keys_called(word: str) -> Iterator[str]:
    """Yield the job keys that are named `word` here or in another program, the most likely one first."""
    plain = _plain(word)
    yield from (key for key, names in FIELD_NAMES.items() if plain in (key.rpartition(".")[2], *names))


def value_called(key: str, word: str) -> str | None:
    """Return the value of `key` that another program calls `word`; None if there is none.

    `key` is a job key, with or without list indexes, or only its last part ("sampler") if that is unambiguous.
    """
    bare = ".".join(part for part in key.split(".") if not part.isdigit() and part != "*")
    last = [full for full in FIELD_VALUES if full.rpartition(".")[2] == bare.rpartition(".")[2]]
    values = FIELD_VALUES.get(bare) or (FIELD_VALUES[last[0]] if len(last) == 1 else {})
    return values.get(word.strip().lower()) or values.get(_plain(word))


def unsupported(word: str) -> str | None:
    """Return what to use instead of another program's setting that does not exist here; None if unknown."""
    return UNSUPPORTED.get(_plain(word))


def related(word: str) -> str | None:
    """Return how the values of the key that has this name elsewhere differ; None if they mean the same."""
    return RELATED.get(_plain(word))


def _plain(word: str) -> str:
    """Convert an option ("--network-dim") or a metadata key ("ss_network_dim") to the spelling in these tables."""
    return word.strip().lower().lstrip("-").replace("-", "_").removeprefix("ss_")
