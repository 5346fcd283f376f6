"""What a ring takes and gives back: memory, descriptors, threads, and nothing in /dev/shm."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from launch import Seat, caught, spawn

STAGING_LIMIT = 8 << 20
SLACK = 2 << 20  # what an allocator may keep


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> list[str]:
    """What each descriptor leads to, without the numbers of sockets and pipes."""
    targets = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of listdir itself
            targets.append(os.readlink(f"/proc/self/fd/{entry}"))
    return sorted(re.sub(r"\d+", "#", target) for target in targets)


def tasks() -> int:
    """Threads of this process. One that was joined leaves the kernel's list a moment later, so the fewest seen."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


def mapped_bytes() -> list[int]:
    """Sizes of the memory that this process shares with others of its ring."""
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:ring_reduce" in line:
            begin, end = line.split()[0].split("-")
            sizes.append(int(end, 16) - int(begin, 16))
    return sizes


def nothing_left(seat: Seat) -> tuple[list[str], list[int], list[int]]:
    """Entries of /dev/shm that came while a ring lives, and what is mapped with it and after it."""
    before = set(os.listdir("/dev/shm"))
    with seat.ring() as ring:
        ring.all_reduce(np.ones(1 << 20))
        ring.all_reduce(np.ones(10), async_op=True).wait()
        during = set(os.listdir("/dev/shm")) - before
        mapped = mapped_bytes()
    seat._rings.clear()
    del ring
    gc.collect()
    return sorted(during), mapped, mapped_bytes()


def test_no_name_in_dev_shm_and_no_memory_after() -> None:
    for during, mapped, after in spawn(2, nothing_left):
        assert not [name for name in during if "ring" in name]
        assert len(mapped) == 2
        assert after == []


def staging(seat: Seat, lanes: int, tuning: dict[str, Any]) -> tuple[int, list[int]]:
    with seat.ring(lanes=lanes, **tuning) as ring:
        assert ring.all_reduce(np.ones(3))[0] == seat.world
        mapped = mapped_bytes()
    return ring.lanes, mapped


@pytest.mark.parametrize(("lanes", "tuning"), [(1, {}), (4, {}), (64, {}), (4, {"segment_bytes": 16 << 20})])
def test_staging_is_8_mb_a_rank_at_most(lanes: int, tuning: dict[str, Any]) -> None:
    for got, mapped in spawn(2, staging, lanes, tuning):
        assert got == lanes
        assert len(mapped) == 2
        assert 0 < max(mapped) <= STAGING_LIMIT


