"""The barrier that starts the ranks of a measured call together, and times a hop between them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from ring_reduce.benchmarks.barrier import Barrier, words_needed


def on_threads(world: int, run: Callable[[int], None]) -> None:
    """``run(rank)`` on a thread for each rank."""
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("cores", [64, 1])
def test_barrier_lets_nobody_leave_before_all_have_come(cores: int) -> None:
    world, turns = 3, 50
    words = [0] * words_needed(world)
    arrived = [0] * world
    early: list[tuple[int, int]] = []

    def run(rank: int) -> None:
        barrier = Barrier(words, rank=rank, world=world, cores=cores, timeout=60)
        for turn in range(1, turns + 1):
            arrived[rank] = turn
            barrier.align()
            if min(arrived) < turn:
                early.append((rank, turn))

    on_threads(world, run)
    assert early == []
    assert arrived == [turns] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_hops_are_timed_where_ranks_have_cores_and_leave_the_barrier_in_step(world: int) -> None:
    words = [0] * words_needed(world)
    hops: list[float] = []

    def run(rank: int) -> None:
        barrier = Barrier(words, rank=rank, world=world, cores=world, timeout=60)
        for _ in range(3):
            hops.append(barrier.hop_ns())
            barrier.align()

    on_threads(world, run)
    assert len(hops) == 3 * world
    assert all(np.isnan(hop) if world == 1 else hop > 0 for hop in hops)


def test_hops_are_not_timed_where_ranks_share_cores() -> None:
    assert np.isnan(Barrier([0] * words_needed(1), rank=0, world=1, cores=1).hop_ns())


def test_barrier_names_the_rank_that_does_not_come() -> None:
    words = [0] * words_needed(3)
    words[0] = 1  # rank 0 has come, rank 2 has not
    with pytest.raises(TimeoutError, match="rank 1: rank 2 did not reach turn 1"):
        Barrier(words, rank=1, world=3, cores=3, timeout=0.01).align()
