"""A rank that is killed, exits, raises, is interrupted, aborts or never calls: the others hear of it and go on.

The ring's own timeout is a minute here, so what ends a wait is the fault that is seen, not the clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, Team, caught, spawn

DETECTION_S = 10.0  # ten times what the ring promises


def calls_until_it_fails(ring: rr.Ring, size: int) -> Exception | None:
    def forever() -> None:
        while True:
            ring.all_reduce(np.ones(size, np.float32))

    return caught(forever)


def survive(seat: Seat, size: int) -> tuple[Exception | None, Exception | None, bool]:
    """Calls until the ring fails. Says when it has made some calls."""
    with seat.ring(lanes=2) as ring:
        for _ in range(5):
            ring.all_reduce(np.ones(size, np.float32))
        seat.store.set(f"calling {seat.rank}", b"")
        return calls_until_it_fails(ring, size), caught(ring.check), ring.closed


@pytest.mark.parametrize("size", [1, 1 << 22])
@pytest.mark.parametrize(("world", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_that_is_killed_in_the_middle(world: int, victim: int, size: int) -> None:
    with Team(world) as team:
        team.begin(survive, size)
        team.wait_for(f"calling {victim}")
        os.kill(team.processes[victim].pid, signal.SIGKILL)
        results = team.finish(lost={victim}, timeout=DETECTION_S)
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    for error, later, closed in survivors:
        assert type(error) is rr.PeerLost
        assert f"rank {victim} ended (killed" in str(error)
        assert "start the job again" in str(error)
        assert str(error) == str(later) == str(survivors[0][0])
        assert closed


def wait_for_one_that_sleeps(seat: Seat, victim: int, async_op: bool) -> Exception | None:
    with seat.ring() as ring:
        if seat.rank == victim:
            seat.store.set("sleeping", b"")
            time.sleep(1000)
        if async_op:
            return caught(ring.all_reduce(np.ones(5), async_op=True).wait)
        return caught(lambda: ring.all_reduce(np.ones(5)))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(("world", "victim"), [(2, 0), (3, 1)])
def test_a_rank_that_is_killed_before_a_call(world: int, victim: int, async_op: bool) -> None:
    with Team(world) as team:
        team.begin(wait_for_one_that_sleeps, victim, async_op)
        team.wait_for("sleeping")
        os.kill(team.processes[victim].pid, signal.SIGKILL)
        errors = team.finish(lost={victim}, timeout=DETECTION_S)
    for rank in set(range(world)) - {victim}:
        assert type(errors[rank]) is rr.PeerLost
        assert f"rank {victim} ended" in str(errors[rank])
        assert "in call 1" in str(errors[rank])


def die_with_a_child(seat: Seat) -> Exception | None:
    with seat.ring() as ring:
        ring.all_reduce(np.ones(5))
        if seat.rank == 1:
            child = os.fork()  # it has every descriptor, so that no socket or pipe ends with this rank
            if child == 0:
                time.sleep(1000)
            seat.store.set("child", str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        return caught(lambda: ring.all_reduce(np.ones(5)))


def test_a_child_that_outlives_its_rank_hides_nothing() -> None:
    with Team(2) as team:
        team.begin(die_with_a_child)
        team.wait_for("child")
        try:
            error = team.answer(0, timeout=DETECTION_S)
        finally:
            os.kill(int(team.store.get("child")), signal.SIGKILL)
    assert type(error) is rr.PeerLost
    assert "rank 1 ended" in str(error)


def exit_after_the_last_call(seat: Seat, calls: int, close: bool) -> None:
    ring = seat.ring(lanes=2)
    for _ in range(calls):
        assert ring.all_reduce(np.ones(70_000))[0] == seat.world
    if seat.rank != 0:
        if close:
            ring.close()
        os._exit(0)


@pytest.mark.parametrize("close", [False, True])
def test_a_rank_that_is_done_and_gone_is_not_lost(close: bool) -> None:
    for calls in range(1, 9):
        spawn(3, exit_after_the_last_call, calls, close, lost={1, 2})


def exit_too_early(seat: Seat, how: str) -> Exception | None:
    ring = seat.ring()
    ring.all_reduce(np.ones(5))
    if seat.rank == 1:
        if how == "close":
            ring.close()
            return None
        if how == "drop":
            seat._rings.clear()
            del ring
            return None
        os._exit(3)
    return calls_until_it_fails(ring, 5)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("close", rr.RingClosed, "rank 1 closed the ring after 1 calls, while rank 0 is in call 2"),
        ("drop", rr.RingClosed, "rank 1 closed the ring after 1 calls, while rank 0 is in call 2"),
        (
            "exit",
            rr.PeerLost,
            "rank 1 ended (killed, crashed or exited) after 1 calls, while rank 0 is in call 2",
        ),
    ],
)
def test_a_rank_that_leaves_before_a_call(how: str, kind: type[Exception], text: str) -> None:
    error = spawn(2, exit_too_early, how, lost={1} if how == "exit" else ())[0]
    assert type(error) is kind
    assert text in str(error)


def raise_inside(seat: Seat) -> Exception | None:
    def body() -> None:
        with seat.ring() as ring:
            ring.all_reduce(np.ones(5))
            if seat.rank == 1:
                raise ValueError("batch 7 is empty")
            ring.all_reduce(np.ones(5))

    return caught(body)


@pytest.mark.parametrize("world", [2, 4])
def test_an_exception_inside_the_ring_ends_it_on_all_ranks(run: Run, world: int) -> None:
    for rank, error in enumerate(run(world, raise_inside)):
        assert type(error) is (ValueError if rank == 1 else rr.RingAborted)
        assert "batch 7 is empty" in str(error)
        assert rank == 1 or "rank 1 aborted the ring: ValueError" in str(error)


def abort_from_a_thread(seat: Seat) -> Exception | None:
    with seat.ring() as ring:
        if seat.rank == 0:
            seat.store.set("calling", b"")
            return caught(lambda: ring.all_reduce(np.ones(5)))

        def give_up() -> None:
            seat.store.get("calling")
            ring.abort("the disk is full")
            ring.abort("again")

        thread = threading.Thread(target=give_up)
        thread.start()
        thread.join()
        return caught(lambda: ring.all_reduce(np.ones(5)))


def test_an_abort_of_another_thread(run: Run) -> None:
    errors = run(2, abort_from_a_thread)
    for error in errors:
        assert type(error) is rr.RingAborted
        assert str(error) == "rank 1 aborted the ring: the disk is full"


def abort_own_call(seat: Seat) -> Exception | None:
    with seat.ring() as ring:
        if seat.rank == 1:
            seat.store.get("aborted")
            return caught(lambda: ring.all_reduce(np.ones(5)))
        work = ring.all_reduce(np.ones(5), async_op=True)
        behind = ring.all_reduce(np.ones(5), async_op=True)
        ring.abort("enough\nof \N{GREEK SMALL LETTER PI} and " + 4000 * "x")
        error = caught(work.wait)
        assert type(caught(behind.wait)) is rr.RingAborted
        seat.store.set("aborted", b"")
        return error


def test_an_abort_of_calls_in_flight(run: Run) -> None:
    """Any text goes through; a long one is cut."""
    for error in run(2, abort_own_call):
        assert type(error) is rr.RingAborted
        assert "rank 0 aborted the ring: enough\nof \N{GREEK SMALL LETTER PI} and xxxx" in str(error)
        assert len(str(error)) <= 2048


def interrupted(seat: Seat, async_op: bool) -> tuple[str, Exception | None]:
    """Rank 0 waits for rank 1, which calls only once rank 0 has been interrupted."""
    outcome = "returned"
    error = None
    with contextlib.suppress(KeyboardInterrupt), seat.ring() as ring:
        if seat.rank == 1:
            seat.store.get("interrupted")
            return "", caught(lambda: ring.all_reduce(np.ones(5)))
        try:
            seat.store.set("calling", b"")
            if async_op:
                ring.all_reduce(np.ones(5), async_op=True).wait()
            else:
                ring.all_reduce(np.ones(5))
        except KeyboardInterrupt:
            outcome = "KeyboardInterrupt"
            error = caught(ring.check)
            if async_op:
                ring.abort("interrupted")
            seat.store.set("interrupted", b"")
            raise
    return outcome, error


@pytest.mark.parametrize("async_op", [False, True])
def test_ctrl_c_during_a_call(async_op: bool) -> None:
    with Team(2) as team:
        team.begin(interrupted, async_op)
        team.wait_for("calling")
        time.sleep(0.3)  # the call is some microseconds after the word; a signal before it would prove less
        os.kill(team.processes[0].pid, signal.SIGINT)
        (outcome, own), (_, error) = team.finish(timeout=DETECTION_S)
    assert outcome == "KeyboardInterrupt"
    assert type(error) is rr.RingAborted
    assert "rank 0" in str(error)
    assert "interrupted" in str(error)
    assert async_op or str(own) == str(error)


def use_in_a_fork(seat: Seat) -> tuple[str, float, bool]:
    """A child calls, closes and exits through Python's own exit: its parent's ring goes on."""
    with seat.ring() as ring:
        ring.all_reduce(np.ones(3), async_op=True).wait()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            error = caught(lambda: ring.all_reduce(np.ones(3)))
            behind = caught(lambda: ring.all_reduce(np.ones(3), async_op=True).wait())
            ring.abort("from a fork")
            ring.close()
            os.write(writing, f"{type(error).__name__} {type(behind).__name__} {error}".encode())
            seat._rings.clear()
            del ring
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        return text, float(ring.all_reduce(np.ones(3))[0]), ring.closed


def test_a_fork_is_not_its_parent_s_rank() -> None:
    for rank, (text, value, closed) in enumerate(spawn(2, use_in_a_fork)):
        assert text.startswith("RingClosed RingClosed ")
        assert f"rank {rank}" in text
        assert "fork" in text
        assert value == 2.0
        assert not closed


FORGETFUL = """
import sys, threading
import numpy as np
import ring_reduce as rr
from ring_reduce.probe import DirectoryStore
from pathlib import Path
rank = int(sys.argv[2])
ring = rr.Ring(DirectoryStore(Path(sys.argv[1])), rank=rank, world=2, timeout=60)
ring.all_reduce(np.ones(3))
if rank == 1:
    ring.all_reduce(np.ones(3), async_op=True)  # rank 0 never makes this call
"""


def test_python_exits_with_a_call_in_flight(tmp_path: Any) -> None:
    """And without close(): neither rank hangs or crashes at exit."""
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE) for rank in range(2)]
    for process in ranks:
        _, errors = process.communicate(timeout=50)
        assert process.returncode == 0, errors.decode()
