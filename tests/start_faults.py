"""Faults of the start and of memory, each a function that makes it happen once to new processes.

They return how long the slowest rank was in a start that could not succeed: after the fault, or after the deadline
where only that can tell. None where the ring has to work nevertheless. What is not survived is an ``AssertionError``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from typing import Any
from unittest import mock

import memory_faults
import ring_reduce as rr
from heard import Heard, slowest, try_ring
from launch import RING_TIMEOUT_S, Seat, Team, forkserver, spawn
from ring_reduce import _core

HURRIED_S = 1.0  # the deadline where it has to pass


# ---- the Store


def serve_store(pipe: Any) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(1000)


def make_by_a_store(seat: Seat, port: int, timeout: float) -> Heard | None:
    """The last rank never comes, so that the others need the Store."""
    from torch.distributed import TCPStore

    if seat.rank == seat.world - 1:
        return None
    store = TCPStore("127.0.0.1", port, is_master=False)
    seat.store.set(f"connected {seat.rank}", b"")
    return try_ring(lambda: rr.Ring(store, rank=seat.rank, world=seat.world, timeout=timeout))


def with_store(number: int, timeout: float) -> tuple[list[Heard], float]:
    """What the ranks hear when the Store's process gets a signal, and when it did."""
    ours, theirs = Pipe()
    server = forkserver().Process(target=serve_store, args=(theirs,))
    server.start()
    try:
        with Team(3) as team:
            team.begin(make_by_a_store, ours.recv(), timeout)
            for rank in range(2):
                team.wait_for(f"connected {rank}")
            time.sleep(0.2)
            os.kill(server.pid, number)
            at = time.monotonic()
            first, second, _ = team.finish()
            return [first, second], at
    finally:
        server.kill()
        server.join()


def store_killed() -> float:
    heard, at = with_store(signal.SIGKILL, RING_TIMEOUT_S)
    for each in heard:
        assert "connect" in each.text.lower(), each
    return slowest(heard, at)


def store_stopped() -> float:
    """Nothing but the deadline can tell."""
    heard, _ = with_store(signal.SIGSTOP, HURRIED_S)
    for each in heard:
        assert each.error == "RingTimeout", each
        assert "store" in each.text.lower(), each
    return slowest(heard) - HURRIED_S


# ---- ranks that come late, die, or belong to another job


def come_late(seat: Seat, seconds: float, timeout: float) -> Heard:
    if seat.rank == 1:
        time.sleep(seconds)
    return try_ring(partial(seat.ring, timeout=timeout))


def late_rank() -> None:
    for heard in spawn(3, come_late, 1.0, RING_TIMEOUT_S):
        assert heard.total == 3, heard


def too_late_rank() -> float:
    """Those that wait give up at the deadline; the one that comes afterwards hears why by its own."""
    waited, late, other = spawn(3, come_late, 2 * HURRIED_S, HURRIED_S)
    for heard in (waited, late, other):
        assert heard.error == "RingTimeout", heard
        assert "no word from rank 1 of 3" in heard.text, heard
    return max(slowest([waited, other]), slowest([late])) - HURRIED_S


def die_in_the_start(seat: Seat) -> Heard:
    """Rank 1 dies when it should make its memory."""

    def die(_: int) -> int:
        seat.store.set("died at", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
        return -1

    with mock.patch.object(
        _core, "create_shared_memory", die if seat.rank == 1 else _core.create_shared_memory
    ):
        return try_ring(seat.ring)


def dead_rank() -> float:
    with Team(3) as team:
        first, _, third = team.run(die_in_the_start, lost={1})
        at = float(team.store.get("died at"))
    for heard in (first, third):
        assert heard.error == "PeerLost" or "rank 1 ended while the ring was made" in heard.text, heard
    return slowest([first, third], at)


def make_of_one_job(seat: Seat, value: float) -> list[float]:
    """The same name again and again, as two jobs of one program would."""
    return [try_ring(partial(seat.ring, name="default"), value + i).total for i in range(5)]


def two_jobs() -> None:
    """Beside each other on one host, with one ring's name and two stores."""
    with Team(2) as one, Team(2) as other:
        one.begin(make_of_one_job, 1.0)
        other.begin(make_of_one_job, 100.0)
        for team, value in ((one, 1.0), (other, 100.0)):
            assert team.finish() == [[2 * (value + i) for i in range(5)]] * 2


@dataclass(frozen=True)
class Fault:
    """``once()`` makes it happen to ``world`` ranks."""

    once: Callable[[], float | None]
    world: int


FAULTS = {
    "address space": Fault(memory_faults.few_address_space, 3),
    "cgroup": Fault(memory_faults.cgroup, 2),
    "cgroup v2": Fault(memory_faults.cgroup_v2, 2),
    "closed descriptors": Fault(memory_faults.closed_descriptors, 2),
    "dead rank": Fault(dead_rank, 3),
    "descriptors": Fault(memory_faults.few_descriptors, 3),
    "file size": Fault(memory_faults.small_files, 3),
    "late rank": Fault(late_rank, 3),
    "locked memory": Fault(memory_faults.no_locked_memory, 3),
    "small /dev/shm": Fault(memory_faults.small_dev_shm, 2),
    "store killed": Fault(store_killed, 3),
    "store stopped": Fault(store_stopped, 3),
    "too late rank": Fault(too_late_rank, 3),
    "two jobs": Fault(two_jobs, 4),
}
