"""The start of a ring with something in its way: strangers, older rings of its name, limits, high descriptors."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught, spawn
from ring_reduce import _core, bootstrap, shm
from test_docs import code_blocks

TINY: dict[str, Any] = {"lanes": 1, "segment_bytes": 4096}


def total(ring: rr.Ring, value: float = 1.0) -> float:
    return float(ring.all_reduce(np.full(3, value))[-1])


# ---- strangers: an abstract socket has no permissions, so anybody on the host can connect


def address_of(seat: Seat, name: str) -> str:
    """Where rank 0 waits for the others, once it does."""
    key = bootstrap.address_key(bootstrap.Member(seat.rank, seat.world, name))
    return "\0" + str(json.loads(seat.store.get(key))["address"])


def dial(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(30)
    connection.connect(address)
    return connection


STRANGERS: dict[str, bytes | None] = {
    "nothing": None,
    "an empty message": b"",
    "no text": b"\x00\xff\xfe\x13",
    "a list": b"[1, 2]",
    "no hello": b'{"who": 1}',
    "words for numbers": b'{"rank": "one", "world": [], "lanes": null}',
    "an infinite rank": b'{"rank": Infinity, "world": 2, "lanes": 1}',
    "lists in lists": 30000 * b"[",
}


def beside_a_stranger(seat: Seat, said: bytes | None, closes: bool) -> tuple[float, bool]:
    """Rank 1 connects as a stranger first, which passes a file too. The sum, and whether this rank holds the file."""
    name, passed, stranger = f"strange {seat.job}", seat.directory / f"passed {seat.job}", None
    if seat.rank == 1:
        stranger = dial(address_of(seat, name))
        descriptor = os.open(passed, os.O_RDWR | os.O_CREAT)
        if said is not None:
            socket.send_fds(stranger, [said], [descriptor])
        os.close(descriptor)
        if closes:
            stranger.close()
    # So long rank 0 waits for the hello of one that connects.
    with mock.patch.object(bootstrap, "GRACE_S", 0.5), seat.ring(name=name) as ring:
        value = total(ring)
        held = [os.path.realpath(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd")]
    if stranger is not None:
        stranger.close()
    return value, str(passed) in held


@pytest.mark.parametrize("closes", [False, True], ids=["stays", "closes"])
@pytest.mark.parametrize("says", STRANGERS)
def test_a_stranger_breaks_no_start(run: Run, says: str, closes: bool) -> None:
    assert run(2, beside_a_stranger, STRANGERS[says], closes) == [(2.0, False)] * 2


def told_to_another_user(address: str) -> str:
    """All that rank 0 says to a process of user 65534."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            connection = dial(address)
            while said := connection.recv(65536):
                os.write(writing, said)
            os.write(writing, b", and no more")
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def beside_another_user(seat: Seat) -> tuple[float, str]:
    told = told_to_another_user(address_of(seat, "watched")) if seat.rank == 1 else ""
    with seat.ring(name="watched") as ring:
        return total(ring), told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user: sudo make test")
def test_a_stranger_of_another_user_is_told_so() -> None:
    (first, _), (second, told) = spawn(2, beside_another_user)
    assert (first, second) == (2.0, 2.0)
    assert "runs as another user" in told
    assert told.endswith(", and no more")


# ---- one name again and again


def back_to_back(seat: Seat, rounds: int, keep: bool) -> list[float]:
    """Rings of one name without a call between them. What each of the kept ones sums: their numbers tell them apart."""
    close = bootstrap.Hub.close

    def close_late(hub: bootstrap.Hub) -> None:
        time.sleep(0.05)
        close(hub)

    rings = []
    with mock.patch.object(bootstrap.Hub, "close", close_late):
        for _ in range(rounds):
            rings.append(seat.ring(name="the same", **TINY))
            if not keep:
                rings.pop().close()
        rings.append(seat.ring(name="the same", **TINY))
    return [total(ring, float(i)) for i, ring in enumerate(rings)]


@pytest.mark.parametrize("keep", [True, False], ids=["all live", "closed at once"])
@pytest.mark.parametrize("world", [2, 3])
def test_rings_back_to_back_are_the_right_ones(run: Run, world: int, keep: bool) -> None:
    """Also where rank 0 is slow to let go of the ring before: the others are at the next one by then."""
    rounds = 20
    expected = [float(world * i) for i in range(rounds + 1 if keep else 1)]
    assert run(world, back_to_back, rounds, keep) == [expected] * world


# ---- limits


