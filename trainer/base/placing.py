"""Puts stored weights into an empty model, one tensor at a time, cast and quantised on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from trainer.base.stored import StoredTensor
from trainer.errors import BaseModelError

Placer = Callable[[nn.Module, str, Tensor], bool]
"""Takes a module, the name of its parameter and the full-precision tensor; True when it placed the tensor itself."""

_OPTIONAL_LEVEL = "text_model."


def place_weights(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    *,
    source: str,
    dtype: torch.dtype,
    device: torch.device,
    placer: Placer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill a model on the meta device with the stored tensors, each cast to `dtype` on the CPU and moved to `device`.

    Needs the memory of what is kept and of one tensor. Names may have or lack the level `text_model.`; what the model
    does not have is left out. `progress` is told how many tensors are placed. Raises BaseModelError that names missing
    tensors or wrong shapes, before reading any.
    """
    known = require_fitting(model, stored, source)
    names = [name for name, _ in model.named_parameters()]
    for done, name in enumerate(names, start=1):
        module, leaf = _owner(model, name)
        tensor = known[name].read().to(dtype)
        if placer is None or not placer(module, leaf, tensor):
            module.register_parameter(leaf, nn.Parameter(_own(tensor, device), requires_grad=False))
        if progress:
            progress(done, len(names))
    _fill_buffers(model, device)
    model.eval().requires_grad_(False)


def require_fitting(model: nn.Module, stored: Mapping[str, StoredTensor], source: str) -> dict[str, StoredTensor]:
    """Return the stored tensors by the model's names; raises BaseModelError when one is missing or of another shape.

    Nothing but headers is read, and the model may be empty.
    """
    known = _in_the_models_names(model, stored)
    _check(model, known, source)
    return known


def _in_the_models_names(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Name the tensors as the model does: transformers 5.6 dropped a level that all published files have."""
    wanted = {name for name, _ in model.named_parameters()}
    known = {}
    for name, tensor in stored.items():
        for spelling in (name, name.removeprefix(_OPTIONAL_LEVEL), _OPTIONAL_LEVEL + name):
            if spelling in wanted:
                known[spelling] = tensor
    return known


def _check(model: nn.Module, known: Mapping[str, StoredTensor], source: str) -> None:
    missing = [name for name, _ in model.named_parameters() if name not in known]
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        sentence = f"{source} lacks {len(missing)} of the tensors of its {type(model).__name__}: {listed}."
        raise BaseModelError("base.incomplete", sentence, "Get the whole model again or from another source.")
    for name, parameter in model.named_parameters():
        if known[name].shape != parameter.shape:
            found, wanted = tuple(known[name].shape), tuple(parameter.shape)
            sentence = f"{source} has {name} in the shape {found} where {type(model).__name__} needs {wanted}."
            raise BaseModelError("base.other_shape", sentence, "It is a changed model: choose another base.")


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to the device; a slice gets memory of its own, so that it does not keep the whole alive."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.contiguous().to(device) if whole else tensor.clone(memory_format=torch.contiguous_format).to(device)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Make the only buffers of these models, CLIP's position ids 0 to 76, which no file need hold."""
    for name, buffer in list(model.named_buffers()):
        if not name.endswith("position_ids"):
            raise AssertionError(f"{type(model).__name__} has a buffer {name} that loading does not know")
        module, leaf = _owner(model, name)
        module.register_buffer(leaf, torch.arange(buffer.shape[-1], device=device)[None], persistent=False)
