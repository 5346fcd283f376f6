"""The passes over one segment that a transport in Python makes: in the core on the CPU, in Triton on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from . import _core

if TYPE_CHECKING:
    import torch


class ChunkPasses(Protocol):
    """What the ring computes. Tensors are 1-D, contiguous, and of one type, size and device."""

    def combine(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor | None,
        *,
        x_scale: float,
        y_scale: float,
        divisor: float,
    ) -> None:
        """``out = (x * x_scale + y * y_scale) / divisor`` as ``Combine`` of csrc/passes.h; ``out`` may be x or y."""


class CpuPasses:
    """The core's, in the widest vectors of this processor. Other threads run Python meanwhile."""

    def __init__(self, element_type: int) -> None:
        self._type = element_type

    def combine(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor | None,
        *,
        x_scale: float,
        y_scale: float,
        divisor: float,
    ) -> None:
        second = y.data_ptr() if y is not None else 0
        _core.combine(
            self._type, out.data_ptr(), x.data_ptr(), second, out.numel(), x_scale, y_scale, divisor
        )


class DevicePasses:
    """Triton's, on the current stream; in Triton's interpreter on CPU tensors too."""

    def combine(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor | None,
        *,
        x_scale: float,
        y_scale: float,
        divisor: float,
    ) -> None:
        from .kernels import chunk

        chunk.combine([out], x, y, x_scale=x_scale, y_scale=y_scale, divisor=divisor)
