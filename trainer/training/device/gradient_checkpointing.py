"""Gradient checkpointing: which blocks forget their activations and compute them again in backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trainer.errors import JobError

# The switch that diffusers puts into every module that can checkpoint.
FLAG = "gradient_checkpointing"


def set_checkpointing(
    unet: UNet2DConditionModel,
    text_encoders: Iterable[PreTrainedModel],
    choice: Literal["none", "full"] | Sequence[str],
    *,
    dropouts: bool,
) -> None:
    """Switches checkpointing to ``choice``, whatever it was before; gradients stay the same.

    Only where there are ``dropouts`` is the state of chance kept for the second time: no CUDA graph can do that.

    none: nowhere. full: every block of the UNet and every layer of the text encoders. A list: these blocks of the
    UNet, such as "down_blocks.1" or "mid_block". Call it again after a text encoder's ``eval()``, which ends it there.
    Raises JobError for a block that the UNet does not have.
    """
    blocks = checkpointing_blocks(unet)
    chosen = () if choice == "none" else tuple(blocks) if choice == "full" else tuple(choice)
    unknown = [name for name in chosen if name not in blocks]
    if unknown:
        raise JobError(
            "job.checkpointing",
            f"fit.checkpointing names {', '.join(unknown)}, which this base does not have.",
            f"Choose from {', '.join(blocks)}, or write none or full.",
        )
    for encoder in text_encoders:
        _switch_layers(encoder, on=choice == "full", dropouts=dropouts)
    unet.enable_gradient_checkpointing(partial(_checkpointed, dropouts=dropouts))
    for name, block in blocks.items():
        if name not in chosen:
            _switch_off(block)


def checkpointing_blocks(unet: UNet2DConditionModel) -> dict[str, nn.Module]:
    """The UNet's blocks by the names that a job may list, in the order of the forward pass."""
    down = {f"down_blocks.{index}": block for index, block in enumerate(unet.down_blocks)}
    middle = {} if unet.mid_block is None else {"mid_block": unet.mid_block}
    up = {f"up_blocks.{index}": block for index, block in enumerate(unet.up_blocks)}
    return down | middle | up


def _checkpointed(module: nn.Module, *inputs: Any, dropouts: bool) -> Any:
    """By ``__call__``, so that hooks act."""
    return checkpoint(module.__call__, *inputs, use_reentrant=False, preserve_rng_state=dropouts)


def _switch_off(block: nn.Module) -> None:
    """Stops a block, and the transformers inside it that checkpoint by themselves."""
    for module in block.modules():
        if hasattr(module, FLAG):
            setattr(module, FLAG, False)


def _switch_layers(encoder: PreTrainedModel, *, on: bool, dropouts: bool) -> None:
    """Lets a text encoder's layers checkpoint, or stops them.

    transformers checkpoints only layers in train mode. So the layer itself is put into it and nothing inside it, where
    dropouts would wake up.
    """
    # What enabling does to the embeddings, disabling leaves, and a second time it would be done twice.
    encoder.disable_input_require_grads()
    if on:
        encoder.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": dropouts})
    else:
        encoder.activation_checkpointing_disable()
    for module in encoder.modules():
        if hasattr(module, FLAG):
            module.training = on