def little_memory_left(seat: Seat, left: int, enough: int) -> tuple[Exception | None, bool, float]:
    """Rank 1's cgroup leaves too little. The error, whether a mapping is left, and the sum of a ring with enough."""
    with mock.patch.object(shm, "memory_left", return_value=left if seat.rank == 1 else None):
        error = caught(lambda: seat.ring(name="large", **TINY))
    mapped = "/memfd:ring_reduce" in Path("/proc/self/maps").read_text()
    with mock.patch.object(shm, "memory_left", return_value=enough), seat.ring(name="large", **TINY) as ring:
        return error, mapped, total(ring)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("over", [False, True], ids=["a byte too little", "over the limit"])
def test_a_memory_limit_of_one_rank_is_an_error_on_all(world: int, over: bool) -> None:
    """The kernel would let the ranks have the memory, and then end one."""
    needed = _core.region_bytes(
        lanes=1, depth=shm.Tuning.depth, segment_bytes=4096, world=world, part_bytes=shm.Tuning.part_bytes
    )
    left = -1 if over else needed * world - 1
    for error, mapped, value in spawn(world, little_memory_left, left, needed * world):
        assert type(error) is rr.RingError
        assert "rank 1: the ring needs" in str(error)
        assert f"needs {needed} bytes of shared memory a rank, {needed * world} in all" in str(error)
        assert f"memory limit leaves {max(0, left)};" in str(error)
        assert not mapped
        assert value == world


FILES = 1100


def above_1024(seat: Seat) -> tuple[list[float], Exception | None] | None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES + 400, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(FILES)]
    assert max(files) >= 1024
    ring = seat.ring()
    sums = [total(ring), float(ring.all_reduce(np.ones(3), async_op=True).wait()[0])]
    if seat.rank == 1:
        os._exit(0)
    return sums, caught(lambda: total(ring))


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < FILES + 400,
    reason=f"needs {FILES + 400} open files: ulimit -Hn {FILES + 400}",
)
def test_descriptors_above_1024() -> None:
    """select() does not take them. The end of a rank is seen through one, too."""
    (sums, error), _ = spawn(2, above_1024, lost={1})
    assert sums == [2.0, 2.0]
    assert type(error) is rr.PeerLost


# ---- threads that can't be started


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def no_room_for_threads() -> Iterator[None]:
    """Address space for what Python needs and not for a stack. Stacks that glibc keeps of ended threads are in use."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (1 << 20), limits[1]))
    done = threading.Event()
    try:
        with pytest.raises(RuntimeError, match="thread"):  # noqa: PT012
            while True:
                threading.Thread(target=done.wait).start()
        yield
    finally:
        done.set()
        resource.setrlimit(resource.RLIMIT_AS, limits)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def lane_without_a_thread(seat: Seat, victim: int) -> tuple[Exception | None, bool, bool]:
    before = threads()
    with seat.ring(lanes=2) as ring:
        x = np.ones(1 << 18)
        while threads() > before:  # the one that asked the Store is about to leave its stack
            time.sleep(0.001)
        with no_room_for_threads() if seat.rank == victim else contextlib.nullcontext():
            error = caught(lambda: ring.all_reduce(x))
        return error, ring.closed, bool((x == 1).all())


@pytest.mark.parametrize(("world", "victim"), [(2, 0), (3, 1)])
def test_a_lane_without_a_thread_is_an_error_on_all(world: int, victim: int) -> None:
    errors = []
    for error, closed, unchanged in spawn(world, lane_without_a_thread, victim):
        assert type(error) is rr.RingAborted
        errors.append(str(error))
        assert closed
        assert unchanged
    assert f"rank {victim} could not start 1 threads for its lanes" in errors[0]
    assert "use lanes=1" in errors[0]
    assert len(set(errors)) == 1


def no_communication_thread(seat: Seat) -> Exception | None:
    """What the caller of ``with`` sees."""

    def body() -> None:
        with seat.ring() as ring:
            if seat.rank == 1:
                with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start")):
                    ring.all_reduce(np.ones(3), async_op=True)
            ring.all_reduce(np.ones(3))

    return caught(body)


def test_a_communication_thread_that_cannot_start_is_an_error_on_all(run: Run) -> None:
    other, own = run(2, no_communication_thread)
    assert type(own) is RuntimeError
    assert str(own) == "can't start"
    assert type(other) is rr.RingAborted
    assert "rank 1 aborted the ring: RuntimeError: can't start" in str(other)


# ---- the README, from which a newcomer starts


def test_the_readme_has_no_placeholder() -> None:
    """Its code has no `...` and no YOUR_MODEL: what is left to fill in has a name that says what it is."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = [(line, code) for line, language, code in code_blocks(readme) if language == "python"]
    assert blocks
    for first, code in blocks:
        for node in ast.walk(ast.parse(code)):
            where = f"README.md:{first + getattr(node, 'lineno', 1) - 1}"
            assert not (isinstance(node, ast.Constant) and node.value is ...), where
            assert not (isinstance(node, ast.Name) and node.id.isupper()), f"{where}: {node.id}"
