"""Time encoding of images and captions, by number at once, memory layout and dtype, on a GPU or the CPU.

The trainer encodes one image at a time in contiguous layout, and several captions at once if runs need not be
reproducible bit for bit. This measures what larger batches would gain on a GPU, their peak memory, and how far an image
or caption then deviates from being encoded alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tests.benchmarks.speed_rows import MIB, Base
from tests.support.real_phases import RealRun
from trainer.base.encoding import posterior
from trainer.config.base import Family
from trainer.training.device.device import attention_kernels
from trainer.training.device.offload import empty_cache

What = Literal["images, contiguous", "images, channels_last", "captions"]
LAYOUTS: dict[What, torch.memory_format] = {
    "images, contiguous": torch.contiguous_format,
    "images, channels_last": torch.channels_last,
}
SIDES: dict[Family, int] = {"sd15": 512, "sdxl": 1024}
TINY = 64
COUNTS = (1, 2, 4, 8)
LEAST_SECONDS = 1.0
"""Minimum seconds for which a row is repeated."""

Encode = Callable[[], Tensor]
"""Encodes a batch once; returns the results, first the one that is compared."""


@dataclass(frozen=True)
class Encoding:
    """A number of images or captions encoded at once."""

    dtype: str
    what: What
    at_once: int
    a_second: float = 0.0
    peak: int | None = None
    """Bytes allocated by PyTorch's allocator; None on the CPU."""
    difference: float = 0.0
    """Largest difference of the first one, in a latent's mean or a text state, from encoding it alone, contiguous."""
    failure: str = ""

    def line(self) -> str:
        """Return a row of the table."""
        peak = "" if self.peak is None else f"{self.peak / MIB:,.0f}"
        cells = self.failure or f"{self.a_second:.2f} | {peak} | {self.difference:.1e}"
        return f"| {self.dtype} | {self.what} | {self.at_once} | {cells} |"


HEAD = "| in | what | at once | a second | allocated, MiB | differs by |\n|---|---|---|---|---|---|"


def encodings(family: Family, device: torch.device, *, small: bool) -> Iterator[Encoding]:
    """Time a VAE and text encoders with random weights; failures, including out of memory, are listed."""
    workload = Base(family).workload(SIDES[family], small=small)
    for dtype in ("bf16", "fp32"):
        fit = workload.fit.replaced(dtype=dtype, vae_dtype=dtype)
        run = RealRun(replace(workload, fit=fit), device)
        yield from _of_pictures(run, dtype, TINY if small else SIDES[family])
        empty_cache(device)
        yield from _of_captions(run, dtype)
        empty_cache(device)


def _of_pictures(run: RealRun, dtype: str, side: int) -> Iterator[Encoding]:
    vae = run._vae()
    pictures = torch.rand(COUNTS[-1], 3, side, side).mul_(2).sub_(1)
    with attention_kernels("auto", run.device, vae.dtype):
        alone = posterior(vae, pictures[:1])[0]
        for what, form in LAYOUTS.items():
            vae.to(memory_format=form)  # type: ignore[call-overload]
            for count in COUNTS:
                shown = pictures[:count].to(memory_format=form)
                yield _tried(
                    Encoding(dtype, what, count), lambda shown=shown: posterior(vae, shown)[0].cpu(), alone, run.device
                )


def _of_captions(run: RealRun, dtype: str) -> Iterator[Encoding]:
    encoders = run._text_encoders()
    alone = run._encode(encoders).hidden
    for count in COUNTS:
        yield _tried(
            Encoding(dtype, "captions", count),
            lambda count=count: run._encode(encoders, count).hidden.cpu(),
            alone,
            run.device,
        )


def _tried(what: Encoding, encode: Encode, alone: Tensor, device: torch.device) -> Encoding:
    try:
        return _timed(what, encode, alone, device)
    except RuntimeError as error:
        return replace(what, failure=str(error).partition("\n")[0])


def _timed(what: Encoding, encode: Encode, alone: Tensor, device: torch.device) -> Encoding:
    """Return the mean over at least a second, after warm-up, including uploads and the read of the result."""
    cuda = device.type == "cuda"
    difference = (encode()[:1] - alone.cpu()).abs().max().item()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    started, times = time.perf_counter(), 0
    while times == 0 or time.perf_counter() - started < LEAST_SECONDS:
        encode()
        times += 1
    rate = times * what.at_once / (time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    return replace(what, a_second=rate, peak=peak, difference=difference)


def table(family: Family, *, small: bool) -> Iterator[str]:
    """Yield the whole table as Markdown, each line once it is known."""
    device = torch.device("cpu") if small else torch.device("cuda", 0)
    yield HEAD
    for encoding in encodings(family, device, small=small):
        yield encoding.line()
