"""close(), exit, forks, interrupts and aborts that come while calls run, and what threads and futures do to a ring."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from cases import SMALL
from conftest import Run
from launch import Seat, Team, caught, run_script

LONG_S = 30.0  # a bound on a hang


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_thread(job: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


# ---- close() in the middle of calls


def close_during_a_call(seat: Seat) -> list[float]:
    """Rank 0 closes while a thread of its own waits in a call for rank 1."""
    ring = seat.ring()
    if seat.rank == 1:
        seat.store.get("closing")
        return [float(ring.all_reduce(np.ones(3))[0])]
    sums: list[float] = []
    call = in_thread(lambda: sums.append(float(ring.all_reduce(np.ones(3))[0])))
    until(ring._engine.busy)
    closing = in_thread(ring.close)
    until(lambda: ring.closed)
    closing.join(0.2)
    assert closing.is_alive(), "it did not wait"
    seat.store.set("closing", b"")
    until(lambda: not (call.is_alive() or closing.is_alive()))
    assert type(caught(lambda: ring.all_reduce(np.ones(3)))) is rr.RingClosed
    return sums


def test_close_waits_for_a_synchronous_call_of_another_thread(run: Run) -> None:
    assert run(2, close_during_a_call) == [[2.0], [2.0]]


def submit_while_closing(seat: Seat, calls: int) -> tuple[list[float], list[Exception | None]]:
    """Rank 0 closes with calls in its queue that rank 1 has not made yet, and then tries to make more."""
    ring = seat.ring()
    if seat.rank == 1:
        seat.store.get("refused")
    works = [ring.all_reduce(np.full(3, float(i)), async_op=True) for i in range(calls)]
    refusals: list[Exception | None] = []
    if seat.rank == 0:
        closing = in_thread(ring.close)
        until(lambda: ring.closed)
        refusals = [caught(partial(ring.all_reduce, np.ones(3), async_op=op)) for op in (True, False)]
        refusals.append(caught(ring.check))
        seat.store.set("refused", b"")
        until(lambda: not closing.is_alive())
    return [float(work.wait(LONG_S)[0]) for work in works], refusals


def test_no_call_is_taken_while_the_ring_is_being_closed(run: Run) -> None:
    (sums, refusals), (others, _) = run(2, submit_while_closing, 20)
    assert sums == others == [2.0 * i for i in range(20)]
    for error in refusals:
        assert type(error) is rr.RingClosed
        assert "is being closed; make a new" in str(error)


def test_a_call_that_was_taken_completes_however_close_to_the_end() -> None:
    """Calls are made in a loop until the ring is closed in the middle of it: none may be lost."""
    for seed in range(20):
        ring = rr.Ring(rank=0, world=1)
        works: list[rr.Work] = []
        closing = threading.Timer(random.Random(seed).uniform(0, 0.003), ring.close)
        closing.start()
        with pytest.raises(rr.RingClosed, match="closed"):  # noqa: PT012
            while True:
                works.append(ring.all_reduce(np.full(3, 5.0), async_op=True))
        closing.join(LONG_S)
        assert [work.wait(LONG_S)[0] for work in works] == [5.0] * len(works)


# ---- callbacks, and what futures hold


def call_in_a_callback(seat: Seat) -> tuple[list[Exception | None], list[float]]:
    """Rank 0's callbacks run on the ring's thread, since rank 1 makes the call only once they are there."""
    import torch

    ring = seat.kept_ring()
    errors: list[Exception | None] = []
    if seat.rank == 1:
        seat.store.get("callbacks")
        ring.all_reduce(torch.ones(3))
        return errors, [float(ring.all_reduce(np.ones(3))[0]) for _ in range(2)]
    later = []

    def call(_: Any) -> None:
        errors.append(caught(lambda: ring.all_reduce(np.ones(3))))

    def call_later(_: Any) -> None:
        later.append(ring.all_reduce(np.ones(3), async_op=True))

    work = ring.all_reduce(torch.ones(3), async_op=True)
    work._future.add_done_callback(call)
    future = work.get_future().then(call).then(call_later)
    seat.store.set("callbacks", b"")
    future.wait()
    return errors, [float(later[0].wait()[0]), float(ring.all_reduce(np.ones(3))[0])]


def test_a_synchronous_call_in_a_callback_is_refused(run: Run) -> None:
    (errors, sums), (_, others) = run(2, call_in_a_callback)
    assert [type(error) for error in errors] == [RuntimeError] * 2
    for error in errors:
        assert "pass async_op=True" in str(error)
    assert sums == others == [2.0, 2.0]


def tensors_behind_futures(seat: Seat, calls: int) -> tuple[bool, int]:
    """Whether a future that is held has its value; tensors alive once all futures are dropped."""
    import torch

    def call() -> tuple[Any, Any]:
        x = torch.ones(1000)
        future = seat.kept_ring().all_reduce(x, async_op=True).get_future()
        future.wait()
        return future, weakref.ref(x)

    future, first = call()
    held = first() is future.value()
    del future
    tensors = [first, *(call()[1] for _ in range(calls))]
    with contextlib.suppress(AssertionError):  # the thread lets go a moment after the result is there
        until(lambda: all(tensor() is None for tensor in tensors))
    return held, sum(tensor() is not None for tensor in tensors)


def test_a_future_that_is_dropped_holds_no_tensor(run: Run) -> None:
    assert run(2, tensors_behind_futures, 100) == [(True, 0)] * 2


# ---- forks and exits

PREAMBLE = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
import ring_reduce as rr
from ring_reduce.probe import DirectoryStore
def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
store, rank = DirectoryStore(Path(sys.argv[1])), int(sys.argv[2])
ring = rr.Ring(store, rank=rank, world=2, timeout=60, lanes=2)
ring.all_reduce(np.ones(1 << 18))  # starts the lanes
"""

