"""A call that goes on for too long: a time-out on every rank, whose text names the rank that holds it up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, Team, caught


def never_call(seat: Seat, async_op: bool) -> Exception | None:
    with seat.ring(timeout=1.0) as ring:
        ring.all_reduce(np.ones(5))
        if seat.rank == 1:
            seat.store.get("timed out")
            return caught(lambda: ring.all_reduce(np.ones(5)))
        if async_op:
            error = caught(ring.all_reduce(np.ones(5), async_op=True).wait)
        else:
            error = caught(lambda: ring.all_reduce(np.ones(5)))
        seat.store.set("timed out", b"")
        return error


@pytest.mark.parametrize("async_op", [False, True])
def test_a_rank_that_never_calls_is_named(run: Run, async_op: bool) -> None:
    errors = run(3, never_call, async_op)
    for error in errors:
        assert type(error) is rr.RingTimeout
        assert "rank 1 has not made call 2 (it has completed 1)" in str(error)
        assert re.search(r"in [1-9]\d*\.\d s", str(error))  # 1.0, and more where the machine is busy
        assert "is that process alive" in str(error)
        assert str(error) == str(errors[0])


def stopped(seat: Seat, size: int) -> Exception | None:
    with seat.ring(timeout=2.0, lanes=1) as ring:
        seat.store.set(f"calling {seat.rank}", b"")

        def forever() -> None:
            while True:
                ring.all_reduce(np.ones(size, np.float32))

        return caught(forever)


# Three ranks wait as long as each other for their left neighbour: whichever gives up first has to name the one that
# all of them wait for. Of 1 element all fits into the slots; of a million much waits for free slots.
@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize(("world", "victim"), [(2, 1), (4, 0), (4, 2)])
def test_a_rank_that_is_stopped_in_a_call_is_named(world: int, victim: int, size: int) -> None:
    with Team(world) as team:
        team.begin(stopped, size)
        team.wait_for(f"calling {victim}")
        time.sleep(0.1)
        os.kill(team.processes[victim].pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(team.processes[victim].pid, signal.SIGCONT)
        errors = team.finish()
    for error in errors:
        assert type(error) is rr.RingTimeout
        assert str(error) == str(errors[0])
        assert not str(error).startswith(f"rank {victim}:")
        assert f"rank {victim}" in str(error), error


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e300, timedelta(0)])
def test_a_timeout_that_is_no_time(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout is .* has to be positive, and at most"):
        rr.Ring(rank=0, world=1, timeout=timeout)


@pytest.mark.parametrize("timeout", ["30", [1], True, {}])
def test_a_timeout_that_is_no_number(timeout: Any) -> None:
    with pytest.raises(TypeError, match="it has to be a number of seconds"):
        rr.Ring(rank=0, world=1, timeout=timeout)


def test_timeouts_that_are_fine() -> None:
    for timeout in (timedelta(minutes=1), np.float32(60), 60, threading.TIMEOUT_MAX):
        with rr.Ring(rank=0, world=1, timeout=timeout) as ring:
            assert ring.timeout == (60 if timeout != threading.TIMEOUT_MAX else timeout)


def test_the_timeout_of_the_environment() -> None:
    code = "import ring_reduce as rr; print(rr.Ring(rank=0, world=1).timeout)"
    for text, status, output in [
        ("12.5", 0, "12.5"),
        ("", 0, "300.0"),
        ("soon", 1, "is 'soon'; it has to be a number"),
    ]:
        environment = {**os.environ, "RING_REDUCE_TIMEOUT": text}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == status
        assert output in done.stdout + done.stderr
