"""torch.distributed on NCCL, and the process group that GPU peers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import DTYPES, Op, Peer, Place

if TYPE_CHECKING:
    import torch


def missing_gpu() -> str | None:
    """Why torch has no NCCL or GPU here; None if it has both."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU for each rank, and torch sees none: pip install torch, built for CUDA"
    return None if dist.is_nccl_available() else "this torch was built without NCCL: pip install torch"


def join(place: Place) -> Any:
    """An NCCL group of all ranks: the default group if there is none yet, as in a user's job, else one beside it."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.new_group(backend="nccl")
    dist.init_process_group(
        "nccl", store=place.store, rank=place.rank, world_size=place.world, device_id=place.device
    )
    return dist.group.WORLD


class NcclPeer(Peer):
    """``dist.all_reduce``. NCCL divides by itself (``ReduceOp.AVG``). It has no output tensor: that takes a copy."""

    name = "nccl"
    ops: tuple[Op, ...] = (Op.SUM, Op.MEAN)
    reduces = True
    devices = frozenset({"cuda"})
    dtypes = DTYPES

    @staticmethod
    def missing(device: str) -> str | None:
        """A GPU, or NCCL in torch."""
        return missing_gpu()

    def setup(self, place: Place) -> None:
        """Joins a group; the first call connects the GPUs."""
        import torch.distributed as dist

        self._group, self._all_reduce = join(place), dist.all_reduce
        self._ops = {Op.SUM: dist.ReduceOp.SUM, Op.MEAN: dist.ReduceOp.AVG}

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """Enqueued; the current stream waits for it."""
        if out is not x:
            out.copy_(x)
        self._all_reduce(out, self._ops[op], group=self._group)

    def bytes_sent(self) -> int | None:
        """NCCL does not tell."""
        return None

    def close(self) -> None:
        """Ends the group."""
        import torch.distributed as dist

        dist.destroy_process_group(self._group)