FORK_IN_A_CALL = """
if rank == 1:
    store.get("child is gone")
work = ring.all_reduce(np.ones(1 << 18), async_op=True)
if rank == 0:
    child = os.fork()
    if child == 0:
        for op in (True, False):
            print(error_of(lambda: ring.all_reduce(np.ones(3), async_op=op)))
        print(error_of(work.wait))
        ring.abort("from a fork")
        ring.close()
        sys.exit(7)  # Python's own exit, with its finalizers
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.set("child is gone", b"")
assert (work.wait() == 2).all()
time.sleep(0.2 * (rank == 0))  # rank 1 waits in the next call, and looks who is gone
assert (ring.all_reduce(np.ones(1 << 18)) == 2).all()
"""


def test_a_fork_during_a_call_gets_errors_and_disturbs_nothing(tmp_path: Path) -> None:
    (status, said, errors), other = run_script(2, PREAMBLE + FORK_IN_A_CALL, tmp_path)
    assert (status, other) == (0, (0, "", "")), errors
    assert "Traceback" not in errors
    assert len(said.splitlines()) == 3
    for line in said.splitlines():
        assert line.startswith(("RingClosed: ", "RingError: "))
        assert "this process is a fork of the one that made" in line


EXIT_IN_A_CALL = """
import select
if rank == 1:
    call = lambda: error_of(lambda: ring.all_reduce(np.ones(1 << 18)))
    busy = lambda: all(True for _ in iter(int, 1))  # so that the call's thread comes back to Python late
    for job in (call, busy):
        threading.Thread(target=job, daemon=True).start()
    while not ring._engine.busy():
        time.sleep(0.001)
    store.set("pid", str(os.getpid()))
else:
    poller = select.poll()
    poller.register(os.pidfd_open(int(store.get("pid"))), select.POLLIN)
    poller.poll(30_000)
    print(error_of(lambda: ring.all_reduce(np.ones(1 << 18))))
"""


@pytest.mark.parametrize("attempt", range(6))
def test_python_exits_with_a_synchronous_call_on_a_daemon_thread(tmp_path: Path, attempt: int) -> None:
    (_, said, _), (status, _, errors) = run_script(2, PREAMBLE + EXIT_IN_A_CALL, tmp_path)
    assert status == 0, f"attempt {attempt}: {errors}"
    assert said.startswith("RingAborted: rank 1 exited, or dropped the ring, with calls in flight")


# ---- interrupts and aborts


def interrupted_behind_another(seat: Seat) -> tuple[str, Exception | None, list[float]]:
    """Rank 0's synchronous call waits in the queue, until Ctrl-C. What it raised, why the ring failed, its tensors."""
    ring = seat.ring()
    if seat.rank == 1:
        seat.store.get("interrupted")
        first = caught(lambda: ring.all_reduce(np.ones(3)))
        return "", first or caught(lambda: ring.all_reduce(np.ones(3))), []
    x, y, outcome = np.ones(3), np.ones(3), "returned"
    work = ring.all_reduce(x, async_op=True)
    try:
        seat.store.set("calling", b"")
        ring.all_reduce(y)
    except KeyboardInterrupt:
        outcome = "KeyboardInterrupt"
    seat.store.set("interrupted", b"")
    error = caught(lambda: work.wait(LONG_S))
    ring.close()  # waits for all that is queued
    return outcome, error, [*x, *y]


def test_ctrl_c_of_a_call_that_is_queued() -> None:
    with Team(2) as team:
        team.begin(interrupted_behind_another)
        team.wait_for("calling")
        time.sleep(0.3)  # the call is some microseconds after the word; a signal before it would prove less
        os.kill(team.processes[0].pid, signal.SIGINT)
        (outcome, own, tensors), (_, error, _) = team.finish()
    assert outcome == "KeyboardInterrupt"
    assert tensors == [1.0] * 6
    assert type(own) is type(error) is rr.RingAborted
    assert str(own) == str(error) == "rank 0 aborted the ring: KeyboardInterrupt while it waited for a call"


def abort_at_once(seat: Seat, rounds: int) -> list[set[str]]:
    """Ranks 0 and 1 abort, rank 2 is in a call, rank 3 comes late. All that this rank hears, by round."""
    heard = []
    for i in range(rounds):
        with seat.ring(name="abort", **SMALL) as ring:
            soon = np.array([time.monotonic_ns() + 2_000_000 if seat.rank == 0 else 0])
            ring.all_reduce(soon)  # one clock for all processes
            if seat.rank < 2:
                soon += random.Random(10 * i + seat.rank).randrange(10_000)
                while time.monotonic_ns() < soon[0]:
                    pass
                ring.abort(f"reason {seat.rank} of round {i}")
                seat.store.set(f"{i}: rank {seat.rank} aborted", b"")
            if seat.rank == 3:
                for rank in range(2):
                    seat.store.get(f"{i}: rank {rank} aborted")
            heard.append({str(caught(lambda: ring.all_reduce(np.ones(3)))), str(ring.failure)})
    return heard


def test_of_two_aborts_at_once_all_ranks_hear_the_same(run: Run) -> None:
    for i, heard in enumerate(zip(*run(4, abort_at_once, 100), strict=True)):
        texts = set.union(*heard)
        assert len(texts) == 1, texts
        assert f"of round {i}" in texts.pop()
