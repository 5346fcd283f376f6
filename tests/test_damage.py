"""What no peer does by its calls: header bits flip, descriptors are closed, a Store dies, a cgroup has a limit."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, Team, caught, spawn
from mapped_rings import (
    COUNT_BITS,
    HEADER_BYTES,
    INPUTS,
    POSTED,
    MappedRing,
    descriptors_of_processes,
)
from ring_reduce.errors import text_of

DETECTION_S = 10.0  # ten times what the ring promises

# ---- header bits

# What is called, how many float32, and where the victim finds what another rank has written for it.
ALGORITHMS = {
    "ring": ("ring", 600, POSTED),
    "direct": ("direct", 600, INPUTS),
    "one shot": ("direct", 60, INPUTS),
}
BITS = [bit for bit in range(8 * HEADER_BYTES) if bit not in COUNT_BITS]


@dataclass
class Flip:
    """What a rank met. Without an error its result has to be right."""

    error: str
    right: bool
    later: str  # what the next call raised
    seconds: float  # until then


def flip_a_bit(seat: Seat, name: str, bit: int) -> Flip:
    """The last rank damages what the one before has sent it, and then takes it."""
    algorithm, elements, which = ALGORITHMS[name]
    mapped = MappedRing(seat, algorithm)
    victim, sender = seat.world - 1, seat.world - 2
    owner = victim if which == POSTED else sender
    mapped.ring.all_reduce(np.ones(elements, np.float32))
    seen = mapped.counter(owner, which)
    seat.meet(f"{name} {bit}")
    if seat.rank == victim:
        mapped.wait_for_more(owner, which, seen)
        mapped.flip_header_bit(owner, which, seen, bit)
    x = np.full(elements, 3.0, np.float32)
    started = time.monotonic()
    error = caught(lambda: mapped.ring.all_reduce(x))
    later = caught(lambda: mapped.ring.all_reduce(np.ones(elements, np.float32)))
    seconds = time.monotonic() - started
    mapped.close()
    right = bool((x == 3 * seat.world).all())
    return Flip(text_of(error) if error else "", right, text_of(later) if later else "", seconds)


def flip_bits(seat: Seat, name: str, bits: list[int]) -> list[Flip]:
    return [flip_a_bit(seat, name, bit) for bit in bits]


def check_flip(bit: int, flips: Sequence[Flip]) -> float:
    """Of a bit, by rank; returns the slowest."""
    victim = flips[-1]
    assert victim.error.startswith("RingMismatch: "), f"bit {bit}: {victim}"
    assert "rank 1" in victim.error
    for flip in flips:
        assert flip.error == victim.error or (not flip.error and flip.right), f"bit {bit}: {flip}"
        assert flip.later == victim.error, f"bit {bit}: {flip}"
    return max(flip.seconds for flip in flips)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_header_bit_that_flips_is_a_mismatch(run: Run, name: str) -> None:
    """All but those of the count, of which any value may be right. Whoever had all that it needed has its result."""
    bits = sorted(random.Random(name).sample(BITS, 20))
    by_rank = run(3, flip_bits, name, bits)
    for bit, flips in zip(bits, zip(*by_rank, strict=True), strict=True):
        check_flip(bit, flips)


# ---- descriptors


def use_closed_descriptors(seat: Seat) -> tuple[float, bool]:
    """As code does that makes a daemon: all pidfds of the ring are closed, and their numbers given to other files."""
    with seat.ring() as ring:
        taken = descriptors_of_processes()
        for descriptor in taken:
            os.close(descriptor)
        files: list[int] = []
        with contextlib.ExitStack() as stack:
            while not set(taken) <= set(files):
                files.append(stack.enter_context(open(__file__, "rb")).fileno())
            seat.meet("reused")
            if seat.rank == 1:
                time.sleep(0.3)  # so that rank 0 looks whether it lives
            value = float(ring.all_reduce(np.ones(5))[0])
    return value, bool(taken)


def test_descriptors_that_are_closed_and_used_again_are_no_death() -> None:
    assert spawn(2, use_closed_descriptors) == [(2.0, True)] * 2


# ---- the Store


STORE = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
print(store.port, flush=True)
time.sleep(1000)
"""


def make_with_a_dying_store(seat: Seat, port: int) -> tuple[str, float]:
    """The last rank never comes; the Store dies while the others wait for it. What they raise, and when."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    if seat.rank == seat.world - 1:
        return "", 0.0
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    seat.store.set(f"connected {seat.rank}", b"")
    error = caught(lambda: rr.Ring(store, rank=seat.rank, world=seat.world, timeout=60))
    assert error is not None
    return f"{type(error).__name__}: {error}", time.monotonic()


def test_a_store_that_is_killed_ends_the_start_on_all_ranks() -> None:
    store = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None
    with Team(3) as team:
        try:
            team.begin(make_with_a_dying_store, int(store.stdout.readline()))
            for rank in range(2):
                team.wait_for(f"connected {rank}")
            time.sleep(0.2)
        finally:
            store.kill()
            store.communicate()
        (first, _), (second, _), _ = team.finish(timeout=DETECTION_S + 10)
    for error in (first, second):
        assert "connect" in error.lower(), error


# ---- memory


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A memory cgroup of either version with a limit. Skips where none can be made."""
    v1 = Path("/sys/fs/cgroup/memory")
    parent, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = parent / f"ring_reduce-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here ({error}): run as root, with a writable {parent}")
    try:
        yield group
    finally:
        group.rmdir()


def make_in_a_cgroup(seat: Seat, group: str) -> str:
    if seat.rank == 1:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    error = caught(lambda: seat.ring(timeout=30, lanes=8))  # some 8 MB a rank
    return f"{type(error).__name__}: {error}"


def test_a_cgroup_of_too_little_memory_is_an_error_and_no_kill() -> None:
    with memory_cgroup(12 << 20) as group:
        errors = spawn(2, make_in_a_cgroup, str(group))
    for error in errors:
        assert "RingError: ring" in error
        assert "rank 1: the ring needs" in error
        assert "cgroup's memory limit leaves" in error
