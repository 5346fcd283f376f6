"""A ring over process groups in which something goes wrong: every rank hears of it, and of the same cause."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ring_reduce as rr
from conftest import Run
from group_rings import SMALL_GROUP, group_ring
from launch import Seat, Team, caught, spawn
from ring_reduce import group_start
from ring_reduce.bounded_store import BoundedStore
from ring_reduce.group_failure import FirstFailure
from ring_reduce.group_links import GlooLinks
from ring_reduce.group_port import GroupPort

WORLD = 3
SIZE = 3000  # many small segments
SHORT_S = 1.0  # a timeout that has to pass
LONG_S = 50.0  # one that must not
IN_TIME_S = 20.0  # far less than that, and far more than anything takes


def call(ring: rr.Ring) -> Exception | None:
    return caught(lambda: ring.all_reduce(np.ones(SIZE, np.float32)))


# ---- ranks that call differently

CALLS: dict[str, Callable[[rr.Ring, torch.Tensor], Any]] = {
    "plain": lambda ring, x: ring.all_reduce(x, rr.divide_by(3.0)),
    "operation": lambda ring, x: ring.reduce_scatter(x, rr.divide_by(3.0)),
    "dtype": lambda ring, x: ring.all_reduce(x.double(), rr.divide_by(3.0)),
    "element count": lambda ring, x: ring.all_reduce(x[:-3], rr.divide_by(3.0)),
    "normalization": lambda ring, x: ring.all_reduce(x, rr.WEIGHTED_MEAN, count=3),
    "divisor": lambda ring, x: ring.all_reduce(x, rr.divide_by(np.nextafter(3.0, 4.0))),
}


def call_differently(seat: Seat, field: str, odd: int) -> tuple[list[str], bool, bool]:
    """What this rank hears three times, whether its tensor is as it was, and whether the ring is closed."""
    with group_ring(seat, name=field, **SMALL_GROUP) as ring:
        x = torch.full((SIZE,), 1.0 + seat.rank)
        ring.all_reduce(x.clone())
        error = caught(lambda: CALLS[field if seat.rank == odd else "plain"](ring, x))
        assert type(error) is type(call(ring)) is type(ring.failure) is rr.RingMismatch
        heard = [str(error), str(call(ring)), str(ring.failure)]
        return heard, bool((x == 1.0 + seat.rank).all()), ring.closed


@pytest.mark.parametrize(("field", "odd"), [(field, i % WORLD) for i, field in enumerate(CALLS) if i])
def test_ranks_that_call_differently(run: Run, field: str, odd: int) -> None:
    ranks = run(WORLD, call_differently, field, odd)
    texts = {text for heard, _, _ in ranks for text in heard}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text.startswith(f"ranks disagree in call 2: {field} is ")
    assert f"on rank {odd}" in text
    assert all(unchanged and closed for _, unchanged, closed in ranks)


# ---- ranks that end, stop, or come late


@contextmanager
def in_the_middle(what: Callable[[], object]) -> Iterator[None]:
    """Does it once in a call, when segments of this rank are on their way."""
    move = GroupPort.move

    def stopped(self: GroupPort, segment: int, k: int, receives: bool, sends: bool) -> None:
        if (segment, k) == (3, 2):
            what()
        move(self, segment, k, receives, sends)

    with mock.patch.object(GroupPort, "move", stopped):
        yield


def die_in_a_call(seat: Seat, victim: int, in_tcp_store: bool) -> tuple[str, str, bool]:
    if in_tcp_store:  # which ends with rank 0
        if seat.rank == 0:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            seat.store.set("port", str(server.port))
        port = int(seat.store.get("port"))
        store: Any = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
        options: dict[str, Any] = {"transport": "process_group", "_has_group": True, "_tuning": SMALL_GROUP}
        ring = rr.Ring(store, rank=seat.rank, world=seat.world, timeout=LONG_S, **options)
    else:
        ring = group_ring(seat, timeout=LONG_S, **SMALL_GROUP)
    call(ring)
    start = time.monotonic()
    with in_the_middle(lambda: os.kill(os.getpid(), signal.SIGKILL) if seat.rank == victim else None):
        error = call(ring)
    in_time = time.monotonic() - start < IN_TIME_S
    return type(error).__name__, str(error), in_time and str(call(ring)) == str(error)


@pytest.mark.parametrize(("victim", "in_tcp_store"), [(1, False), (0, True)])
def test_a_rank_that_is_killed_in_a_call(victim: int, in_tcp_store: bool) -> None:
    answers = spawn(WORLD + 1, die_in_a_call, victim, in_tcp_store, lost=[victim])
    heard = [answer for rank, answer in enumerate(answers) if rank != victim]
    assert {kind for kind, _, _ in heard} == {"PeerLost"}
    assert all(in_time for _, _, in_time in heard)
    texts = {text for _, text, _ in heard}
    if not in_tcp_store:  # without a store each tells what it saw itself
        assert len(texts) == 1, texts
        assert f"lost its connection to rank {victim} in call 2" in texts.pop()
    else:
        assert any(f"lost its connection to rank {victim} in call 2" in text for text in texts), texts


def stop_in_a_call(seat: Seat) -> Exception | None:
    """Rank 1 waits in the middle of a call until the others have given up."""
    seat.meet("here")
    with group_ring(seat, timeout=SHORT_S, **SMALL_GROUP) as ring:
        with in_the_middle(lambda: seat.meet("given up") if seat.rank == 1 else None):
            error = call(ring)
        if seat.rank != 1:
            seat.meet("given up")
        return error


def come_late(seat: Seat) -> tuple[Exception | None, Exception | None]:
    """Rank 2 calls when the others have given up. What each hears in a call, and its ring's failure without one."""
    seat.meet("here")
    with group_ring(seat, timeout=SHORT_S, **SMALL_GROUP) as ring:
        if seat.rank != 2:
            error = call(ring)
            seat.meet("given up")
            return error, ring.failure
        seat.meet("given up")
        failure = ring.failure
        return call(ring), failure


