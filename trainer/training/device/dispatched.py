"""What PyTorch's dispatcher is sent that costs a device nothing."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# These return the memory they were given without saying so.
_UNDECLARED_VIEWS = {aten._unsafe_view, aten._reshape_alias}


def is_view(func: OpOverload) -> bool:
    """Whether it only looks at memory in another way."""
    return func.is_view or func.overloadpacket in _UNDECLARED_VIEWS


def is_allocation(func: OpOverload) -> bool:
    """Whether it only takes memory, which starts nothing on a card."""
    return func.overloadpacket in _ALLOCATIONS
