"""The passes over one segment that a transport in Python makes: in the core on the CPU, in Triton on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from . import _core
from .errors import RingError, text_of

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


# Whether there is a y, the scale of x, and the divisor. Calls in which every rank counts launch no other kernels.
_USUAL = ((True, 1.0, 1.0), (True, 1.0, 2.0), (True, 0.5, 1.0), (True, 0.5, 2.0), (False, 0.5, 1.0))
_USUAL_TYPES = ("float32", "bfloat16", "float16")


def prepare_device(device: torch.device, who: str) -> None:
    """Compiles and loads the kernels of the usual calls (aligned floats of 16 and 32 bits), so that none of them does
    while the other ranks wait: some seconds where Triton's cache on disk is empty.

    ``who`` is the rank, for the ``RingError`` where they can't be had.
    """
    import torch

    try:
        for name in _USUAL_TYPES:
            x = torch.zeros(1, dtype=getattr(torch, name), device=device)
            for with_y, scale, divisor in _USUAL:
                second = x if with_y else None
                DevicePasses().combine(x, x, second, x_scale=scale, y_scale=1.0, divisor=divisor)
    except Exception as error:  # of Triton, of the compiler that it starts, or of ptxas
        raise RingError(
            f"{who}: Triton can't make the passes for {device}: {text_of(error)}; it needs a C compiler, and a "
            f"directory that it may write to (TRITON_CACHE_DIR)"
        ) from error


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

        chunk.combine(out, x, y, x_scale=x_scale, y_scale=y_scale, divisor=divisor)
