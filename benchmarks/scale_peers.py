"""What ``bench scale`` compares, as peers of the benchmark: one ring with each normalization, or a division behind it.

All divide by the number of ranks in the end, so that all have one exact result to be checked against: ``divide_by``
gets it as the total, ``DIVIDE_BY_COUNT`` a count of 1 from every rank, and ``WEIGHTED_MEAN`` equal counts. What the
divisor is changes nothing of what is done with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import ring_reduce as rr

from .peers import Op, Place
from .peers.ring import RingPeer

if TYPE_CHECKING:
    import torch

COUNT = 32  # examples of a rank's batch; a power of 2, by which whole numbers stay exact in every type


class SharedRing(RingPeer):
    """The ring that all of these share: one with slots of its own would find other lines in the caches."""

    ops: tuple[Op, ...] = (Op.MEAN,)
    normalization: rr.Normalization = rr.MEAN
    count: int | None = None
    _shared: ClassVar[list[rr.Ring]] = []  # one, from the first setup to the last close
    _users: ClassVar[int] = 0

    def setup(self, place: Place) -> None:
        """Makes the ring, or takes the one that is there."""
        if not self._shared:
            super().setup(place)
            self._shared.append(self._ring)
        self._ring = self._shared[0]
        SharedRing._users += 1

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """As a user calls it: in place without ``out``."""
        if out is x:
            self._ring.all_reduce(x, self.normalization, count=self.count)
        else:
            self._ring.all_reduce(x, self.normalization, out=out, count=self.count)

    def close(self) -> None:
        """Leaves the ring when nobody uses it any more."""
        SharedRing._users -= 1
        if SharedRing._users == 0:
            self._shared.pop().close()


class Sum(SharedRing):
    """The plain sum, which all others are compared with."""

    name = "ring SUM"
    ops = (Op.SUM,)
    normalization = rr.SUM


class Mean(SharedRing):
    """``MEAN``."""

    name = "ring MEAN"


class DivideBy(SharedRing):
    """``divide_by(total)``."""

    name = "ring divide_by"

    def setup(self, place: Place) -> None:
        """The total is the number of ranks."""
        super().setup(place)
        self.normalization = rr.divide_by(place.world)


class DivideByCount(SharedRing):
    """``DIVIDE_BY_COUNT``."""

    name = "ring DIVIDE_BY_COUNT"
    normalization = rr.DIVIDE_BY_COUNT
    count = 1


class WeightedMean(SharedRing):
    """``WEIGHTED_MEAN``: also a multiplication when a rank's data enters."""

    name = "ring WEIGHTED_MEAN"
    normalization = rr.WEIGHTED_MEAN
    count = COUNT


class SumThenDiv(SharedRing):
    """The usual way: a sum, and then a division in a pass of its own."""

    name = "ring SUM, then div_"
    normalization = rr.SUM

    def all_reduce(self, x: Any, out: Any, op: Op) -> None:
        """Two calls of the user's."""
        super().all_reduce(x, out, op)
        out.div_(self._ring.world)


RING_PEERS = (Sum, Mean, DivideBy, DivideByCount, WeightedMean, SumThenDiv)
