"""A plain copy of the same bytes by all ranks at once: what memory allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .base import DTYPES, Op, Peer, Place

if TYPE_CHECKING:
    import torch


class CopyPeer(Peer):
    """The memory limit: every rank copies the tensor to its output. There is no such thing in place.

    On the CPU by numpy, whose copy is libc's memcpy. That streams past the caches when the size calls for it, and so is
    the fastest plain copy at hand (torch's copy_ is not). On a GPU by copy_, which is the driver's.
    """

    name = "copy"
    ops: tuple[Op, ...] = (Op.SUM,)
    reduces = False
    devices = frozenset({"cpu", "cuda"})
    dtypes = DTYPES

    @staticmethod
    def missing(device: str) -> str | None:
        """Nothing is."""
        return None

    def setup(self, place: Place) -> None:
        """Needs no other rank."""
        import torch

        self._on_cpu = place.device.type == "cpu"
        self._int16, self._bfloat16 = torch.int16, torch.bfloat16

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """Copies and does not reduce. Raises ``ValueError`` in place."""
        if out is x:
            raise ValueError("copy: a tensor can't be copied in place")
        if self._on_cpu:
            if x.dtype is self._bfloat16:  # numpy has no such type
                x, out = x.view(self._int16), out.view(self._int16)
            np.copyto(out.numpy(), x.numpy())
        else:
            out.copy_(x)

    def bytes_sent(self) -> int:
        """None go to another rank."""
        return 0

    def close(self) -> None:
        """Took nothing."""