def many_calls(seat: Seat, async_op: bool) -> tuple[int, list[str], list[str], int, int]:
    """Growth over 1,000 calls of memory, descriptors and threads."""
    import torch

    ring = seat.kept_ring(lanes=2)
    tensors = [torch.ones(10), torch.ones(1 << 17), torch.ones(1 << 19)]
    counts = {"count": 1}

    def calls(number: int) -> None:
        for i in range(number):
            work = ring.all_reduce(
                tensors[0 if i % 10 else 1 + i // 10 % 2], rr.WEIGHTED_MEAN, **counts, async_op=async_op
            )
            if async_op:
                work.get_future().wait()

    calls(200)
    gc.collect()
    before = resident_bytes(), descriptors(), tasks()
    calls(1000)
    gc.collect()
    return resident_bytes() - before[0], before[1], descriptors(), before[2], tasks()


@pytest.mark.parametrize("async_op", [False, True])
def test_1000_calls_leave_everything_flat(async_op: bool) -> None:
    for growth, descriptors_before, descriptors_after, tasks_before, tasks_after in spawn(
        2, many_calls, async_op
    ):
        assert growth < SLACK
        assert descriptors_after == descriptors_before
        assert tasks_after == tasks_before


def many_rings(seat: Seat, end: str) -> tuple[int, list[str], list[str], int, int]:
    """Growth over 50 rings that are closed, dropped or fail."""

    def use_one() -> None:
        ring = seat.ring(lanes=2, name="one of many")
        ring.all_reduce(np.ones(1 << 18))
        ring.all_reduce(np.ones(10), async_op=True).wait()
        if end == "close":
            ring.close()
        elif end == "fail":
            assert isinstance(caught(partial(ring.all_reduce, np.ones(10 + seat.rank))), rr.RingMismatch)
            ring.close()
        seat._rings.clear()

    for _ in range(10):
        use_one()
    before = resident_bytes(), descriptors(), tasks()
    for _ in range(50):
        use_one()
    gc.collect()
    return resident_bytes() - before[0], before[1], descriptors(), before[2], tasks()


@pytest.mark.parametrize("end", ["close", "drop", "fail"])
def test_50_rings_leave_everything_flat(end: str) -> None:
    for growth, descriptors_before, descriptors_after, tasks_before, tasks_after in spawn(2, many_rings, end):
        assert growth < SLACK
        assert descriptors_after == descriptors_before
        assert tasks_after == tasks_before


def under_a_limit(seat: Seat, limit: int, value: int) -> tuple[str, str, list[str], list[str]]:
    """Rank 1 can't get what a ring needs: its error, and descriptors before and after."""
    caught(lambda: seat.store.check(["warm up"]))
    before = descriptors()
    if seat.rank == 1:
        soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if value else _address_space() + (1 << 20), hard))
    error = caught(lambda: seat.ring(timeout=30))
    if seat.rank == 1:
        resource.setrlimit(limit, (soft, hard))
    return type(error).__name__, str(error), before, descriptors()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("limit", "value", "text"),
    [
        (resource.RLIMIT_AS, 0, "ulimit -v"),
        (resource.RLIMIT_FSIZE, 1 << 16, "shared memory"),
    ],
    ids=["address space", "file size"],
)
def test_too_little_memory_is_a_clear_error_on_all_ranks(limit: int, value: int, text: str) -> None:
    """And not a SIGBUS, which would end a process."""
    for rank, (kind, error, before, after) in enumerate(spawn(3, under_a_limit, limit, value)):
        assert kind == ("OSError" if rank == 1 else "RingError"), error
        assert text in error
        assert rank == 1 or "rank 1" in error
        assert after == before


def few_descriptors(seat: Seat) -> tuple[str, str]:
    if seat.rank == 1:
        open_now = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 4, open_now + 4))
    error = caught(lambda: seat.ring(timeout=30))
    return type(error).__name__, str(error)


def test_too_few_descriptors_are_a_clear_error_on_all_ranks() -> None:
    for kind, error in spawn(4, few_descriptors):
        assert kind in ("OSError", "RingError")
        assert "rank 1" in error or "open files" in error, error
        assert "open files" in error, error


SMALL_SHM = """
import sys
sys.path.insert(0, {tests!r})
import os
from launch import spawn
from test_resources import big_tensor
size = os.statvfs("/dev/shm")
assert size.f_blocks * size.f_frsize <= 64 << 20, "the mount did not work"
if __name__ == "__main__":
    assert spawn(2, big_tensor, start="spawn") == [2.0, 2.0]
    size = os.statvfs("/dev/shm")
    assert size.f_bavail == size.f_blocks, "something is in /dev/shm"
"""


def big_tensor(seat: Seat) -> float:
    with seat.ring() as ring:
        x = np.ones(20 << 20, np.float32)  # 80 MB
        return float(ring.all_reduce(x).min())


def test_a_dev_shm_of_64_mb_is_no_limit(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    probe = [unshare or "false", "-m", "sh", "-c", mount]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip(
            "a mount namespace can't be had here: run as root, in a container with --cap-add SYS_ADMIN"
        )
    script = tmp_path / "ranks.py"
    script.write_text(SMALL_SHM.format(tests=str(Path(__file__).parent)))
    command = f'{mount} && exec "{sys.executable}" "{script}"'
    done = subprocess.run(
        [str(unshare), "-m", "sh", "-c", command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def killed_with_a_ring(seat: Seat) -> None:
    with seat.ring() as ring:
        ring.all_reduce(np.ones(10))
        os.kill(os.getpid(), 9)


def test_a_killed_rank_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    spawn(2, killed_with_a_ring, lost={0, 1})
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "ring" in name]


def test_a_ring_starts_no_thread_before_it_needs_one() -> None:
    before = threading.active_count(), tasks()
    with rr.Ring(rank=0, world=1, lanes=4) as ring:
        ring.all_reduce(np.ones(100))
        assert (threading.active_count(), tasks()) == before
        ring.all_reduce(np.ones(100), async_op=True).wait()
        assert threading.active_count() == before[0] + 1
    assert threading.active_count() == before[0]
