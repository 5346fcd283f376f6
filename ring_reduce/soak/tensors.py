"""The tensors of a call: seeded values that their type holds exactly, in odd layouts, with poison around them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from .plan import CallPlan

POISON = 77  # every type holds it
_MARGIN = 5  # elements before and after

# Values are whole numbers of so many bits, times a power of two out of a range: exact in each type, and far from its
# ends, so that no sum of 16 ranks overflows float16.
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_LARGEST_EXPONENT = 3  # of the values: below 2**3
_SPREAD = 6  # binary orders of magnitude

Values = np.ndarray[Any, Any]


def values_of(plan: CallPlan, member: int) -> Values:
    """What a member of the ring puts in: float64, or int64 of integers."""
    numbers = np.random.default_rng([*plan.key, member])
    if plan.dtype.startswith("int"):
        limits = np.iinfo(plan.dtype)
        return numbers.integers(limits.min, limits.max, plan.elements, np.int64, endpoint=True)
    bits = _BITS[plan.dtype]
    whole = numbers.integers(-(2**bits) + 1, 2**bits, plan.elements).astype(np.float64)
    exponents = numbers.integers(_LARGEST_EXPONENT - bits - _SPREAD, _LARGEST_EXPONENT - bits, plan.elements)
    values: Values = np.ldexp(whole, exponents)
    if plan.special and plan.elements:
        where = numbers.integers(0, plan.elements, 3)
        values[where] = numbers.choice([np.nan, np.inf, -np.inf, -0.0], 3)
    return values


class Placed:
    """A tensor of a call within a larger, poisoned one."""

    def __init__(self, plan: CallPlan, elements: int) -> None:
        step = 2 if plan.layout == "strided" else 1
        begin = 0 if plan.layout == "whole" else _MARGIN
        size = begin + elements * step + _MARGIN
        if plan.arrays == "torch":
            self._around: Any = torch.full((size,), POISON, dtype=getattr(torch, plan.dtype))
        else:
            self._around = np.full(size, POISON, plan.dtype)
        self.tensor = self._around[begin : begin + elements * step : step]
        if plan.layout == "transposed":
            rows = next((n for n in (7, 3, 2) if elements % n == 0), 1)
            self.tensor = self.tensor.reshape(rows, elements // rows).T
        self._is_torch = plan.arrays == "torch"

    def put(self, values: Values) -> None:
        """Sets all elements, in the order of the tensor."""
        shaped = values.reshape(tuple(self.tensor.shape))
        if self._is_torch:
            self.tensor.copy_(torch.from_numpy(shaped))
        else:
            self.tensor[...] = shaped

    def untouched_around(self) -> bool:
        """Whether only the tensor itself was written. Loses its values."""
        if self._is_torch:
            self.tensor.fill_(POISON)
        else:
            self.tensor[...] = POISON
        return bool((self._around == POISON).all())


def values_in(tensor: Any) -> Values:
    """The elements in order: float64, or int64 of integers. Exact."""
    if isinstance(tensor, torch.Tensor):
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        # A copy in any case: to() gives the tensor itself where its type is wide.
        of_tensor: Values = np.array(tensor.to(wide).numpy()).ravel()
        return of_tensor
    of_array: Values = np.array(tensor, np.float64 if tensor.dtype.kind == "f" else np.int64).ravel()
    return of_array


def digest(values: Values) -> int:
    """The same on two ranks where all bits are."""
    return zlib.crc32(values.tobytes())
