"""Preview images rendered during a run with the current LoRA, to show its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from trainer.base.drawing import RenderSpec, decode, draw_latents, make_sampler, save_image
from trainer.base.encoding import TextConditioning, padded
from trainer.base.families import TextEncoder
from trainer.base.source import BaseSource
from trainer.config.job import Job, PreviewConfig, PromptConfig
from trainer.config.schema import require_value
from trainer.dataset.sampling import padded_tokens, prompt_texts
from trainer.files.tokens import PromptText
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.training.callbacks.lora_export import Exporter, due, preview_mode
from trainer.training.data.latent_cache import Cache
from trainer.training.device.device import DTYPES, attention_kernels
from trainer.training.device.offload import offloaded, release_at
from trainer.training.engine import Engine, StepResult, TrainingProgress
from trainer.training.reporting.reporter import Reporter

OnDrawn = Callable[[int, Path, float], None]
"""Callback that receives the prompt's index, the image file and the seconds that the image took."""


class Previewer:
    """Renders the job's preview prompts with the model being trained."""

    def __init__(self, job: Job, source: BaseSource, cache: Cache, folder: Path) -> None:
        self.job = job
        self.source = source
        self.cache = cache
        self.folder = folder

    @property
    def prompts(self) -> tuple[PromptConfig, ...]:
        """Return the preview prompts."""
        return self.job.report.previews.prompts

    def texts(self) -> list[str | PromptText]:
        """Return all texts that the previews need; they are encoded together with the captions.

        The empty text pads a prompt to the length of its negative prompt or the other way around.
        """
        pairs = [prompt_texts(prompt, self.job.recipe) for prompt in self.prompts]
        padding = [""] if any(self._length(one) != self._length(other) for one, other in pairs) else []
        return [*(text for pair in pairs for text in pair), *padding]

    def path(self, step: int, index: int) -> Path:
        """Return the image path for one prompt at one step: samples/step-00000500-0.png."""
        return self.folder / f"step-{step:08d}-{index}.png"

    def is_complete(self, step: int) -> bool:
        """Return whether every prompt has an image for this step."""
        return all(self.path(step, index).exists() for index in range(len(self.prompts)))

    def render_all(
        self,
        step: int,
        unet: torch.nn.Module,
        encoders: Sequence[TextEncoder],
        on_drawn: OnDrawn,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Render every prompt and write its image; ``encoders`` are the loaded text encoders, if any.

        All latents are sampled before the VAE is loaded. With ``preview_offload``, the UNet and the VAE are therefore
        never on the GPU at the same time.
        """
        latents, seconds = [], []
        for index, prompt in enumerate(self.prompts):
            started = time.monotonic()
            latents.append(self._render(prompt, unet, encoders))
            seconds.append(time.monotonic() - started)
            on_progress(index + 1, len(self.prompts))
        started = time.monotonic()
        with offloaded(unet) if self.job.fit.preview_offload else nullcontext():
            release_at("draw", self.cache.device)
            images = self._decode(latents)
            release_at("decode", self.cache.device)
        decoding = (time.monotonic() - started) / max(1, len(latents))  # the VAE is loaded once for all images
        for index, (prompt, image) in enumerate(zip(self.prompts, images, strict=True)):
            started = time.monotonic()
            file = self._write(image, prompt, step, index)
            on_drawn(index, file, seconds[index] + decoding + time.monotonic() - started)

    def _render(self, prompt: PromptConfig, unet: torch.nn.Module, encoders: Sequence[TextEncoder]) -> Tensor:
        source = self.source
        sampler = make_sampler(prompt.sampler, source.prediction, zero_terminal_snr=source.zero_terminal_snr)
        return draw_latents(source.family, unet, sampler, self._render_spec(prompt, encoders), lambda *_: None)

    def _decode(self, latents: Sequence[Tensor]) -> list[Image.Image]:
        """Return the decoded images; the VAE is loaded for this call only."""
        vae = self.source.load_vae(DTYPES[self.job.fit.vae_dtype or "fp32"], self.cache.device)
        # A kernel that the job sets for the UNet may not support the VAE's single wide head.
        with attention_kernels("auto", vae.device, vae.dtype):
            return [decode(vae, drawn, tiling=bool(self.job.fit.vae_tiling)) for drawn in latents]

    def _render_spec(self, prompt: PromptConfig, encoders: Sequence[TextEncoder]) -> RenderSpec:
        pair = prompt_texts(prompt, self.job.recipe)
        positive, negative = (self._text(text, max(map(self._length, pair)), encoders) for text in pair)
        return RenderSpec(prompt, require_value(prompt.width), require_value(prompt.height), positive, negative)

    def _length(self, text: str | PromptText) -> int:
        return padded_tokens(text, self.job.recipe)

    def _text(self, text: str | PromptText, tokens: int, encoders: Sequence[TextEncoder]) -> TextConditioning:
        """Return a text's conditioning, padded to ``tokens``: a pipeline needs both prompts at the same length."""
        if encoders:
            return self.cache.encode_now(encoders, [text], tokens)
        encoded = self.cache.text(text)
        return encoded if self._length(text) == tokens else padded(encoded, self.cache.text(""), tokens)

    def _write(self, image: Image.Image, prompt: PromptConfig, step: int, index: int) -> Path:
        path = self.path(step, index)
        weights = {"weights": "EMA"} if self.job.recipe.ema_decay else {}
        save_image(image, path, prompt.model_dump(exclude_none=True) | {"step": step, "run": self.job.name} | weights)
        return path


class PreviewCallback:
    """Callback that renders the preview prompts: at step 0 as the baseline, at intervals, and after the last step."""

    phase: ForecastPhase = "preview"

    def __init__(self, engine: Engine, previewer: Previewer, exporter: Exporter, reporter: Reporter) -> None:
        self.engine = engine
        self.previewer = previewer
        self.exporter = exporter
        self.reporter = reporter
        self._began = time.monotonic()
        self._spent = self._last = 0.0  # seconds
        self._has_skipped = False

    @property
    def _config(self) -> PreviewConfig:
        return self.engine.job.report.previews

    def at_start(self, progress: TrainingProgress) -> None:
        """Render the baseline, or previews due at this step that a killed attempt did not finish."""
        is_first = progress.step == 0 and self._config.first is not False
        if (is_first or self._due(progress.step)) and not self.previewer.is_complete(progress.step):
            self.render(progress)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Render previews after the last step, and if they are due and don't take too much of the time."""
        if not self._due(progress.step):
            return
        if self.engine.is_done or self._has_time():
            self.render(progress)
        elif not self._has_skipped:
            self._has_skipped = True
            share = f"{self._config.max_share:.0%} of the time (report.previews.max_share)"
            sentence = (
                f"Skipped the previews of step {progress.step} and some later ones: they would take over {share}."
            )
            self.reporter.notice("previews.skipped", sentence)

    def _due(self, step: int) -> bool:
        return self.engine.is_done or due(step, self._config.every)

    def _has_time(self) -> bool:
        """Return whether one more round, as long as the last, leaves previews within their share of this attempt."""
        share, elapsed = self._config.max_share, time.monotonic() - self._began
        return share is None or self._spent + self._last <= share * (elapsed + self._last)

    def render(self, progress: TrainingProgress) -> None:
        """Render all prompts with the weights in their exported form: their moving average, if there is one."""
        if not self.previewer.prompts:
            return
        started = time.monotonic()
        self.reporter.phase("preview", 0, len(self.previewer.prompts))
        ema = True if self.engine.ema else None
        with preview_mode(self.engine):
            self.previewer.render_all(
                progress.step,
                self.engine.models.unet,
                self.engine.models.text_encoders,
                lambda index, file, seconds: self.reporter.write(
                    events.Preview(
                        step=progress.step, index=index, file=f"samples/{file.name}", seconds=seconds, ema=ema
                    )
                ),
                lambda done, total: self.reporter.phase("preview", done, total),
            )
        self.exporter.add_preview(progress.step)
        self._last = time.monotonic() - started
        self._spent += self._last
