"""This package, through the call that users make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ring_reduce as rr

from .base import DTYPES, Op, Peer, Place

if TYPE_CHECKING:
    import torch


class RingPeer(Peer):
    """``Ring.all_reduce``, Python included."""

    name = "ring"
    ops: tuple[Op, ...] = (Op.SUM, Op.MEAN)
    reduces = True
    devices = frozenset({"cpu"})
    dtypes = DTYPES

    @staticmethod
    def missing(device: str) -> str | None:
        """Nothing is."""
        return None

    def setup(self, place: Place) -> None:
        """Makes a ring of all ranks."""
        self._ring = rr.Ring(
            place.store, rank=place.rank, world=place.world, name="benchmark", timeout=place.timeout
        )
        self._normalization = {Op.SUM: rr.SUM, Op.MEAN: rr.MEAN}

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """As a user calls it: in place without ``out``."""
        if out is x:
            self._ring.all_reduce(x, self._normalization[op])
        else:
            self._ring.all_reduce(x, self._normalization[op], out=out)

    def bytes_sent(self) -> int:
        """As the ring counted them, headers left out."""
        return self._ring.stats.bytes_sent

    def close(self) -> None:
        """Leaves the ring."""
        self._ring.close()
