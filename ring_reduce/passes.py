"""The passes of an accumulator, on the CPU by the core and on GPUs by Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import _core
from .arrays import ELEMENT_TYPES

Tensors = Sequence[Any]


@dataclass(frozen=True)
class Sum:
    """A parameter's part of the sums. Asking a tensor for its address and size takes longer than adding a small one."""

    tensor: Any
    address: int
    elements: int


class Passes(Protocol):
    """What an accumulator does with the tensors of one device: each pass goes once over all of them.

    Scale and divisor are numbers, or float64 tensors of one element on the device, which the host does not wait for.
    """

    def accumulate(self, sums: Sequence[Sum], gradients: Tensors, fresh: Sequence[bool], scale: Any) -> None:
        """``sums[i] += scale * gradients[i]``, in the type of the sum; ``fresh`` ones are overwritten."""

    def divide(self, outputs: Tensors, sums: Sequence[Sum], divisor: Any) -> None:
        """``outputs[i] = sums[i] / divisor``, rounded once to the type of the output; 0 where the divisor is 0."""


class CpuPasses:
    """The core's, on torch's number of threads."""

    def accumulate(self, sums: Sequence[Sum], gradients: Tensors, fresh: Sequence[bool], scale: Any) -> None:
        import torch

        _core.accumulate(
            [each.address for each in sums],
            _addresses(gradients),
            [each.elements for each in sums],
            _types(gradients),
            list(fresh),
            float(scale),
            torch.get_num_threads(),
        )

    def divide(self, outputs: Tensors, sums: Sequence[Sum], divisor: Any) -> None:
        import torch

        _core.divide_into(
            _addresses(outputs),
            [each.address for each in sums],
            [each.elements for each in sums],
            _types(outputs),
            float(divisor),
            torch.get_num_threads(),
        )


class GpuPasses:
    """Triton's, on the current stream. ``ImportError`` where there is no Triton."""

    def __init__(self) -> None:
        try:
            from .kernels import accumulate as kernels
        except ImportError as error:
            raise ImportError(
                f"an accumulator of parameters on a GPU needs Triton ({error}): python -m pip install triton"
            ) from error
        self._kernels = kernels

    def accumulate(self, sums: Sequence[Sum], gradients: Tensors, fresh: Sequence[bool], scale: Any) -> None:
        self._kernels.accumulate([each.tensor for each in sums], gradients, fresh=fresh, scale=scale)

    def divide(self, outputs: Tensors, sums: Sequence[Sum], divisor: Any) -> None:
        self._kernels.divide_into(outputs, [each.tensor for each in sums], divisor=divisor)


def passes_for(device: Any) -> Passes:
    """The passes of a torch device; ``TypeError`` if there are none."""
    if device.type == "cpu":
        return CpuPasses()
    if device.type == "cuda":
        return GpuPasses()
    raise TypeError(f"a parameter is on {device}; an accumulator takes those on the CPU and on CUDA devices")


def _addresses(tensors: Tensors) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _types(tensors: Tensors) -> list[int]:
    return [_type(tensor.dtype) for tensor in tensors]


@functools.cache
def _type(dtype: Any) -> int:
    return ELEMENT_TYPES[str(dtype).removeprefix("torch.")]
