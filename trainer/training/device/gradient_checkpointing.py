"""Gradient checkpointing: blocks that drop their activations and recompute them in backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trainer.errors import JobError

# The attribute of diffusers and transformers modules that switches checkpointing on.
FLAG = "gradient_checkpointing"


def set_checkpointing(
    unet: UNet2DConditionModel,
    text_encoders: Iterable[PreTrainedModel],
    choice: Literal["none", "full"] | Sequence[str],
    *,
    dropouts: bool,
    frozen: Collection[nn.Module] = (),
) -> None:
    """Set gradient checkpointing to ``choice``, whatever it was before; gradients stay the same.

    "none": nowhere. "full": in every block of the UNet and every layer of the text encoders, except ``frozen`` ones:
    they compute no gradients, for which checkpointing would make them save activations. A list: in these blocks of the
    UNet, such as "down_blocks.1" or "mid_block". Call this again after a text encoder's ``eval()``, which turns
    checkpointing off there. The random state is saved for recomputation only if there are ``dropouts``, because CUDA
    graphs cannot capture that copy. Raises JobError for a block that the UNet does not have.
    """
    blocks = checkpointing_blocks(unet)
    chosen = () if choice == "none" else tuple(blocks) if choice == "full" else tuple(choice)
    unknown = [name for name in chosen if name not in blocks]
    if unknown:
        raise JobError(
            "job.gradient_checkpointing",
            f"Could not set fit.gradient_checkpointing: it names {', '.join(unknown)}, which this base does not have.",
            f'Choose from {", ".join(blocks)}, or use "none" or "full".',
        )
    for encoder in text_encoders:
        _switch_layers(encoder, on=choice == "full" and encoder not in frozen, dropouts=dropouts)
    unet.enable_gradient_checkpointing(partial(_checkpointed, dropouts=dropouts))
    for name, block in blocks.items():
        if name not in chosen:
            _switch_off(block)


def checkpointing_blocks(unet: UNet2DConditionModel) -> dict[str, nn.Module]:
    """Return the UNet's blocks by the names used in jobs, in the order of the forward pass."""
    down = {f"down_blocks.{index}": block for index, block in enumerate(unet.down_blocks)}
    middle = {} if unet.mid_block is None else {"mid_block": unet.mid_block}
    up = {f"up_blocks.{index}": block for index, block in enumerate(unet.up_blocks)}
    return down | middle | up


def _checkpointed(module: nn.Module, *inputs: Any, dropouts: bool) -> Any:
    """Run a module under PyTorch's checkpointing, through ``__call__`` so that its hooks run."""
    return checkpoint(module.__call__, *inputs, use_reentrant=False, preserve_rng_state=dropouts)


def _switch_off(block: nn.Module) -> None:
    """Turn checkpointing off in a block and in the transformers inside it."""
    for module in block.modules():
        if hasattr(module, FLAG):
            setattr(module, FLAG, False)


def _switch_layers(encoder: PreTrainedModel, *, on: bool, dropouts: bool) -> None:
    """Turn checkpointing on or off for a text encoder's layers.

    transformers checkpoints a layer only in train mode. Only the layer itself is put into train mode, not its
    submodules, whose dropouts would become active.
    """
    # Enabling adds a hook to the embeddings. Disabling does not remove it, and enabling again would add a second one.
    encoder.disable_input_require_grads()
    if on:
        encoder.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": dropouts})
    else:
        encoder.activation_checkpointing_disable()
    for module in encoder.modules():
        if hasattr(module, FLAG):
            module.training = on
