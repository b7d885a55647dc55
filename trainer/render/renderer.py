"""Rendering of images with a base and finished LoRAs that stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from trainer.adapter.applied import AppliedLoras
from trainer.adapter.export import WEIGHTED_CAPTIONS
from trainer.adapter.names import slots
from trainer.adapter.reading import LoraWeights, read_lora
from trainer.base.drawing import OnStep, RenderSpec, decode, draw_latents, make_sampler, save_image
from trainer.base.encoding import TextConditioning, encode_texts
from trainer.base.source import open_base
from trainer.config.base import NATIVE_RESOLUTION, BaseConfig
from trainer.config.job import PromptConfig, stated_weight
from trainer.config.resolve import Machine
from trainer.errors import BaseModelError, LoraFileError
from trainer.files.tokens import has_weights
from trainer.protocol.events import OnPhase

OnImage = Callable[[int, int, Path], None]
"""Callback that receives the number of finished images, the total, and the file just written."""


OnNotice = Callable[[str, str], None]
"""Callback that receives a notice for the user: its code and its sentence."""


@dataclass(frozen=True, slots=True)
class LoraUse:
    """LoRA file and the strength to apply it with (1: as trained)."""

    file: Path
    strength: float = 1.0


class Renderer:
    """Renders images with a base that stays in memory and LoRAs that can be replaced."""

    def __init__(
        self,
        base: BaseConfig,
        loras: Sequence[LoraUse],
        *,
        device: torch.device,
        dtype: torch.dtype,
        clip_skip: int | None,
        progress: OnPhase | None,
        on_notice: OnNotice,
    ) -> None:
        self.source = open_base(base, progress)
        self.name = base.name
        self.device = device
        self._clip_skip = clip_skip
        self._on_notice = on_notice
        self._uses = tuple(loras)
        self._is_weighted = False
        self._noticed: set[str] = set()
        weights = self._read_all(loras)
        self.unet = self.source.load_unet(dtype, device)
        self.encoders = self.source.load_text_encoders(dtype, device)
        self.vae = self.source.load_vae(torch.float32, device)
        self._applied = AppliedLoras(self.unet, self.encoders, dtype=dtype)
        self._applied.use(weights)

    def configure(self, *, clip_skip: int | None, on_notice: OnNotice) -> None:
        """Set what may differ between requests that use the same base."""
        self._clip_skip, self._on_notice = clip_skip, on_notice
        self._noticed.clear()

    def use(self, loras: Sequence[LoraUse]) -> None:
        """Replace the current LoRAs without reloading the base.

        Raises LoraFileError for a LoRA that does not match the base.
        """
        if tuple(loras) != self._uses:
            weights = self._read_all(loras)
            self._uses = ()  # if `use` fails, the models have no LoRAs
            self._applied.use(weights)
            self._uses = tuple(loras)

    def render(self, prompt: PromptConfig, width: int, height: int, on_step: OnStep = lambda *_: None) -> Image.Image:
        """Return an image of ``width`` by ``height`` pixels; raise BaseModelError if it has NaN or infinite values.

        Prompts are read with weights such as "(tag:1.3)" if ``prompt.weights`` says so or, by default, if one of the
        LoRAs was trained so.
        """
        source = self.source
        sampler = make_sampler(prompt.sampler, source.prediction, zero_terminal_snr=source.zero_terminal_snr)
        positive, negative = self._encode(prompt)
        drawing = RenderSpec(prompt, width, height, positive, negative)
        latents = draw_latents(source.family, self.unet, sampler, drawing, on_step)
        if not bool(latents.isfinite().all()):
            cause, remedy = f"the base {self.name} is damaged", "Download the base again, or choose another one."
            if self._uses:
                cause += ", or a LoRA is damaged or too strong"
                remedy = "Render without the LoRA or at a lower strength. If that fails too, download the base again."
            sentence = f"Could not render the image: it contains NaN or infinity. Likely cause: {cause}."
            raise BaseModelError("base.not_finite", sentence, remedy)
        return decode(self.vae, latents, tiling=self.device.type != "cpu")

    def render_file(self, prompt: PromptConfig, folder: Path, on_step: OnStep = lambda *_: None) -> Path:
        """Render one image into ``folder`` as a new PNG that contains its settings, and return the file.

        If the prompt has no size, the family's native resolution is used.
        """
        side = NATIVE_RESOLUTION[self.source.family]
        width, height = prompt.width or side, prompt.height or side
        lora_names = [f"{use.file.name}:{use.strength:g}" for use in self._uses]
        settings = {"width": width, "height": height, "loras": lora_names, "base": self.name}
        image = self.render(prompt, width, height, on_step)
        path = free_name(folder)
        save_image(image, path, prompt.model_dump(exclude_none=True) | settings)
        return path

    def _read_all(self, loras: Sequence[LoraUse]) -> list[tuple[LoraWeights, float]]:
        read = [(self._read(use.file), use.strength) for use in loras]
        self._is_weighted = any(lora.metadata.get(WEIGHTED_CAPTIONS) == "True" for lora, _ in read)
        return read

    def _read(self, file: Path) -> LoraWeights:
        """Return the weights of a LoRA file; report unmatched keys, and raise LoraFileError if no layer matches."""
        source = self.source
        lora = read_lora(file, source.family, slots(source.family, source.unet_config, source.text_configs))
        if not lora.layers:
            raise LoraFileError(
                "lora.nothing_fits",
                f"Could not use {file.name}: none of its layers match this base.",
                "Choose a LoRA for the same family as the base.",
            )
        if lora.unmatched:
            count, first = len(lora.unmatched), lora.unmatched[0]
            keys = "1 key matches" if count == 1 else f"{count} keys match"
            self._on_notice("lora.unmatched", f"{file.name}: {keys} no layer of this base, such as {first}.")
        return lora

    def _encode(self, prompt: PromptConfig) -> tuple[TextConditioning, TextConditioning]:
        """Return the embeddings of the prompt and the negative prompt; report weights that are not read."""
        weighted = self._is_weighted if prompt.weights is None else prompt.weights
        if prompt.weights is None and not weighted:
            self._report_weights(f"{prompt.prompt} {prompt.negative}")
        positive, negative = (
            # Without brackets both ways are the same, so such a text stays on the one that has always been used.
            encode_texts(
                self.source.family,
                self.encoders,
                [text],
                self._clip_skip,
                self.device,
                weighted=weighted and has_weights(text),
            )
            for text in (prompt.prompt, prompt.negative)
        )
        return positive, negative

    def _report_weights(self, text: str) -> None:
        """Report a weight in a prompt that is read as plain text, once for each request."""
        if (found := stated_weight(text)) and found not in self._noticed:
            self._noticed.add(found)
            sentence = f"The prompt contains {found}, which is read as plain text."
            self._on_notice("prompt.weights", f"{sentence} Turn on prompt weights to read it as a weight.")


def drawing_dtype(machine: Machine) -> torch.dtype:
    """Return the dtype to render in: fp32 on the CPU, else the GPU's 16-bit dtype."""
    if machine.device == "cpu":
        return torch.float32
    return torch.bfloat16 if machine.bf16 else torch.float16


def render(
    base: BaseConfig,
    loras: Sequence[LoraUse],
    prompts: Sequence[PromptConfig],
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_drawn: OnImage,
    clip_skip: int | None = None,
    progress: OnPhase | None = None,
    on_notice: OnNotice,
) -> list[Path]:
    """Render every prompt into ``folder`` as 000.png, 001.png, etc.; return the files. Existing files are not replaced.

    Each PNG contains its settings. ``clip_skip`` counts as in kohya and applies to SD 1.5 only. Raises ImpastoError for
    an unusable base or LoRA.
    """
    renderer = Renderer(
        base, loras, device=device, dtype=dtype, clip_skip=clip_skip, progress=progress, on_notice=on_notice
    )
    folder.mkdir(parents=True, exist_ok=True)  # only now, so that an unusable base or LoRA leaves no empty folder
    files: list[Path] = []
    for prompt in prompts:
        files.append(renderer.render_file(prompt, folder))
        on_drawn(len(files), len(prompts), files[-1])
    return files


def free_name(folder: Path) -> Path:
    """Return the path of the first file among 000.png, 001.png, etc. that does not exist yet."""
    number = 0
    while (path := folder / f"{number:03d}.png").exists():
        number += 1
    return path
