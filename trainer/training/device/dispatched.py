"""Dispatcher operations that start no work on the device: views and allocations."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# These return a view of their input although their schema does not declare one.
_UNDECLARED_VIEWS = {aten._unsafe_view, aten._reshape_alias}


def is_view(func: OpOverload) -> bool:
    """Return whether an operation only returns a view of its input."""
    return func.is_view or func.overloadpacket in _UNDECLARED_VIEWS


def is_allocation(func: OpOverload) -> bool:
    """Return whether an operation only allocates memory, which starts no kernel."""
    return func.overloadpacket in _ALLOCATIONS
