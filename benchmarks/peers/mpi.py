"""MPI_Allreduce through mpi4py. mpirun must have started the ranks (benchmarks/mpirun.py)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from .. import mpirun
from .base import Op, Peer, Place

if TYPE_CHECKING:
    import torch


class MpiPeer(Peer):
    """``Comm.Allreduce`` on the tensors' own memory. MPI has no mean: users divide afterwards, in a second pass.

    It is measured at its best: the buffers of memory and type are made before the timed call, as by users who reduce
    the same arrays again and again. Making one costs 2 µs, half of what MPI takes for 1 KB.
    """

    name = "mpi"
    ops: tuple[Op, ...] = (Op.SUM, Op.MEAN)
    reduces = True
    devices = frozenset({"cpu"})
    dtypes = frozenset({"float64", "float32", "int32", "int64"})  # the standard has no 16-bit floats

    @staticmethod
    def missing(device: str) -> str | None:
        """mpi4py, or a program that starts ranks."""
        if importlib.util.find_spec("mpi4py") is None:
            return f"mpi4py is not installed: {mpirun.INSTALL}"
        if mpirun.find() is None:
            return f"there is no mpiexec or mpirun: {mpirun.INSTALL}"
        return None

    def setup(self, place: Place) -> None:
        """Starts MPI in this process, unless it has been. Raises ``RuntimeError`` where mpirun did not start it."""
        import torch

        # Before MPI is imported. Locks for calls from several threads cost 1 µs a call, with MPICH more.
        importlib.import_module("mpi4py").rc.thread_level = "funneled"
        mpi: Any = importlib.import_module("mpi4py.MPI")
        if mpi.COMM_WORLD.size != place.world:
            raise RuntimeError(
                f"mpi: rank {place.rank} of {place.world} is in an MPI world of {mpi.COMM_WORLD.size}: start the "
                f"ranks by the mpirun of the MPI that mpi4py found, {mpi.get_vendor()[0]}"
            )
        self._comm = mpi.COMM_WORLD.Split(0, place.rank)
        self._allreduce, self._in_place, self._world = self._comm.Allreduce, mpi.IN_PLACE, place.world
        self._memory_at = mpi.memory.fromaddress
        self._types = {
            torch.float64: mpi.DOUBLE,
            torch.float32: mpi.FLOAT,
            torch.int32: mpi.INT32_T,
            torch.int64: mpi.INT64_T,
        }
        self._x: torch.Tensor | None = None
        self._out: torch.Tensor | None = None
        self._sent: Any = None
        self._received: Any = None

    def prepare(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Makes mpi4py's buffers. Both must be contiguous. Raises ``TypeError`` for a type that MPI doesn't have."""
        self._sent = self._in_place if out is x else self._spec(x)
        self._received = self._spec(out)
        self._x, self._out = x, out

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """As MPI's users call it. Raises as ``prepare`` does, which it calls for tensors of another call."""
        if x is not self._x or out is not self._out:
            self.prepare(x, out)
        self._allreduce(self._sent, self._received)
        if op is Op.MEAN:
            out.div_(self._world)

    def _spec(self, x: torch.Tensor) -> list[Any]:
        """mpi4py's [memory, type]. It holds an address only: who keeps it keeps the tensor."""
        if x.dtype not in self._types:
            raise TypeError(f"mpi: MPI has no {x.dtype}; it has {', '.join(sorted(self.dtypes))}")
        return [self._memory_at(x.data_ptr(), x.nbytes), self._types[x.dtype]]

    def bytes_sent(self) -> int | None:
        """MPI does not tell."""
        return None

    def close(self) -> None:
        """Frees the communicator. mpi4py ends MPI itself when the process exits."""
        self._comm.Free()
