"""The passes of an accumulator, on the CPU by the core and on GPUs by Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from . import _core
from .arrays import ELEMENT_TYPES

Tensors = Sequence[Any]


class Passes(Protocol):
    """What an accumulator does with the tensors of one device: each pass goes once over all of them.

    Scale and divisor are numbers, or float64 tensors of one element on the device, which the host does not wait for.
    """

    def accumulate(self, sums: Tensors, gradients: Tensors, fresh: Sequence[bool], scale: Any) -> None:
        """``sums[i] += scale * gradients[i]``, in the type of the sum; ``fresh`` ones are overwritten."""

    def divide(self, outputs: Tensors, sums: Tensors, divisor: Any) -> None:
        """``outputs[i] = sums[i] / divisor``, rounded once to the type of the output; 0 where the divisor is 0."""


class CpuPasses:
    """The core's, on torch's number of threads."""

    def accumulate(self, sums: Tensors, gradients: Tensors, fresh: Sequence[bool], scale: Any) -> None:
        import torch

        _core.accumulate(
            _addresses(sums),
            _addresses(gradients),
            _elements(sums),
            _types(gradients),
            list(fresh),
            float(scale),
            torch.get_num_threads(),
        )

    def divide(self, outputs: Tensors, sums: Tensors, divisor: Any) -> None:
        import torch

        _core.divide_into(
            _addresses(outputs),
            _addresses(sums),
            _elements(sums),
            _types(outputs),
            float(divisor),
            torch.get_num_threads(),
        )


class GpuPasses:
    """Triton's, on the current stream."""

    def accumulate(self, sums: Tensors, gradients: Tensors, fresh: Sequence[bool], scale: Any) -> None:
        from .kernels.accumulate import accumulate

        accumulate(sums, gradients, fresh=fresh, scale=scale)

    def divide(self, outputs: Tensors, sums: Tensors, divisor: Any) -> None:
        from .kernels.accumulate import divide_into

        divide_into(outputs, sums, divisor=divisor)


def passes_for(device: Any) -> Passes:
    """The passes of a torch device; ``TypeError`` if there are none."""
    if device.type == "cpu":
        return CpuPasses()
    if device.type == "cuda":
        return GpuPasses()
    raise TypeError(f"a parameter is on {device}; an accumulator takes those on the CPU and on CUDA devices")


def _addresses(tensors: Sequence[Any]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _elements(tensors: Sequence[Any]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _types(tensors: Sequence[Any]) -> list[int]:
    return [ELEMENT_TYPES[str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
