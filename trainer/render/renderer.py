"""A base with finished LoRAs in memory, and the pictures that it draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from trainer.adapter.attach import AppliedLoras
from trainer.adapter.names import slots
from trainer.adapter.reading import LoraWeights, read_lora
from trainer.base.drawing import OnStep, RenderSpec, decode, draw_latents, make_sampler, save_picture
from trainer.base.encoding import TextConditioning, encode_words
from trainer.base.source import open_base
from trainer.config.base import NATIVE_RESOLUTION, BaseConfig
from trainer.config.job import PromptConfig
from trainer.config.resolve import Machine
from trainer.errors import BaseModelError, LoraFileError
from trainer.protocol.events import OnPhase

OnDrawn = Callable[[int, int, Path], None]
"""Called with how many pictures are done, how many there are in all, and the file just written."""


OnNotice = Callable[[str, str], None]
"""Called with the code and the sentence of something that the user should know."""


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A LoRA file and how strongly it acts (1: as trained)."""

    file: Path
    strength: float = 1.0


class Renderer:
    """A base in memory, with LoRAs that others can take the place of, ready to draw."""

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
        self.clip_skip = clip_skip
        self.on_notice = on_notice
        self._uses = tuple(loras)
        read = self._read_all(loras)
        self.unet = self.source.load_unet(dtype, device)
        self.encoders = self.source.load_text_encoders(dtype, device)
        self.vae = self.source.load_vae(torch.float32, device)
        self._applied = AppliedLoras(self.unet, self.encoders, dtype=dtype)
        self._applied.use(read)

    def use(self, loras: Sequence[LoraUse]) -> None:
        """Draw with these from now on, as if the base had been loaded for them; raises LoraFileError."""
        if tuple(loras) != self._uses:
            read = self._read_all(loras)
            self._uses = ()
            self._applied.use(read)
            self._uses = tuple(loras)

    def draw(self, prompt: PromptConfig, width: int, height: int, on_step: OnStep = lambda *_: None) -> Image.Image:
        """Return an image of ``width`` by ``height`` pixels; raises BaseModelError where it would be made of NaN."""
        source = self.source
        sampler = make_sampler(prompt.sampler, source.prediction, zero_terminal_snr=source.zero_terminal_snr)
        positive, negative = (self._encode(text) for text in (prompt.prompt, prompt.negative))
        drawing = RenderSpec(prompt, width, height, positive, negative)
        latents = draw_latents(source.family, self.unet, sampler, drawing, on_step)
        if not bool(latents.isfinite().all()):
            what, remedy = f"the base {self.name} is damaged", "Get the base again or choose another one."
            if self._uses:
                what += ", or a LoRA is damaged or too strong"
                remedy = "Draw without the LoRA, or at a lower strength. If that fails too, get the base again."
            sentence = f"Could not draw the image: its values are not finite (NaN or infinity). Probably {what}."
            raise BaseModelError("base.not_finite", sentence, remedy)
        return decode(self.vae, latents, tiling=self.device.type != "cpu")

    def draw_file(self, prompt: PromptConfig, folder: Path, on_step: OnStep = lambda *_: None) -> Path:
        """Draw one picture into ``folder``, beside what is there, as a PNG that holds its settings; return the file.

        A size that the prompt leaves open is that of the family.
        """
        side = NATIVE_RESOLUTION[self.source.family]
        width, height = prompt.width or side, prompt.height or side
        used = [f"{use.file.name}:{use.strength:g}" for use in self._uses]
        settings = {"width": width, "height": height, "loras": used, "base": self.name}
        picture = self.draw(prompt, width, height, on_step)
        path = free_name(folder)
        save_picture(picture, path, prompt.model_dump() | settings)
        return path

    def _read_all(self, loras: Sequence[LoraUse]) -> list[tuple[LoraWeights, float]]:
        return [(self._read(use.file), use.strength) for use in loras]

    def _read(self, file: Path) -> LoraWeights:
        """The LoRA's weights, before those of the base; what does not fit is told, a file that fits nowhere refused."""
        source = self.source
        lora = read_lora(file, source.family, slots(source.family, source.unet_config, source.text_configs))
        if not lora.layers:
            raise LoraFileError(
                "lora.nothing_fits",
                f"Nothing in {file.name} fits this base.",
                "Choose a LoRA that was made for the family of the base.",
            )
        if lora.unmatched:
            count, first = len(lora.unmatched), lora.unmatched[0]
            self.on_notice("lora.unmatched", f"{file.name}: {count} keys fit no layer of this base, first {first}.")
        return lora

    def _encode(self, text: str) -> TextConditioning:
        return encode_words(self.source.family, self.encoders, [text], self.clip_skip, self.device)


def drawing_dtype(machine: Machine) -> torch.dtype:
    """Return the dtype that pictures are drawn in: fp32 on the CPU, else in the half precision of the card."""
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
    on_drawn: OnDrawn,
    clip_skip: int | None = None,
    progress: OnPhase | None = None,
    on_notice: OnNotice,
) -> list[Path]:
    """Draws every prompt into ``folder`` as 000.png, 001.png ... beside what is there; returns the files.

    Each PNG holds its settings. ``clip_skip`` is in kohya's counting, SD 1.5 only. Raises ImpastoError for a base or
    LoRA that cannot be used.
    """
    renderer = Renderer(
        base, loras, device=device, dtype=dtype, clip_skip=clip_skip, progress=progress, on_notice=on_notice
    )
    folder.mkdir(parents=True, exist_ok=True)  # nothing is left when base or LoRA are refused
    files: list[Path] = []
    for prompt in prompts:
        files.append(renderer.draw_file(prompt, folder))
        on_drawn(len(files), len(prompts), files[-1])
    return files


def free_name(folder: Path) -> Path:
    """The first of 000.png, 001.png ... that does not exist yet."""
    number = 0
    while (path := folder / f"{number:03d}.png").exists():
        number += 1
    return path
