"""The fit: how a job runs on one machine. It affects memory and speed, but changes the result only by rounding."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.schema import Section

MIN_INT8_ROWS = 17
"""Minimum number of rows for an int8 GEMM; torch._int_mm rejects fewer on CUDA."""
PLANNED = (
    "dtype",
    "quantize",
    "stream",
    "micro_batch",
    "gradient_checkpointing",
    "vae_dtype",
    "vae_encode_tiling",
    "vae_tiling",
    "preview_offload",
)
"""Keys that the planner chooses if a job does not set them."""
DEFAULT_TEXT_BATCH = 8
"""Default number of captions per encoding batch; with one, most GPUs wait for the CPU (docs/decisions/0023)."""
LARGEST_MICRO_BATCH = 64
"""Largest micro-batch that the planner tries; larger ones are not faster on any GPU."""
MAX_CUDA_GRAPHS = 8
"""Maximum number of CUDA graphs per run, one per image shape; the first shapes are usually the most common ones."""


class Int8LayerConfig(Section):
    """Layers of one size, and the minimum number of rows (positions or tokens of a micro-batch) for int8 products."""

    inputs: int | None = Field(default=None, ge=1)
    """Input features of the layer; default: any."""
    outputs: int | None = Field(default=None, ge=1)
    """Output features of the layer; default: any."""
    forward: int | None = Field(default=None, ge=MIN_INT8_ROWS)
    """Minimum rows for an int8 forward product; default: never int8."""
    backward: int | None = Field(default=None, ge=MIN_INT8_ROWS)
    """Minimum rows for an int8 product of the input gradient; default: never int8."""

    def is_of(self, inputs: int, outputs: int) -> bool:
        """Return whether this entry applies to a layer of this size."""
        return self.inputs in (None, inputs) and self.outputs in (None, outputs)


ALL_LAYERS = (Int8LayerConfig(forward=MIN_INT8_ROWS, backward=MIN_INT8_ROWS),)
"""Value of `int8_products` for which every layer computes both products in int8; assumed before measuring."""


BlockName = Annotated[
    str,
    Field(pattern=r"^(down_blocks\.\d|mid_block|up_blocks\.\d)$", examples=["down_blocks.1", "mid_block"]),
]
BlockNames = Annotated[tuple[BlockName, ...], Field(strict=False, min_length=1)]


StreamAmount = Literal["none", "full"] | Annotated[int, Field(ge=1, le=999)]
"""How many blocks of the base are streamed from main memory."""


class FitConfig(Section):
    """How the job runs on this machine. Keys set here are never changed; all others are chosen automatically."""

    device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:\d+)?)$", examples=["cpu", "cuda", "cuda:1"])
    """Device to train on: cpu, cuda or cuda:1; default: the best GPU, or the CPU if there is none."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = Field(default=None, title="Precision")
    """Precision of the base (kohya: mixed_precision); default: bf16, fp16 on GPUs without it, or fp32 on the CPU."""
    quantize: Literal["none", "int8", "int8_products", "nf4"] | None = Field(default=None, title="Quantization")
    """Keep the base in 8 or 4 bits to save memory, at some cost in precision; int8_products also computes in int8."""
    int8_products: tuple[Int8LayerConfig, ...] | None = Field(default=None, strict=False)
    """Layers that multiply in int8 with quantize = "int8_products"; default: measured when the run starts."""
    vae_dtype: Literal["fp32", "bf16"] | None = Field(default=None, title="VAE precision")
    """Precision of the VAE (kohya: no_half_vae keeps it in fp32); fp32 is safest."""
    vae_encode_tiling: bool | None = Field(default=None, title="VAE encoder tiling")
    """Encode images in overlapping tiles: needs much less memory, but changes the latents by about 5%."""
    text_encoder_batch_size: int | None = Field(default=None, ge=1, le=64)
    """Captions encoded at once; default: 8, or 1 on the CPU and with deterministic = true."""
    micro_batch: int | None = Field(default=None, ge=1, le=512, title="Micro-batch size")
    """Images processed at once; gradients are accumulated to the effective batch size, so results stay the same."""
    gradient_checkpointing: Literal["none", "full"] | BlockNames | None = Field(
        default=None, title="Gradient checkpointing"
    )
    """Gradient checkpointing: none (fast), full (least memory), or a list of UNet blocks such as "down_blocks.1"."""
    stream: StreamAmount | None = Field(default=None, title="Base streaming")
    """Keep this many blocks of the base in main memory, or all (full), and copy each to the GPU when it is needed."""
    attention: Literal["auto", "flash", "efficient", "math", "cudnn"] | None = Field(
        default=None, title="Attention backend"
    )
    """PyTorch attention backend (efficient replaces xformers); auto measures which is fastest on this GPU."""
    vae_tiling: bool | None = Field(default=None, title="VAE decoder tiling")
    """Decode previews in tiles: needs less memory."""
    preview_offload: bool | None = None
    """Move the UNet off the GPU while previews are decoded: needs less memory, takes seconds per preview."""
    allow_quantized: bool = Field(default=False, title="Allow quantization")
    """Allow quantizing the base for speed even if it fits unquantized, and when memory runs out during a run."""
    threads: int | None = Field(default=None, ge=1, le=256, title="CPU threads")
    """CPU threads for computation; default: the number of cores."""
    loader_workers: int | None = Field(default=None, ge=1, le=32, title="Loader workers")
    """Threads that load images and cached data in advance; default: as many as training needs, found while it runs."""
    prefetch_batches: int | None = Field(default=None, ge=1, le=64, title="Prefetched micro-batches")
    """Micro-batches loaded in advance; default: as many as training needs, found while it runs."""
    cuda_graphs: bool = Field(default=False, title="CUDA graphs")
    """Experimental: record the training step once per image shape and replay it as a CUDA graph."""
    compile: bool = Field(default=False, title="torch.compile")
    """Experimental: compile the UNet's transformer blocks with torch.compile; takes minutes and needs a compiler."""
    channels_last: bool = False
    """Experimental: use the channels-last memory format in the UNet if it is measured to be faster here."""
    fp16_accumulation: bool = Field(default=False, title="FP16 accumulation")
    """Experimental: accumulate fp16 matrix products in fp16; faster on GeForce GPUs, less precise."""
    deterministic: bool | None = None
    """Make results exactly repeatable on this machine, at some cost in speed; on the CPU they always are."""
    cache_gigabytes: float | None = Field(default=None, gt=0.0, title="Cache limit (GB)")
    """Disk space in GB for a run's cached latents and captions; if not all epochs fit, a few are cached at a time."""

    @property
    def is_streamed(self) -> bool:
        """Return whether blocks of the base are streamed from main memory."""
        return self.stream not in (None, "none")

    @property
    def is_quantized(self) -> bool:
        """Return whether the base is stored in 8 or 4 bits."""
        return self.quantize not in (None, "none")

    @property
    def products(self) -> tuple[Int8LayerConfig, ...]:
        """Return the layers that multiply in int8: none without "int8_products", and all before they are measured."""
        if self.quantize != "int8_products":
            return ()
        return ALL_LAYERS if self.int8_products is None else self.int8_products


class FallbackStep(Section):
    """One fallback step: the fit keys that change when it is taken; all others stay unchanged."""

    exact: bool
    """Whether the result stays bit-identical (on the CPU or with deterministic = true)."""
    gradient_checkpointing: Literal["none", "full"] | BlockNames | None = None
    """Same as in [fit]."""
    micro_batch: int | None = Field(default=None, ge=1, le=512)
    """Same as in [fit]."""
    vae_dtype: Literal["bf16"] | None = None
    """Same as in [fit]."""
    vae_encode_tiling: bool | None = None
    """Same as in [fit]."""
    text_encoder_batch_size: int | None = Field(default=None, ge=1, le=64)
    """Same as in [fit]."""
    vae_tiling: bool | None = None
    """Same as in [fit]."""
    preview_offload: bool | None = None
    """Same as in [fit]."""
    stream: Literal["full"] | None = None
    """Same as in [fit]."""
    quantize: Literal["int8", "nf4"] | None = None
    """Same as in [fit]; only if the job allows it."""
