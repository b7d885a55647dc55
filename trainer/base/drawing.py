"""Generate images with diffusers' pipelines from text embeddings, so that no text encoder needs to be in memory."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines import pipeline_utils
from diffusers.schedulers.scheduling_euler_discrete import rescale_zero_terminal_snr
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from trainer.base.encoding import TextConditioning
from trainer.config.base import Family, Prediction
from trainer.config.job import PromptConfig
from trainer.config.methods import Sampler
from trainer.errors import BaseModelError
from trainer.protocol import files

SCHEDULERS: Mapping[Sampler, tuple[str, dict[str, object]]] = {
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "use_karras_sigmas": True}),
    "dpmpp_2m_sde_karras": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True},
    ),
    "heun": ("HeunDiscreteScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
}
"""Scheduler of diffusers and its arguments for each sampler."""

TILE = 512  # side in pixels
FLOW_SHIFT = 3.0
"""Shift of the noise levels of flows toward noise, as for images of 1024 px in Esser et al. 2024, section 5.3.2."""

OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RenderSpec:
    """One image to generate: its settings, its size, and the embeddings of both prompts, each a batch of one."""

    settings: PromptConfig
    width: int
    height: int
    positive: TextConditioning
    negative: TextConditioning


def make_sampler(name: Sampler, prediction: Prediction, *, zero_terminal_snr: bool) -> Any:
    """Return the diffusers scheduler for a sampler name, with Stable Diffusion's noise schedule.

    A base with zero terminal SNR needs rescaled betas and trailing timesteps (Lin et al. 2023, section 3). The
    timesteps stay on the CPU: the scheduler reads them in each step and would synchronize with the device every time.
    """
    if prediction == "flow":
        return _flow_sampler(name)
    class_name, options = SCHEDULERS[name]
    if zero_terminal_snr:  # Karras noise levels up to its infinite sigma would spend most steps on almost pure noise
        options = {key: value for key, value in options.items() if key != "use_karras_sigmas"}
    if name != "heun":
        options = {**options, "rescale_betas_zero_snr": zero_terminal_snr}
    elif zero_terminal_snr:
        options = {**options, "trained_betas": _betas_near_zero_snr()}
    with _numpy_warning_hidden():
        sampler = getattr(diffusers, class_name)(
            num_train_timesteps=1000,
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction" if prediction == "v" else "epsilon",
            timestep_spacing="trailing" if zero_terminal_snr else "leading",
            steps_offset=1,
            **options,
        )
    set_timesteps = sampler.set_timesteps

    def on_cpu(steps: int, device: object = None) -> None:
        # LCM skips within 50 steps of the solver it was distilled from, so it takes no more of its own by default.
        more = {"original_inference_steps": _divisor_of_1000(max(50, steps))} if name == "lcm" else {}
        set_timesteps(steps, device="cpu", **more)

    sampler.set_timesteps = on_cpu
    return sampler


def _flow_sampler(name: str) -> Any:
    """Return Euler's scheduler for rectified flow, with what a Stable Diffusion pipeline asks of a scheduler."""
    if name != "euler":
        raise BaseModelError(
            "base.sampler",
            f'Could not render with the sampler "{name}": this base predicts a flow, which only "euler" follows.',
            'Use the sampler "euler".',
        )
    sampler: Any = diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=FLOW_SHIFT)
    sampler.init_noise_sigma = 1.0
    sampler.scale_model_input = lambda sample, timestep=None: sample
    set_timesteps = sampler.set_timesteps
    sampler.set_timesteps = lambda steps, device=None: set_timesteps(steps, device="cpu")
    return sampler


def _divisor_of_1000(least: int) -> int:
    """Return the smallest divisor of 1000 from ``least`` up; with other numbers LCM would not start at pure noise."""
    return next(divisor for divisor in (50, 100, 125, 200, 250, 500, 1000) if divisor >= least)


def _betas_near_zero_snr() -> list[float]:
    """Return the betas of zero terminal SNR for Heun, which cannot rescale them.

    As in diffusers' Euler scheduler, the last share of the image is 2^-24 instead of 0, at which sigma is infinite.
    """
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    shares = torch.cumprod(1.0 - rescale_zero_terminal_snr(betas), dim=0)
    shares[-1] = 2.0**-24
    before = torch.cat([torch.ones(1, dtype=torch.float64), shares[:-1]])
    return (1.0 - shares / before).tolist()