def test_a_rank_that_comes_late(run: Run) -> None:
    errors = [error for pair in run(WORLD, come_late) for error in pair]
    assert {type(error) for error in errors} == {rr.RingTimeout}
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert f"waited {SHORT_S:.1f} s for a word from rank 2 (call 1)" in text
    assert text.startswith(("rank 0 ", "rank 1 "))


def test_a_rank_that_stops_in_a_call(run: Run) -> None:
    errors = run(WORLD, stop_in_a_call)
    assert {type(error) for error in errors} == {rr.RingTimeout}
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    assert f"waited {SHORT_S:.1f} s for" in texts.pop()


# ---- ranks that end the ring


def abort_meanwhile(seat: Seat) -> tuple[list[Exception | None], bool]:
    """Rank 0 aborts from another thread than the one that waits; rank 2 is in no call."""
    with group_ring(seat, timeout=LONG_S, **SMALL_GROUP) as ring:
        call(ring)
        start = time.monotonic()
        heard: list[Exception | None] = []
        if seat.rank == 0:
            threading.Timer(0.3, lambda: ring.abort("enough")).start()
        if seat.rank != 2:
            heard.append(call(ring))
        seat.meet("aborted")
        heard += [ring.failure, call(ring)]
        return heard, time.monotonic() - start < IN_TIME_S


def test_abort_ends_waits_on_all_ranks(run: Run) -> None:
    for heard, in_time in run(WORLD, abort_meanwhile):
        assert in_time
        assert {type(error) for error in heard} == {rr.RingAborted}
        assert {str(error) for error in heard} == {"rank 0 aborted the ring: enough"}


def leave(seat: Seat, by_error: bool) -> Exception | None:
    """Rank 1 leaves the ring, orderly or by an exception, when the others call."""
    ring = group_ring(seat, timeout=LONG_S, name=f"leave {by_error}", **SMALL_GROUP)
    if seat.rank != 1:
        with ring:
            call(ring)
            start = time.monotonic()
            error = call(ring)
            assert time.monotonic() - start < IN_TIME_S
            return error

    def body() -> None:
        with ring:
            call(ring)
            if by_error:
                raise KeyError("lost")

    error = caught(body)
    assert (type(error) is KeyError) == by_error
    ring.close()  # twice does nothing
    return call(ring)


def test_a_rank_that_closes_the_ring(run: Run) -> None:
    first, own, third = run(WORLD, leave, False)
    assert type(first) is type(own) is type(third) is rr.RingClosed
    assert str(first) == str(third)
    assert "rank 1 closed the ring after 1 calls, while rank " in str(first)
    assert str(own) == "rank 1: the ring is closed; make a new one for further calls"


def test_a_rank_that_leaves_by_an_exception(run: Run) -> None:
    for error in run(WORLD, leave, True):
        assert type(error) is rr.RingAborted
        assert str(error) == "rank 1 aborted the ring: KeyError: 'lost'"


def fail_in_a_pass(seat: Seat) -> Exception | None:
    with group_ring(seat, timeout=LONG_S, **SMALL_GROUP) as ring:

        def fail() -> None:
            if seat.rank == 1:
                raise MemoryError("no memory")

        with in_the_middle(fail):
            return call(ring)


