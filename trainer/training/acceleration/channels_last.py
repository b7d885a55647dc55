"""Channels-last memory format for the UNet's frozen convolutions, which tensor cores prefer (experimental).

Convolutions preserve the format, but PyTorch's GroupNorm on a GPU converts its input to the default format and back.
Therefore the norm and SiLU of a residual block become one function that preserves the format: kernels made by
torch.compile if a compiler works, else several PyTorch operations. Results are the same up to rounding
(docs/decisions/0021).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from trainer.adapter.lean.residual import NormAndSilu, Normed, is_channels_last, lean_residuals
from trainer.config.job import Job
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import epoch_samples
from trainer.files.architecture import Config
from trainer.training.acceleration.attention_autotune import Clock, by_depth, reason, retry_once_on_oom, stopwatch
from trainer.training.acceleration.compile import compile_function, compiler_error
from trainer.training.device.device import DTYPES, numeric_settings
from trainer.training.device.offload import empty_cache
from trainer.training.device.out_of_memory import is_out_of_memory

SECONDS = 1.0
"""Time budget in seconds for all sizes in both formats, warm-up calls not included."""
MIN_GAIN = 0.03
"""Minimum gain as a fraction of the default format's time; smaller gains are measurement noise."""
TOLERANCE = 0.05
"""Largest allowed norm-relative difference of gradients. Generous: wrong ones are off by about 1."""


