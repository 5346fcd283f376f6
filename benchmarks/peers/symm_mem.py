"""torch's symmetric memory: kernels that load from and store to the other GPUs of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Op, Peer, Place
from .nccl import join, missing_gpu

if TYPE_CHECKING:
    import torch

ONE_SHOT_MOST_BYTES = 256 << 10  # as torch chooses (kOneShotThreshBytes in intra_node_comm.cu)
PAD_BYTES = 16  # of each rank's part: the kernels move 16 bytes at a time


class SymmMemPeer(Peer):
    """``torch.ops.symm_mem``: multimem where the switch adds (NVLink SHARP), else one-shot or two-shot by size.

    A gradient is not in symmetric memory, so copies into and out of the symmetric buffer belong to the time.
    """

    name = "symm_mem"
    ops: tuple[Op, ...] = (Op.SUM, Op.MEAN)
    reduces = True
    devices = frozenset({"cuda"})
    dtypes = frozenset({"float32", "bfloat16"})  # those that its kernels are made for

    @staticmethod
    def missing(device: str) -> str | None:
        """A GPU, or a torch that has the kernels."""
        if (reason := missing_gpu()) is not None:
            return reason
        import torch

        found = hasattr(torch.ops.symm_mem, "two_shot_all_reduce_")
        return None if found else "this torch has no two-shot all-reduce: pip install 'torch>=2.6'"

    def setup(self, place: Place) -> None:
        """Joins a group; the buffer is made, by all ranks together, when a call needs it or a larger one."""
        import torch
        import torch.distributed._symmetric_memory as memory

        self._place, self._group, self._memory = place, join(place), memory
        self._ops: Any = torch.ops.symm_mem
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._multicast = False

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """Enqueued on the current stream. What pads the buffer is reduced too, and not looked at."""
        unit = PAD_BYTES * self._place.world // x.itemsize
        part = self._buffer(-(-x.numel() // unit) * unit, x.dtype)
        part[: x.numel()].copy_(x.view(-1))
        name = self._group.group_name
        if self._multicast:
            self._ops.multimem_all_reduce_(part, "sum", name)
        elif x.nbytes <= ONE_SHOT_MOST_BYTES:
            part = self._ops.one_shot_all_reduce(part, "sum", name)
        else:
            self._ops.two_shot_all_reduce_(part, "sum", name)
        out.view(-1).copy_(part[: x.numel()])
        if op is Op.MEAN:
            out.div_(self._place.world)

    def _buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first ``count`` elements of the symmetric buffer."""
        if dtype not in self._buffers or self._buffers[dtype].numel() < count:
            made = self._memory.empty(count, dtype=dtype, device=self._place.device)
            handle = self._memory.rendezvous(made, self._group)
            self._buffers[dtype], self._multicast = made, handle.multicast_ptr != 0
        return self._buffers[dtype][:count]

    def bytes_sent(self) -> int | None:
        """torch does not tell."""
        return None

    def close(self) -> None:
        """Gives up the buffers, then the group."""
        import torch.distributed as dist

        self._buffers.clear()
        dist.destroy_process_group(self._group)