@contextmanager
def _numpy_warning_hidden() -> Iterator[None]:
    """Hide NumPy 2's warning that `Tensor.__array__`, which diffusers' schedulers use, takes no `copy` argument."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        yield


@torch.no_grad()
def draw_latents(family: Family, unet: torch.nn.Module, sampler: Any, drawing: RenderSpec, on_step: OnStep) -> Tensor:
    """Denoise one image and return its scaled latents (1, 4, height/8, width/8) on the UNet's device.

    The initial noise is drawn on the CPU, so that a seed gives the same image on every device.
    """
    pipeline = make_pipeline(family, unet, sampler)
    reference = next(unet.parameters())
    settings = drawing.settings

    def after_step(_pipe: object, index: int, _timestep: object, values: dict[str, Tensor]) -> dict[str, Tensor]:
        on_step(index + 1, len(sampler.timesteps))
        return values

    with _numpy_warning_hidden():
        result = pipeline(
            **embeddings(drawing, reference.device, compute_dtype(unet)),
            width=drawing.width,
            height=drawing.height,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            generator=torch.Generator("cpu").manual_seed(settings.seed),
            output_type="latent",
            callback_on_step_end=after_step,
        )
    latents: Tensor = result.images
    return latents


def make_pipeline(family: Family, unet: torch.nn.Module, sampler: Any) -> Any:
    """Return a diffusers pipeline with only a UNet; it takes text embeddings, and ``decode`` decodes its latents."""
    components: dict[str, object] = {"text_encoder": None, "tokenizer": None, "unet": unet, "scheduler": sampler}
    if family == "sdxl":
        components |= {"text_encoder_2": None, "tokenizer_2": None, "add_watermarker": False}
        pipeline: Any = diffusers.StableDiffusionXLPipeline(vae=None, **components)
    else:
        components |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = diffusers.StableDiffusionPipeline(vae=None, **components)
    pipeline.set_progress_bar_config(disable=True)
    # Even a bar that is off creates a lock for several processes, whose semaphore a run that is killed would leave.
    pipeline_utils.tqdm.set_lock(threading.RLock())  # type: ignore[attr-defined]
    return pipeline


def compute_dtype(unet: torch.nn.Module) -> torch.dtype:
    """Return the dtype that a UNet computes in: the dtype of a convolution, which is never quantized."""
    dtype: torch.dtype = unet.conv_in.weight.dtype  # type: ignore[union-attr,assignment]
    return dtype


def embeddings(drawing: RenderSpec, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the embeddings of both prompts on the device, as keyword arguments for the pipeline."""
    sides = {"": drawing.positive, "negative_": drawing.negative}
    arguments = {f"{side}prompt_embeds": text.hidden.to(device, dtype) for side, text in sides.items()}
    for side, text in sides.items():
        if text.pooled is not None:
            arguments[f"{side}pooled_prompt_embeds"] = text.pooled.to(device, dtype)
    return arguments


def decode(vae: Any, latents: Tensor, *, tiling: bool) -> Image.Image:
    """Decode scaled latents (1, 4, h, w) to an RGB image; tiling lowers peak memory."""
    return Image.fromarray(decode_levels(vae, latents, tiling=tiling).permute(1, 2, 0).cpu().numpy())


@torch.no_grad()
def decode_levels(vae: Any, latents: Tensor, *, tiling: bool) -> Tensor:
    """Return the image as uint8 (3, H, W) on the device.

    This function contains all work that decoding does on the device, so forecasts can trace it. diffusers' default
    tile is as large as the VAE's training images, so an SDXL image at 1024 px would be a single tile, and tiling would
    save no memory.
    """
    vae.enable_tiling() if tiling else vae.disable_tiling()
    vae.tile_sample_min_size = TILE
    vae.tile_latent_min_size = TILE >> (len(vae.config.block_out_channels) - 1)
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    pixels: Tensor = vae.decode(latents.to(vae.device, vae.dtype) / vae.config.scaling_factor + shift).sample[0]
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


def save_image(image: Image.Image, path: Path, settings: Mapping[str, object]) -> None:
    """Write a PNG with its settings as JSON and as the "parameters" text that other programs read."""
    info = PngInfo()
    info.add_itxt("impasto", json.dumps(dict(settings), ensure_ascii=False))
    info.add_itxt("parameters", parameters_line(settings))
    data = BytesIO()
    image.save(data, format="PNG", pnginfo=info)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, data.getvalue())


def parameters_line(settings: Mapping[str, object]) -> str:
    """Return the settings in A1111's format: prompt, negative prompt, then the parameters."""
    numbers = (
        f"Steps: {settings['steps']}, Sampler: {settings['sampler']}, CFG scale: {settings['guidance']}, "
        f"Seed: {settings['seed']}, Size: {settings['width']}x{settings['height']}"
    )
    return f"{settings['prompt']}\nNegative prompt: {settings['negative']}\n{numbers}"
