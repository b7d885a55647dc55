"""Lazy tensors from safetensors files: rename, slice and transpose them for free, then read them one by one."""

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
# Names of the VAE's attention in diffusers before 0.18; the published SD 1.5 folder and sd-vae-ft-mse still use them.
_OLD_VAE_ATTENTION = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
_OPTIONAL_LEVEL = "text_model."


class StoredTensor:
    """Lazy tensor in a file, with the few operations that diffusers' checkpoint converters use.

    Each operation returns another StoredTensor; `read` reads the tensor and applies them.
    """

    def __init__(self, likeness: Tensor, read: Callable[[], Tensor], format: str = "") -> None:
        self._likeness = likeness
        self.read = read
        self.format = format
        """Number format in the file, as safetensors spells it ("F16"); "" after an operation."""

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the tensor that `read` will return."""
        return self._likeness.shape

    @property
    def ndim(self) -> int:
        """Return the number of dimensions of the tensor that `read` will return."""
        return self._likeness.ndim

    @property
    def T(self) -> StoredTensor:  # noqa: N802
        """Return the transposed matrix."""
        return self._after(lambda tensor: tensor.T)

    def __getitem__(self, index: Any) -> StoredTensor:
        return self._after(lambda tensor: tensor[index])

    def contiguous(self) -> StoredTensor:
        """Return this tensor itself, because tensors are copied to their destination after reading anyway."""
        return self

    clone = detach = contiguous

    def _after(self, change: Callable[[Tensor], Tensor]) -> StoredTensor:
        return StoredTensor(change(self._likeness), lambda: change(self.read()))


class StoredWeights:
    """Context manager that opens safetensors files and returns their tensors by name.

    Files are read with `pread` instead of being memory-mapped: mapped pages count as this process's memory after they
    are read, and on Windows, the whole file counts as committed from the start.
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
            return  # raised by reporting progress, which writes to a full disk, and not by reading
        if isinstance(error, (SafetensorError, OSError)):
            names = ", ".join(path.name for path in self._files)
            sentence = f'Could not read "{names}": {error}.'
            raise BaseModelError("base.unreadable", sentence, "Check the disk, or copy the file again.") from error

    def _tensors(self, path: Path) -> dict[str, StoredTensor]:
        header = read_header(path)
        try:
            file = self._open.enter_context(safe_open(long_path(path), framework="pt", backend="pread"))
        except (SafetensorError, OSError) as error:
            sentence = f'Could not read "{path}": {error}.'
            raise BaseModelError("base.unreadable", sentence, "Check the disk, or copy the file again.") from error
        return {
            name: StoredTensor(
                torch.empty(info.shape, dtype=_DTYPES[info.dtype], device="meta"),
                partial(file.get_tensor, name),
                info.dtype,
            )
            for name, info in header.tensors.items()
            if info.dtype in _DTYPES
        }


Stored = Mapping[str, StoredTensor]


def unet_of_single_file(stored: Stored, unet: nn.Module) -> Stored:
    """Return the UNet's tensors from a single file (LDM layout), with diffusers' names."""
    return _converted(convert_ldm_unet_checkpoint(_starting(stored, _UNET), unet.config))


def vae_of_file(stored: Stored, vae: nn.Module) -> Stored:
    """Return the VAE's tensors with diffusers' names, from a single-file base or a separate VAE in either layout."""
    own = {name.removeprefix(_VAE): tensor for name, tensor in _starting(stored, _VAE).items()} or dict(stored)
    if "encoder.conv_norm_out.weight" in own:
        return {_current_name(name): tensor for name, tensor in own.items()}
    return _converted(convert_ldm_vae_checkpoint(own, vae.config))


def text_encoder_of_single_file(facts: TextEncoderFacts, stored: Stored, encoder: nn.Module) -> Stored:
    """Return a text encoder's tensors from a single file, with transformers' names."""
    own = _starting(stored, facts.prefix)
    if facts.open_clip:
        return _converted(convert_open_clip_checkpoint(encoder, own, facts.prefix))
    return {name.removeprefix(facts.prefix): tensor for name, tensor in own.items()}


def _starting(stored: Stored, prefix: str) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}


def _converted(tensors: Mapping[str, StoredTensor | None]) -> Stored:
    """Return the tensors that a converter found; `require_fitting` reports later which ones are missing."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _current_name(name: str) -> str:
    for old, new in _OLD_VAE_ATTENTION.items():
        name = name.replace(old, new)
    return name


Placer = Callable[[nn.Module, str, Tensor], bool]
"""Function of a module, a parameter name and the full-precision tensor; returns True if it placed the tensor."""


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

    Needs memory for the model plus one tensor. Names may or may not include the level `text_model.`; tensors that the
    model does not have are ignored. `progress` is called with the number of placed tensors and the total. Raises
    BaseModelError for missing tensors or wrong shapes before it reads any tensor.
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
    """Return the stored tensors by model parameter name; raise BaseModelError if one is missing or has a wrong shape.

    Reads only headers; the model may be on the meta device.
    """
    known = _by_model_names(model, stored)
    _check(model, known, source)
    return known


def _by_model_names(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by model parameter name, adding or removing the prefix that transformers 5.6 dropped."""
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
        sentence = (
            f"Could not load {source}: {len(missing)} tensors of its {type(model).__name__} are missing: {listed}."
        )
        raise BaseModelError("base.incomplete", sentence, "Download the whole model again, or from another source.")
    for name, parameter in model.named_parameters():
        if known[name].shape != parameter.shape:
            found, wanted = tuple(known[name].shape), tuple(parameter.shape)
            sentence = f"Could not load {source}: {name} has shape {found}, but {type(model).__name__} needs {wanted}."
            raise BaseModelError("base.other_shape", sentence, "The model has been modified: choose another base.")


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; copy it first if it is a slice, which would keep the whole tensor in memory."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.contiguous().to(device) if whole else tensor.clone(memory_format=torch.contiguous_format).to(device)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Create the only buffers that these models have: CLIP's position ids 0 to 76, which files may omit."""
    for name, buffer in list(model.named_buffers()):
        if not name.endswith("position_ids"):
            raise AssertionError(f"{type(model).__name__} has an unknown buffer {name}")
        module, leaf = _owner(model, name)
        module.register_buffer(leaf, torch.arange(buffer.shape[-1], device=device)[None], persistent=False)
