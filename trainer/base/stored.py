"""Tensors that still lie in safetensors files: renamed, cut and transposed at no cost, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

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
