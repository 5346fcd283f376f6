"""A rank of the MPI test: ``python mpi_rank.py FOLDER RANKS``. It writes FOLDER/RANK when all is right."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore

from peer_sums import check_sums
from ring_reduce.benchmarks.launch import seat_of
from ring_reduce.benchmarks.peers import Op, Place
from ring_reduce.benchmarks.peers.mpi import MpiPeer


def main(folder: Path, world: int) -> None:
    seat = seat_of(os.environ)
    assert seat is not None
    peer = MpiPeer()
    store = FileStore(str(folder / "store"), world)
    peer.setup(Place(seat.rank, world, store, 0, torch.device("cpu"), seat.rank))
    for name in sorted(peer.dtypes):
        for op in Op:
            check_sums(peer, seat.rank, world, getattr(torch, name), op)
    half = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16"):
        peer.all_reduce(half, half, Op.SUM)
    peer.close()
    (folder / str(seat.rank)).write_text("right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
