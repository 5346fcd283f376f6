"""What is compared: every all-reduce behind one small Protocol, and a plain copy as the memory limit.

Each peer imports its library in ``setup``, so that one that is absent doesn't keep the others from being measured.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ring_reduce import Normalization, Ring


class Op(enum.Enum):
    """What a peer is asked for. Both are one call of the user's."""

    SUM = "SUM"
    MEAN = "MEAN"


@dataclass(frozen=True)
class Place:
    """Where a peer finds itself: its rank, the world, and a ``torch.distributed.Store`` of its own."""

    rank: int
    world: int
    store: Any
    rotate_bytes: int


class Peer(Protocol):
    """An all-reduce to measure. ``ops`` says what it can do; ``reduces`` is False for a peer that only moves bytes."""

    name: str
    ops: tuple[Op, ...]
    reduces: bool

    def setup(self, place: Place) -> None:
        """Connects the ranks. Every rank calls it once, in the same order of peers."""
        ...

    def all_reduce(self, x: torch.Tensor, op: Op) -> None:
        """Reduces ``x`` in place, and returns when this rank's result is there."""
        ...

    def close(self) -> None:
        """Gives up what ``setup`` took."""
        ...


class RingPeer:
    """This package, through the call that users make."""

    name = "ring"
    ops: tuple[Op, ...] = (Op.SUM, Op.MEAN)
    reduces = True
    _ring: Ring
    _normalization: dict[Op, Normalization]

    def setup(self, place: Place) -> None:
        import ring_reduce as rr

        self._ring = rr.Ring(place.store, rank=place.rank, world=place.world, name="benchmark")
        self._normalization = {Op.SUM: rr.SUM, Op.MEAN: rr.MEAN}

    def all_reduce(self, x: torch.Tensor, op: Op) -> None:
        self._ring.all_reduce(x, self._normalization[op])

    def close(self) -> None:
        self._ring.close()


class GlooPeer:
    """torch.distributed's own CPU backend. It has no mean: users divide afterwards, in a second pass."""

    name = "gloo"
    ops: tuple[Op, ...] = (Op.SUM,)
    reduces = True

    def setup(self, place: Place) -> None:
        dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.world)

    def all_reduce(self, x: torch.Tensor, op: Op) -> None:
        dist.all_reduce(x)
        if op is Op.MEAN:
            x.div_(dist.get_world_size())

    def close(self) -> None:
        dist.destroy_process_group()


class CopyPeer:
    """The memory limit: all ranks copy the tensor's bytes at once, each to memory of its own.

    numpy's copy is libc's memcpy, which streams past the caches when the size calls for it, and so is the fastest
    plain copy at hand (torch's copy_ is not). The destinations rotate like the inputs do: a destination that stays in
    the cache would make the limit of a large tensor look lower than memory allows.
    """

    name = "copy"
    ops: tuple[Op, ...] = (Op.SUM,)
    reduces = False

    def setup(self, place: Place) -> None:
        self._rotate_bytes = place.rotate_bytes
        self._scratch = np.empty(0, dtype=np.uint8)
        self._offset = 0

    def all_reduce(self, x: torch.Tensor, op: Op) -> None:
        source = x.numpy() if x.dtype is not torch.bfloat16 else x.view(torch.int16).numpy()
        self._destination(source.nbytes)[:] = source.view(np.uint8)

    def _destination(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if self._scratch.size < 2 * nbytes:
            # Ones: pages of untouched zeros do not exist yet, and the first timed copies would fault them in.
            self._scratch = np.ones(max(2 * nbytes, self._rotate_bytes), dtype=np.uint8)
        if self._offset + nbytes > self._scratch.size:
            self._offset = 0
        start, self._offset = self._offset, self._offset + nbytes
        return self._scratch[start : start + nbytes]

    def close(self) -> None:
        self._scratch = np.empty(0, dtype=np.uint8)


PEERS: dict[str, Callable[[], Peer]] = {"ring": RingPeer, "gloo": GlooPeer, "copy": CopyPeer}
