"""How a recipe is made to fit one machine; changes memory and speed, never what is learned beyond rounding."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.model import Section

PLANNED = ("dtype", "quantise", "micro_batch", "checkpointing", "vae_tiling", "preview_offload")
"""The keys that a plan decides where a job leaves them open."""

LARGEST_MICRO_BATCH = 64
"""Beyond it no card gets faster."""

BlockName = Annotated[
    str,
    Field(
        pattern=r"^(down_blocks\.\d|mid_block|up_blocks\.\d)$", examples=["down_blocks.1", "mid_block", "up_blocks.0"]
    ),
]
BlockNames = Annotated[tuple[BlockName, ...], Field(strict=False, min_length=1)]


class FitConfig(Section):
    """How the job is made to fit this machine. A key written here is kept; an absent one is chosen for you."""

    device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:\d+)?)$", examples=["cpu", "cuda", "cuda:1"])
    """Where to train: cpu, cuda or cuda:1; absent: the best card, else the CPU."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """The number format of the base: bf16 on cards that have it, else fp16; fp32 on the CPU."""
    quantise: Literal["none", "int8", "nf4"] | None = None
    """Whether the base is kept in 8 or 4 bits; saves memory, costs some fidelity and speed."""
    vae_dtype: Literal["fp32", "bf16"] | None = None
    """The number format of the VAE; fp32 is safest."""
    micro_batch: int | None = Field(default=None, ge=1, le=512)
    """How many pictures are computed at once; an effective batch is split into these."""
    checkpointing: Literal["none", "full"] | BlockNames | None = None
    """Gradient checkpointing: none (fast), full (least memory), or a list of UNet blocks such as "down_blocks.1"."""
    attention: Literal["auto", "flash", "efficient", "math", "cudnn"] | None = None
    """Which attention kernel PyTorch uses; auto: the first of flash, efficient and math that suits card and base."""
    vae_tiling: bool | None = None
    """Whether previews are decoded in tiles, which needs less memory."""
    preview_offload: bool | None = None
    """Whether the UNet leaves the card while previews are decoded; needs less memory, costs seconds a preview."""
    allow_quantised: bool = False
    """Whether a plan may quantise the base although an unquantised one fits, and a run may step down to that."""
    threads: int | None = Field(default=None, ge=1, le=256)
    """CPU threads for the mathematics; absent: as many as there are cores."""
    deterministic: bool | None = None
    """Whether every result is exactly repeatable on this machine; always so on the CPU."""
    cache_gigabytes: float | None = Field(default=None, gt=0.0)
    """Disk space that cached pictures and texts of one run may take before they are made in portions."""