def test_an_error_in_a_pass_reaches_all_ranks(run: Run) -> None:
    errors = run(WORLD, fail_in_a_pass)
    assert type(errors[1]) is MemoryError  # its own, on its rank
    for error in (errors[0], errors[2]):
        assert type(error) is rr.RingAborted
        assert str(error) == "rank 1 aborted the ring: MemoryError: no memory"


def call_in_a_fork(seat: Seat) -> tuple[int, float]:
    """The exit status of a fork that finds the ring to be its parent's, and a sum of the parent afterwards."""
    with group_ring(seat, **SMALL_GROUP) as ring:
        child = os.fork()
        if child == 0:
            error = call(ring)
            ring.abort("a fork's")
            ring.close()
            os._exit(7 if type(error) is rr.RingClosed and "fork" in str(error) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, float(ring.all_reduce(np.ones(3))[0])


def test_a_fork_is_not_the_rank() -> None:
    with Team(2) as team:
        assert team.run(call_in_a_fork) == [(7, 2.0)] * 2


# ---- the store, and the ends of a ring's life


class StoppedStore:
    """Of a process that is stopped: it takes questions, and answers when it goes on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def _answer(self) -> bytes:
        self.goes_on.wait(LONG_S)
        return json.dumps({"kind": "RingTimeout", "text": "another's"}).encode()

    def check(self, keys: list[str]) -> bool:
        return bool(self._answer())

    def get(self, key: str) -> bytes:
        return self._answer()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._answer()


def test_a_store_that_does_not_answer() -> None:
    store: Any = StoppedStore()
    failures = FirstFailure(BoundedStore("ring 'x', rank 0", store, 0.05))
    mine = rr.PeerLost("mine")
    assert failures.report(mine) is mine
    assert failures.look() is None
    assert failures.calls_before_closing(1) is None
    store.goes_on.set()
    failures.close()
    assert failures.report(mine) is mine
    failures = FirstFailure(BoundedStore("ring 'x', rank 0", store, LONG_S))
    assert [str(failures.report(mine)), str(failures.look())] == ["another's"] * 2
    failures.close()


def connect_slowly(seat: Seat) -> list[bool]:
    """Whether rank 1 has its ring while rank 0 still connects."""
    early: list[bool] = []

    def slow(*arguments: Any) -> Any:
        links = original(*arguments)
        time.sleep(0.3)
        early.append(seat.store.check(["made"]))
        return links

    original = GlooLinks
    with mock.patch.object(group_start, "GlooLinks", slow) if seat.rank == 0 else nullcontext():
        ring = group_ring(seat, **SMALL_GROUP)
    seat.store.set("made", b"")
    ring.close()
    return early


def test_no_rank_has_the_ring_before_all_are_connected(run: Run) -> None:
    assert run(2, connect_slowly) == [[False], []]


def make_with_too_little_memory(seat: Seat) -> list[str]:
    """What each rank hears where the last finds no memory for its staging; then a ring is made all the same."""
    original = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8 and size != (0,):
            raise RuntimeError("can't allocate memory: you tried to allocate 16 bytes\nand a trace")
        return original(*size, **options)

    with mock.patch.object(torch, "empty", empty) if seat.rank == WORLD - 1 else nullcontext():
        error = caught(lambda: group_ring(seat, timeout=LONG_S, **SMALL_GROUP))
    assert type(error) is rr.RingError
    with group_ring(seat, **SMALL_GROUP) as ring:
        assert call(ring) is None
    return [str(error)]


def test_too_little_memory_of_one_rank_is_an_error_on_all(run: Run) -> None:
    heard = run(WORLD, make_with_too_little_memory, timeout=LONG_S)
    assert heard == [heard[0]] * WORLD
    assert "rank 2: no process group of the ring's own could be made: can't allocate memory" in heard[0][0]
    assert "a trace" not in heard[0][0]


def make_and_drop(seat: Seat) -> list[tuple[Exception | None, bool]]:
    """Of a ring that is closed, and of one that fails: what a call with the longest timeout raised, and whether
    closing freed all without a garbage collection."""
    found = []
    gc.disable()
    try:
        for fails in (False, True):
            ring = group_ring(seat, name=f"drop {fails}", timeout=threading.TIMEOUT_MAX, **SMALL_GROUP)
            error = call(ring)
            if fails:
                caught(lambda ring=ring: ring.all_reduce(torch.ones(SIZE + seat.rank)))  # type: ignore[misc]
            engine = weakref.ref(ring._engine)
            ring.close()
            del ring
            found.append((error, engine() is None))
    finally:
        gc.enable()
    return found


def test_a_closed_ring_holds_nothing(run: Run) -> None:
    assert run(2, make_and_drop) == [[(None, True)] * 2] * 2
