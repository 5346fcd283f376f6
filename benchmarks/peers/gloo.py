"""torch.distributed's own CPU backend."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from .base import DTYPES, Op, Peer, Place

if TYPE_CHECKING:
    import torch


class GlooPeer(Peer):
    """``dist.all_reduce``. Gloo has no mean: users divide afterwards, in a second pass. Nor has it an output tensor."""

    name = "gloo"
    ops: tuple[Op, ...] = (Op.SUM, Op.MEAN)
    reduces = True
    devices = frozenset({"cpu"})
    dtypes = DTYPES

    @staticmethod
    def missing(device: str) -> str | None:
        """Nothing, unless torch was built without it."""
        import torch.distributed as dist

        return None if dist.is_gloo_available() else "this torch was built without Gloo: pip install torch"

    def setup(self, place: Place) -> None:
        """Makes it the default process group, as a user's job does."""
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=place.store,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=place.timeout),
        )
        self._all_reduce, self._world = dist.all_reduce, place.world

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """Out of place is a copy and then in place."""
        if out is not x:
            out.copy_(x)
        self._all_reduce(out)
        if op is Op.MEAN:
            out.div_(self._world)

    def bytes_sent(self) -> int | None:
        """Gloo does not tell."""
        return None

    def close(self) -> None:
        """Ends the process group."""
        import torch.distributed as dist

        dist.destroy_process_group()
