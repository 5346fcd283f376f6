"""What every peer is: one all-reduce behind one small Protocol. Importing this imports no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

# By torch's names. What a peer can't reduce, it leaves out of its ``dtypes``.
DTYPES = frozenset({"float64", "float32", "float16", "bfloat16", "int32", "int64"})


class Op(enum.Enum):
    """What a peer is asked for. The values are nccl-tests' names of ``redop``."""

    SUM = "sum"
    MEAN = "avg"


@dataclass(frozen=True)
class Place:
    """Where a peer finds itself."""

    rank: int
    world: int
    store: Any  # a torch.distributed.Store of the peer's own
    rotate_bytes: int  # buffers of together so many bytes have left the caches when their turn comes again
    device: torch.device
    local_rank: int  # among the ranks of this host
    timeout: float = 300.0  # seconds that a call may wait for another rank, where the library takes a limit


class Peer(Protocol):
    """An all-reduce to measure; derive from it, which gives ``prepare``.

    It imports its library in ``setup``, so that an absent one keeps no other away.
    """

    name: str
    ops: tuple[Op, ...]  # MEAN too where users get it by dividing afterwards: that is their time
    reduces: bool  # False: it only moves bytes, as a limit to compare with
    devices: frozenset[str]  # "cpu", "cuda" or both
    dtypes: frozenset[str] = DTYPES

    @staticmethod
    def missing(device: str) -> str | None:
        """Why it can't be measured on ``device`` here, with how to install it; None if it can. No side effects."""
        ...

    def setup(self, place: Place) -> None:
        """Connects the ranks. Every rank calls it once, in the same order of peers."""
        ...

    def prepare(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Untimed, before a timed call with the same two: what a user has ready who reduces the same tensors again."""
        return

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """Reduces ``x`` into ``out``, which is ``x`` itself for in place. ``x`` is else left as it was.

        Returns when this rank's result is there; on CUDA it is enqueued on the current stream.
        """
        ...

    def bytes_sent(self) -> int | None:
        """Bytes of elements that this rank has sent so far; None where the library doesn't count them."""
        ...

    def close(self) -> None:
        """Gives up what ``setup`` took. Every rank calls it, in the same order of peers."""
        ...
