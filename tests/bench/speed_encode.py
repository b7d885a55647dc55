"""How fast a VAE encodes: by pictures at once, layout and number format, on a card or, tiny, on the CPU.

The trainer encodes one picture at a time, laid out plane by plane. This says what more would gain on a card, what it
would take at the peak, and how far a picture's latents then are from those that it has by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from tests.bench.speed_rows import MIB, Base
from tests.support.real_phases import RealRun
from trainer.base.vae import posterior
from trainer.config.base import Family
from trainer.training.attention import attention
from trainer.training.room import release

Layout = Literal["planes", "channels_last"]
LAYOUTS: dict[Layout, torch.memory_format] = {
    "planes": torch.contiguous_format,
    "channels_last": torch.channels_last,
}
SIDES: dict[Family, int] = {"sd15": 512, "sdxl": 1024}
TINY = 64
MOST = 8
LEAST_SECONDS = 1.0
"""For which a row is repeated."""


@dataclass(frozen=True)
class Encoding:
    """A VAE encoding so many pictures at once."""

    dtype: str
    layout: Layout
    pictures: int
    a_second: float = 0.0
    peak: int | None = None
    """Bytes handed out by PyTorch's allocator; None on the CPU."""
    difference: float = 0.0
    """The most by which a latent's mean differs from that of the picture by itself, plane by plane."""
    failure: str = ""

    def line(self) -> str:
        """As a row of a table."""
        peak = "" if self.peak is None else f"{self.peak / MIB:,.0f}"
        told = self.failure or f"{self.a_second:.2f} | {peak} | {self.difference:.1e}"
        return f"| {self.dtype} | {self.layout} | {self.pictures} | {told} |"


HEAD = "| VAE in | layout | at once | pictures/s | allocated, MiB | differs by |\n|---|---|---|---|---|---|"


def encodings(family: Family, device: torch.device, *, small: bool) -> Iterator[Encoding]:
    """Time a VAE of random weights; what fails, for want of memory too, is named."""
    side = TINY if small else SIDES[family]
    pictures = torch.rand(MOST, 3, side, side).mul_(2).sub_(1)
    subject = Base(family).subject(SIDES[family], small=small)
    for dtype in ("bf16", "fp32"):
        vae = RealRun(replace(subject, fit=subject.fit.changed(vae_dtype=dtype)), device)._vae()
        with attention("auto", device, vae.dtype):
            alone = posterior(vae, pictures[:1])[0]
            for layout, form in LAYOUTS.items():
                vae.to(memory_format=form)  # type: ignore[call-overload]
                for count in (1, 2, 4, MOST):
                    shown = pictures[:count].to(memory_format=form)
                    try:
                        yield _timed(vae, Encoding(dtype, layout, count), shown, alone)
                    except RuntimeError as error:
                        yield Encoding(dtype, layout, count, failure=str(error).partition("\n")[0])
        del vae
        release(device)


def _timed(vae: AutoencoderKL, what: Encoding, shown: Tensor, alone: Tensor) -> Encoding:
    """The mean over a second and more, once all is warm; uploads and the read of the result are in it."""
    cuda = vae.device.type == "cuda"
    mean = posterior(vae, shown)[0]
    difference = (mean[:1] - alone).abs().max().item()
    if cuda:
        torch.cuda.reset_peak_memory_stats(vae.device)
    started, times = time.perf_counter(), 0
    while times == 0 or time.perf_counter() - started < LEAST_SECONDS:
        posterior(vae, shown)[0].cpu()
        times += 1
    rate = times * what.pictures / (time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(vae.device) if cuda else None
    return replace(what, a_second=rate, peak=peak, difference=difference)


def table(family: Family, *, small: bool) -> Iterator[str]:
    """All of it as lines of Markdown, each as soon as it is known."""
    device = torch.device("cpu") if small else torch.device("cuda", 0)
    yield HEAD
    for encoding in encodings(family, device, small=small):
        yield encoding.line()
