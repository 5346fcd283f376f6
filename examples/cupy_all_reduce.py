"""CuPy arrays: reduced where they lie, on CuPy's current stream, with counts that stay on the GPU.

Each rank standardises its own rows by mean and variance of all rows: two sums and a count, one all-reduce. Without CuPy
or a GPU the same lines run on NumPy.

    python examples/cupy_all_reduce.py
    torchrun --nproc-per-node 2 examples/cupy_all_reduce.py
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ring_reduce as rr
from launch import launch, say

COLUMNS = 5


def array_library() -> tuple[Any, str]:
    """CuPy and this rank's GPU where there are both, else NumPy and the CPU."""
    try:
        import cupy
    except ImportError:
        return np, "cpu"
    if not torch.cuda.is_available():
        return np, "cpu"
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    gpu = local_rank % torch.cuda.device_count()  # ranks may share one
    cupy.cuda.Device(gpu).use()
    return cupy, f"cuda:{gpu}"


def rows_of(rank: int) -> np.ndarray:
    """10 rows on rank 0, 20 on rank 1, ..."""
    random = np.random.default_rng(rank)
    return random.normal(loc=rank, scale=1 + rank, size=(10 * (rank + 1), COLUMNS))


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    xp, device = array_library()
    rows = xp.asarray(rows_of(rank))

    with rr.Ring.from_group(device=device) as ring:
        say(f"{world} ranks, {xp.__name__} on {device}, over {ring.transport}")
        moments = xp.stack([rows.sum(0), (rows**2).sum(0)])
        # Sums of all rows, divided by the number of all rows.
        mean, mean_of_squares = ring.all_reduce(moments, rr.DIVIDE_BY_COUNT, count=len(rows))
        standardised = (rows - mean) / xp.sqrt(mean_of_squares - mean**2)

        # The rows of all ranks, to check against.
        every = np.concatenate([rows_of(r) for r in range(world)])
        expected = (rows_of(rank) - every.mean(0)) / every.std(0)
        difference = float(abs(standardised - xp.asarray(expected)).max())
        say(f"largest difference from one process with all {len(every)} rows: {difference:.1e}")
        assert difference < 1e-10, f"rank {rank}: differs by {difference:.1e}"


if __name__ == "__main__":
    launch(main)
