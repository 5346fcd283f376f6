"""Runs a function on every rank, under torchrun or in processes started here. Shared by the examples."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def launch(rank_main: Callable[[], None], *, world: int = 4) -> None:
    """Calls ``rank_main`` on each rank, with a process group in place; ``world`` is ignored under torchrun."""
    if "RANK" in os.environ:  # torchrun has started the ranks and named the meeting point
        _run("env://", None, None, rank_main)
        return
    with tempfile.TemporaryDirectory() as directory:
        # A file, not a port: no two runs can collide.
        meeting_point = f"file://{Path(directory) / 'store'}"
        mp.spawn(_started_here, args=(meeting_point, world, rank_main), nprocs=world)


def _started_here(rank: int, meeting_point: str, world: int, rank_main: Callable[[], None]) -> None:
    _run(meeting_point, rank, world, rank_main)


def _run(meeting_point: str, rank: int | None, world: int | None, rank_main: Callable[[], None]) -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group(
        "gloo",
        init_method=meeting_point,
        rank=-1 if rank is None else rank,
        world_size=-1 if world is None else world,
    )
    try:
        rank_main()
    finally:
        dist.destroy_process_group()


def say(text: str) -> None:
    """Prints on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)
