"""Limits and memory in the way of a ring: see start_faults.py, whose table has these functions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from heard import Heard, slowest, try_ring
from launch import Seat, Team, spawn
from ring_reduce import machine, shm
from test_damage import make_in_a_cgroup, memory_cgroup, use_closed_descriptors

SHM_BYTES = 64 << 20
CLONE_NEWNS = 0x00020000  # of sched.h
CAP_IPC_LOCK = 14  # of linux/capability.h, as are the next two
CAPABILITY_VERSION = 0x20080522


def refused(pairs: list[tuple[Heard, Heard]], text: str) -> float:
    """All ranks heard of rank 1's limit, and the next ring of the same processes worked."""
    for rank, (first, again) in enumerate(pairs):
        assert first.error in ("RingError", "OSError"), first
        assert text in first.text, first
        assert rank == 1 or "rank 1" in first.text, first
        assert again.total == len(pairs), pairs[1]
    return slowest([first for first, _ in pairs])


# ---- limits of rank 1


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


LIMITS: dict[int, Callable[[], int]] = {
    resource.RLIMIT_AS: lambda: address_space() + (1 << 20),
    resource.RLIMIT_FSIZE: lambda: 1 << 16,
    resource.RLIMIT_NOFILE: lambda: open_files() + 4,
    resource.RLIMIT_MEMLOCK: lambda: 0,
}


@contextlib.contextmanager
def limited(limit: int) -> Iterator[None]:
    limits = resource.getrlimit(limit)
    resource.setrlimit(limit, (LIMITS[limit](), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, limits)


def make_under_a_limit(seat: Seat, limit: int) -> tuple[Heard, Heard]:
    seat.meet("limited")
    with limited(limit) if seat.rank == 1 else contextlib.nullcontext():
        first = try_ring(partial(seat.ring, timeout=30))
    return first, try_ring(seat.ring)


def few_address_space() -> float:
    return refused(spawn(3, make_under_a_limit, resource.RLIMIT_AS), "ulimit -v")


def small_files() -> float:
    return refused(spawn(3, make_under_a_limit, resource.RLIMIT_FSIZE), "shared memory")


def few_descriptors() -> float:
    return refused(spawn(3, make_under_a_limit, resource.RLIMIT_NOFILE), "open files")


def drop_lock_capability() -> None:
    """Without it the limit on locked memory binds root as well."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << CAP_IPC_LOCK)  # of those in effect
    assert libc.capset(header, sets) == 0
    page = ctypes.create_string_buffer(1)
    assert libc.mlock(page, 1) != 0, "the limit does not bind this process"


def make_without_locked_memory(seat: Seat) -> Heard:
    with limited(resource.RLIMIT_MEMLOCK):
        drop_lock_capability()
        return try_ring(seat.ring, elements=1 << 20)


def no_locked_memory() -> None:
    """The ring locks none."""
    for heard in spawn(3, make_without_locked_memory):
        assert heard.total == 3, heard


# ---- memory cgroups


def cgroup() -> float:
    """One of this machine's, of either version."""
    with memory_cgroup(12 << 20) as group, Team(2) as team:
        began = time.monotonic()
        errors = team.run(make_in_a_cgroup, str(group))
        ended = time.monotonic()
        team.close()  # before the group is removed
    for error in errors:
        assert "rank 1: the ring needs" in error
        assert "cgroup's memory limit leaves" in error
    return ended - began


def make_beside_cgroup_v2(seat: Seat) -> tuple[Heard, Heard]:
    """The kernel's files are made up, of a group that has used all but 1 MB."""
    files = {
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": f"{64 << 20}",
        "sys/fs/cgroup/job/memory.current": f"{63 << 20}",
        "sys/fs/cgroup/job/memory.stat": "active_file 0\ninactive_file 0",
    }
    root = seat.directory / f"files of rank {seat.rank}"
    for name, text in files.items() if seat.rank == 1 else ():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    with mock.patch.object(shm, "memory_left", partial(machine.memory_left, root)):
        first = try_ring(partial(seat.ring, timeout=30, lanes=8))
    return first, try_ring(seat.ring)


def cgroup_v2() -> float:
    return refused(spawn(2, make_beside_cgroup_v2), "the cgroup's memory limit leaves 1048576;")


# ---- /dev/shm and descriptors


def can_mount() -> bool:
    unshare = shutil.which("unshare") or "false"
    command = [unshare, "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def make_beside_a_small_shm(seat: Seat) -> tuple[Heard, int]:
    """A sum of more than /dev/shm holds, and what is used of that while a ring lives."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SHM_BYTES}", "tmpfs", "/dev/shm"], check=True)
    assert machine.filesystem_bytes("/dev/shm") == SHM_BYTES
    heard = try_ring(seat.ring, elements=20 << 20)
    with seat.ring():
        status = os.statvfs("/dev/shm")
        return heard, status.f_blocks - status.f_bfree


def small_dev_shm() -> None:
    if not can_mount():
        pytest.skip(
            "a mount namespace can't be had here: run as root, in a container with --cap-add SYS_ADMIN"
        )
    for heard, used in spawn(2, make_beside_a_small_shm):
        assert heard.total == 2, heard
        assert used == 0


def closed_descriptors() -> None:
    """Closed while the ring lives, and used again for other files: no death of a rank."""
    assert spawn(2, use_closed_descriptors) == [(2.0, True)] * 2
