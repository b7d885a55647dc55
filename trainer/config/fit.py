"""How a recipe is made to fit one machine; changes memory and speed, never what is learned beyond rounding."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.schema import Section

LEAST_ROWS = 17
"""torch._int_mm refuses fewer on CUDA cards."""
PLANNED = ("dtype", "quantise", "micro_batch", "checkpointing", "vae_tiling", "preview_offload")
"""The keys that a plan decides where a job leaves them open."""
TEXTS_AT_ONCE = 8
"""Most GPUs finish each operation on a single caption before the host asks for the next (docs/decisions/0023)."""
LARGEST_MICRO_BATCH = 64
"""Beyond it no card gets faster."""
MOST_GRAPHS = 8
"""Of how many shapes a run holds graphs: each takes memory. Those seen first are mostly those seen most."""


class ProductConfig(Section):
    """Layers of one size, and from how many rows (pictures times places, or words) on they multiply in int8."""

    inputs: int | None = Field(default=None, ge=1)
    """How many numbers go into the layer; absent: any."""
    outputs: int | None = Field(default=None, ge=1)
    """How many numbers come out of it; absent: any."""
    forward: int | None = Field(default=None, ge=LEAST_ROWS)
    """The rows from which on what the layer gives is an int8 product; absent: never."""
    backward: int | None = Field(default=None, ge=LEAST_ROWS)
    """The rows from which on the gradient of what goes in is an int8 product; absent: never."""

    def is_of(self, inputs: int, outputs: int) -> bool:
        """Whether a layer of this size is meant."""
        return self.inputs in (None, inputs) and self.outputs in (None, outputs)


EVERYWHERE = (ProductConfig(forward=LEAST_ROWS, backward=LEAST_ROWS),)
"""Both products of every layer; also what is forecast before anything was measured."""


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
    quantise: Literal["none", "int8", "int8_products", "nf4"] | None = None
    """Whether the base is kept in 8 or 4 bits: less memory, less exact. int8_products rounds inputs and gradients."""
    int8_products: tuple[ProductConfig, ...] | None = Field(default=None, strict=False)
    """Which layers multiply in int8 under quantise = "int8_products"; absent: measured when the run starts."""
    vae_dtype: Literal["fp32", "bf16"] | None = None
    """The number format of the VAE; fp32 is safest."""
    vae_encode_tiling: bool | None = None
    """Whether images are encoded in overlapping tiles: needs much less memory; latents differ by about 5 %."""
    text_encoder_batch_size: int | None = Field(default=None, ge=1, le=64)
    """How many captions are encoded at once; absent: 8, or 1 where every result is to be exactly repeatable."""
    micro_batch: int | None = Field(default=None, ge=1, le=512)
    """How many pictures are computed at once; an effective batch is split into these."""
    checkpointing: Literal["none", "full"] | BlockNames | None = None
    """Gradient checkpointing: none (fast), full (least memory), or a list of UNet blocks such as "down_blocks.1"."""
    attention: Literal["auto", "flash", "efficient", "math", "cudnn"] | None = None
    """Which attention kernel PyTorch uses; auto: the quickest that suits card and base, by a short measurement."""
    vae_tiling: bool | None = None
    """Whether previews are decoded in tiles, which needs less memory."""
    preview_offload: bool | None = None
    """Whether the UNet leaves the card while previews are decoded; needs less memory, costs seconds a preview."""
    allow_quantised: bool = False
    """Whether a plan may quantise the base although an unquantised one fits, and a run may step down to that."""
    threads: int | None = Field(default=None, ge=1, le=256)
    """CPU threads for the mathematics; absent: as many as there are cores."""
    graphs: bool = False
    """Experiment: whether a step is recorded once for each shape and then replayed at once, as a CUDA graph."""
    compile: bool = False
    """Experiment: whether torch.compile fuses the UNet's transformer blocks: takes minutes, needs a compiler."""
    channels_last: bool = False
    """Experiment: whether the UNet's maps lie channels-last, if that is measured to be quicker here."""
    fp16_accumulation: bool = False
    """Experiment: whether products of fp16 numbers are added up in fp16 too: faster on GeForce cards, less exact."""
    deterministic: bool | None = None
    """Whether every result is exactly repeatable on this machine; always so on the CPU."""
    cache_gigabytes: float | None = Field(default=None, gt=0.0)
    """Disk space that cached pictures and texts of one run may take before they are made in portions."""

    @property
    def products(self) -> tuple[ProductConfig, ...]:
        """Which layers multiply in int8: none unless the base is kept for it, all as long as it was not measured."""
        if self.quantise != "int8_products":
            return ()
        return EVERYWHERE if self.int8_products is None else self.int8_products


class FallbackStep(Section):
    """One step down: the keys of the fit that change from there on; absent keys stay as they are."""

    exact: bool
    """Whether the result stays the same bit for bit (on the CPU or with deterministic = true)."""
    checkpointing: Literal["none", "full"] | BlockNames | None = None
    """As in the fit."""
    micro_batch: int | None = Field(default=None, ge=1, le=512)
    """As in the fit."""
    vae_dtype: Literal["bf16"] | None = None
    """As in the fit."""
    vae_encode_tiling: bool | None = None
    """As in the fit."""
    text_encoder_batch_size: int | None = Field(default=None, ge=1, le=64)
    """As in the fit."""
    vae_tiling: bool | None = None
    """As in the fit."""
    preview_offload: bool | None = None
    """As in the fit."""
    quantise: Literal["int8", "nf4"] | None = None
    """As in the fit; only where the job allows it."""
