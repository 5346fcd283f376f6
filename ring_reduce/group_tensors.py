"""torch tensors over the memory that a call gives by address, for process groups, which take nothing else."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from .arrays import ELEMENT_TYPES

if TYPE_CHECKING:
    import torch

_NAMES = {number: name for name, number in ELEMENT_TYPES.items()}


def dtype_of(element_type: int) -> torch.dtype:
    """torch's name for a type of the core."""
    import torch

    dtype: torch.dtype = getattr(torch, _NAMES[element_type])
    return dtype


def tensor_at(address: int, elements: int, element_type: int) -> torch.Tensor:
    """A view of memory on the host, which the caller keeps alive: of any library, and of what may only be read."""
    import torch

    dtype = dtype_of(element_type)
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
