"""Tensors that still lie in safetensors files: renamed, cut and transposed at no cost, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer.base.families import TextEncoderFacts
from trainer.errors import BaseModelError
from trainer.files.header import read_header
from trainer.protocol.files import long_path
from trainer.protocol.places import is_disk_full

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_UNET = "model.diffusion_model."
_VAE = "first_stage_model."
# diffusers before 0.18 named the VAE's attention so; the published SD 1.5 folder and sd-vae-ft-mse still do.
_OLD_VAE_ATTENTION = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
_OPTIONAL_LEVEL = "text_model."


class StoredTensor:
    """Stands for a tensor in a file, with the few operations that diffusers' checkpoint converters use on one.

    Each gives another StoredTensor; `read` does the reading and what was asked for on the way.
    """

    def __init__(self, likeness: Tensor, read: Callable[[], Tensor]) -> None:
        self._likeness = likeness
        self.read = read

    @property
    def shape(self) -> torch.Size:
        """The shape that `read` will give."""
        return self._likeness.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions that `read` will give."""
        return self._likeness.ndim

    @property
    def T(self) -> StoredTensor:  # noqa: N802
        """The transposed matrix."""
        return self._after(lambda tensor: tensor.T)

    def __getitem__(self, index: Any) -> StoredTensor:
        return self._after(lambda tensor: tensor[index])

    def contiguous(self) -> StoredTensor:
        """Itself: what is read is copied where it belongs anyway."""
        return self

    clone = detach = contiguous

    def _after(self, change: Callable[[Tensor], Tensor]) -> StoredTensor:
        return StoredTensor(change(self._likeness), lambda: change(self.read()))


class StoredWeights:
    """The tensors of one or more safetensors files by name, while the block lasts.

    Files are read with `pread`, not mapped: a mapping counts as this process's memory as its pages are read, and on
    Windows the whole file counts as committed from the start.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._open = ExitStack()

    def __enter__(self) -> dict[str, StoredTensor]:
        try:
            return {name: tensor for path in self._files for name, tensor in self._tensors(path).items()}
        except BaseException:
            self._open.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if isinstance(error, OSError) and is_disk_full(error):
            return  # of no reading: who tells how far it has come writes that down
        if isinstance(error, (SafetensorError, OSError)):
            names = ", ".join(path.name for path in self._files)
            sentence = f'Reading "{names}" failed: {error}.'
            raise BaseModelError("base.unreadable", sentence, "Check the disk, or copy the file again.") from error

    def _tensors(self, path: Path) -> dict[str, StoredTensor]:
        header = read_header(path)
        try:
            file = self._open.enter_context(safe_open(long_path(path), framework="pt", backend="pread"))
        except (SafetensorError, OSError) as error:
            sentence = f'"{path}" cannot be read: {error}.'
            raise BaseModelError("base.unreadable", sentence, "Check the disk, or copy the file again.") from error
        return {
            name: StoredTensor(
                torch.empty(info.shape, dtype=_DTYPES[info.dtype], device="meta"),
                partial(file.get_tensor, name),
            )
            for name, info in header.tensors.items()
            if info.dtype in _DTYPES
        }


Stored = Mapping[str, StoredTensor]


def unet_of_single_file(stored: Stored, unet: nn.Module) -> Stored:
    """Return the UNet's tensors of a single file (LDM layout) under diffusers' names."""
    return _converted(convert_ldm_unet_checkpoint(_starting(stored, _UNET), unet.config))


def vae_of_file(stored: Stored, vae: nn.Module) -> Stored:
    """Return the VAE's tensors under diffusers' names, from a whole single file or a VAE alone in either layout."""
    own = {name.removeprefix(_VAE): tensor for name, tensor in _starting(stored, _VAE).items()} or dict(stored)
    if "encoder.conv_norm_out.weight" in own:
        return {_modern(name): tensor for name, tensor in own.items()}
    return _converted(convert_ldm_vae_checkpoint(own, vae.config))


def text_encoder_of_single_file(facts: TextEncoderFacts, stored: Stored, encoder: nn.Module) -> Stored:
    """Return a text encoder's tensors of a single file under transformers' names."""
    own = _starting(stored, facts.prefix)
    if facts.open_clip:
        return _converted(convert_open_clip_checkpoint(encoder, own, facts.prefix))
    return {name.removeprefix(facts.prefix): tensor for name, tensor in own.items()}


def _starting(stored: Stored, prefix: str) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}


def _converted(tensors: Mapping[str, StoredTensor | None]) -> Stored:
    """Leave out what a converter looked for and did not find; placing names what is missing in the end."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _modern(name: str) -> str:
    for old, new in _OLD_VAE_ATTENTION.items():
        name = name.replace(old, new)
    return name


Placer = Callable[[nn.Module, str, Tensor], bool]
"""Takes a module, the name of its parameter and the full-precision tensor; True when it placed the tensor itself."""


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