class Kernels:
    """GroupNorm with SiLU on channels-last feature maps; falls back to plain PyTorch if the compiler fails."""

    def __init__(self, *, compiled: bool) -> None:
        self.compiled = compiled
        self._forward = compile_function(_forward) if compiled else _forward
        self._backward = compile_function(_backward) if compiled else _backward

    @classmethod
    def of(cls, device: torch.device) -> Kernels:
        """Return kernels that are compiled if ``device`` is a GPU and a compiler works.

        On the CPU, compiling would take more time than it saves.
        """
        return cls(compiled=device.type == "cuda" and not compiler_error(device))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Normed:
        """Return SiLU(GroupNorm(x)) in the shape of x (B, C, h, w), and the mean and 1 / std of each group."""
        result: Normed = self._run(self._forward, _forward, x, weight, bias, groups, eps)
        return result

    def backward(
        self, grad_output: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
    ) -> Tensor:
        """Return the gradient of x (B, C, h, w) from ``grad_output``, the gradient of `forward`'s first result."""
        result: Tensor = self._run(self._backward, _backward, grad_output, x, weight, bias, mean, rstd)
        return result

    def _run(self, compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> Any:
        """Call ``compiled``, or ``plain`` after a failure to compile; neither changes its inputs, so both can run."""
        if self.compiled:
            try:
                return compiled(*inputs)
            except Exception as error:  # compilers fail in many ways; any other error is raised again by the plain call
                if is_out_of_memory(error):
                    raise
                self.compiled = False
        return plain(*inputs)


class ChannelsLastNormAndSilu(NormAndSilu):
    """Frozen GroupNorm with SiLU that preserves the memory format of its input."""

    kernels: Kernels

    def norm_silu(self, x: Tensor) -> Normed:
        """Return SiLU(GroupNorm(x)), mean and 1 / std for x (B, C, h, w) in either memory format."""
        if not is_channels_last(x):
            return super().norm_silu(x)
        return self.kernels.forward(x, self.weight, self.bias, self.num_groups, self.eps)

    def gradient(self, grad_output: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        """Return the gradient of x, in the memory format of x."""
        if not is_channels_last(x):
            return super().gradient(grad_output, x, mean, rstd)
        grad_output = grad_output.contiguous(memory_format=torch.channels_last)
        return self.kernels.backward(grad_output, x, self.weight, self.bias, mean, rstd)


def convert_to_channels_last(unet: nn.Module, kernels: Kernels) -> None:
    """Convert frozen convolutions to channels-last; make the norms of residual blocks and of the output preserve it.

    Trainable weights keep their format. Parameters stay the same objects; only the data of convolution weights moves.
    """
    lean_residuals(unet)
    for module in unet.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.requires_grad:
            module.weight.data = module.weight.data.to(memory_format=torch.channels_last)
        elif type(module) is NormAndSilu:
            module.__class__ = ChannelsLastNormAndSilu
            cast(ChannelsLastNormAndSilu, module).kernels = kernels


def _forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Normed:
    """Return SiLU(GroupNorm(x)), mean and 1 / std; computed in fp32 or wider, so the output is rounded once."""
    parts = _to_groups(x, groups)
    variance, mean = torch.var_mean(parts, (1, 3), correction=0, keepdim=True)
    rstd = (variance + eps).rsqrt()
    scale, shift = (_to_groups(row[None, :, None, None], groups) for row in (weight, bias))
    return _from_groups(F.silu((parts - mean) * rstd * scale + shift), x), mean, rstd


def _backward(grad_output: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of x, by the chain rule through SiLU and then the norm.

    With u the normalized maps and g their gradient, the result is rstd · (g - mean(g) - u · mean(g · u)).
    """
    groups = mean.shape[2]
    normed = (_to_groups(x, groups) - mean) * rstd
    scale, shift = (_to_groups(row[None, :, None, None], groups) for row in (weight, bias))
    grad_normed = torch.ops.aten.silu_backward(_to_groups(grad_output, groups), normed * scale + shift) * scale
    mean_terms = grad_normed.mean((1, 3), keepdim=True) + normed * (grad_normed * normed).mean((1, 3), keepdim=True)
    return _from_groups((grad_normed - mean_terms) * rstd, x)


def _to_groups(x: Tensor, groups: int) -> Tensor:
    """Return channels-last (B, C, h, w) as (B, h · w, groups, C / groups) in fp32 or wider."""
    rows = x.permute(0, 2, 3, 1).flatten(1, 2)
    return rows.reshape(*rows.shape[:2], groups, -1).to(torch.promote_types(x.dtype, torch.float32))


def _from_groups(parts: Tensor, like: Tensor) -> Tensor:
    """Undo `_to_groups`: return feature maps with the shape and dtype of ``like``."""
    batch, channels, height, width = like.shape
    return parts.reshape(batch, height, width, channels).permute(0, 3, 1, 2).to(like.dtype)


@dataclass(frozen=True)
class ResidualShape:
    """Sizes of the feature maps of a residual block."""

    images: int
    inputs: int
    """Number of input channels."""
    outputs: int
    """Number of output channels."""
    height: int
    width: int


@dataclass(frozen=True)
class LayoutChoice:
    """Whether to use channels-last feature maps, and why."""

    is_faster: bool
    sentence: str
    """Sentence for the run's log."""


def autotune_layout(
    job: Job, unet: Config, images: Iterable[ImageRecord], clock: Callable[[float], Clock] = stopwatch
) -> LayoutChoice | None:
    """Decide by timing whether a frozen, planned job uses channels-last; return None if there is nothing to decide.

    Nothing is decided for a deterministic run, because timings vary; it uses channels-last if the job sets it. Raises
    RuntimeError if memory runs out twice in a row.
    """
    if not job.fit.channels_last:
        return None
    if job.recipe.layers == "all":  # every convolution with a LoRA would convert its maps and convert them back
        return LayoutChoice(
            False, 'fit.channels_last is not used: it does not support a LoRA on convolutions (recipe.layers = "all").'
        )
    if job.fit.deterministic:  # the job keeps channels-last as the user set it
        return None
    buckets = Counter(image.bucket for image, _ in epoch_samples(images, 0))
    (size, _), *_ = buckets.most_common(1)
    blocks = residual_blocks(unet, size, min(job.fit.micro_batch or 1, job.recipe.effective_batch))
    if not blocks:
        return LayoutChoice(
            False, "fit.channels_last is not used: the base's config does not give the number of residual blocks."
        )
    device, dtype = torch.device(job.fit.device or "cpu"), DTYPES[job.fit.dtype or "fp32"]
    measure = clock(SECONDS / (2 * len(blocks)))
    try:
        with numeric_settings(job), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            kernels = Kernels.of(device)
            timings = [
                (count, retry_once_on_oom(partial(_seconds, maps, unet, kernels, device, dtype, measure), device))
                for maps, count in blocks.items()
            ]
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return LayoutChoice(False, f"fit.channels_last is not used: timing it failed ({reason(error)}).")
    finally:
        empty_cache(device)
    contiguous, channels_last = (sum(count * seconds[index] for count, seconds in timings) for index in (0, 1))
    pays = channels_last < (1 - MIN_GAIN) * contiguous
    comparison = (
        f"residual blocks take {channels_last * 1e3:.2f} ms per micro-batch with it, {contiguous * 1e3:.2f} ms without"
    )
    return LayoutChoice(pays, f"fit.channels_last is {'used' if pays else 'not used'}: {comparison}.")


def residual_blocks(unet: Config, size: tuple[int, int], images: int) -> Counter[ResidualShape]:
    """Estimate how many residual blocks of each size a UNet has, for images of ``size`` (width, height) in pixels.

    Up blocks are counted with twice the input channels, because skip connections are concatenated there. The result is
    empty if the config does not give the number of layers per depth.
    """
    counts: Counter[ResidualShape] = Counter()
    depths = list(zip(unet["block_out_channels"], by_depth(unet, "layers_per_block", 2), strict=False))
    for depth, (channels, layers) in enumerate(depths):
        width, height = (-(-side // (8 << depth)) for side in size)
        # The deepest level also has the two blocks of the middle block.
        counts[ResidualShape(images, channels, channels, height, width)] += layers + 2 * (depth == len(depths) - 1)
        counts[ResidualShape(images, 2 * channels, channels, height, width)] += layers + 1
    return counts


def _seconds(
    maps: ResidualShape, unet: Config, kernels: Kernels, device: torch.device, dtype: torch.dtype, clock: Clock
) -> tuple[float, float]:
    """Return the seconds for a block's forward and backward together, in the default format and in channels-last.

    Raises RuntimeError if the gradients differ.
    """
    embedding_width = unet["block_out_channels"][0] * 4
    block = ResnetBlock2D(
        in_channels=maps.inputs,
        out_channels=maps.outputs,
        temb_channels=embedding_width,
        groups=unet.get("norm_num_groups") or 32,
    )
    block.requires_grad_(requires_grad=False).to(device, dtype)
    sizes = (maps.height, maps.width)
    x = torch.randn(maps.images, maps.inputs, *sizes, device=device, dtype=dtype).requires_grad_()
    grad_output = torch.randn(maps.images, maps.outputs, *sizes, device=device, dtype=dtype)
    embedding = torch.randn(maps.images, embedding_width, device=device, dtype=dtype)

    def input_gradient(x: Tensor, grad_output: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(block(x, embedding), x, grad_output)
        return gradient

    lean_residuals(block)
    expected = input_gradient(x, grad_output)
    contiguous = clock(lambda: input_gradient(x, grad_output))
    convert_to_channels_last(block, kernels)
    x_last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    grad_output_last = grad_output.to(memory_format=torch.channels_last)
    # This first call also compiles the kernels, so the clock below does not count that.
    difference = float(
        (input_gradient(x_last, grad_output_last).float() - expected.float()).norm() / expected.float().norm()
    )
    if not difference <= TOLERANCE:
        raise RuntimeError(f"gradients differ by {100 * difference:.3g}%")
    return contiguous, clock(lambda: input_gradient(x_last, grad_output_last))
