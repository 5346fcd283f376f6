"""Ranks that are late at every step: stopped for some milliseconds while they call, and where that was.

Nothing in the core waits on purpose. A rank records its calls (``ring_reduce.tracing``), on the clock by which it is
stopped, so that its own trace tells afterwards what it was at.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from launch import Seat, Team
from ring_reduce.tracing import Event, Recorder

WORLD = 4
CALLS = 150  # a job
BETWEEN = "between calls"
# What is called, how many float32, and where in it a rank may be: see ring_schedule.h and direct_schedule.h.
ALGORITHMS = {
    "ring": ("ring", 400_000, [BETWEEN, *(f"step {k}" for k in range(2 * WORLD - 1))]),
    "direct": (
        "direct",
        400_000,
        [BETWEEN, "post inputs", "wait inputs", "reduce", "wait results", "gather"],
    ),
    "one shot": ("direct", 65_536, [BETWEEN, "post inputs", "wait inputs", "reduce"]),
}


class Stop(NamedTuple):
    """A rank that surely did nothing from then to then."""

    rank: int
    from_ns: int
    to_ns: int


def stop_at_every_step(tries: int, seed: int) -> dict[str, Any]:
    """How many stops came where, of so many for each algorithm. Raises if a call fails or a result is wrong."""
    numbers = random.Random(seed)
    found: dict[str, Any] = {}
    with Team(WORLD) as team:
        for name, (algorithm, elements, places) in ALGORITHMS.items():
            seen: Counter[str] = Counter()
            while seen.total() < tries:
                team.begin(call_and_record, algorithm, elements)
                stops = list(stops_of(team, numbers))
                recorded = team.finish()
                met = (place_of(recorded[stop.rank], stop, name) for stop in stops)
                seen.update([place for place in met if place is not None][: tries - seen.total()])
            found[name] = {"tried": tries, "at": [[place, seen[place]] for place in places]}
    return found


def call_and_record(seat: Seat, algorithm: str, elements: int) -> list[Event]:
    """Calls whose results are checked, on the rank's own thread."""
    with seat.ring(algorithm=algorithm, lanes=1, one_shot_bytes=1 << 18) as ring, Recorder(ring) as recorder:
        seat.store.set(f"calling {seat.rank}", b"")
        for number in range(CALLS):
            x = np.full(elements, seat.rank + number, np.float32)
            ring.all_reduce(x)
            assert (x == sum(range(WORLD)) + WORLD * number).all()
        seat.store.set(f"done {seat.rank}", b"")
    assert recorder.trace.dropped == 0
    return recorder.trace.lanes[0].events


def stops_of(team: Team, numbers: random.Random) -> Iterator[Stop]:
    """One rank after another, until the first has made its calls."""
    for rank in range(WORLD):
        team.wait_for(f"calling {rank}")
    while not any(team.store.check([f"done {rank}"]) for rank in range(WORLD)):
        time.sleep(numbers.uniform(0, 0.01))
        rank = one_to_stop([process.pid for process in team.processes], numbers)
        with stopped(team.processes[rank].pid):
            from_ns = time.monotonic_ns()
            time.sleep(10 ** numbers.uniform(-3, -1.3))  # as long as a pause of the soak
            to_ns = time.monotonic_ns()
        yield Stop(rank, from_ns, to_ns)


def one_to_stop(pids: Sequence[int], numbers: random.Random) -> int:
    """Any rank, or one that works: most of the time most of them wait."""
    rank = numbers.randrange(WORLD)
    for _ in range(numbers.choice((0, 300))):
        if state_of(pids[rank]) == "R":
            break
        rank = numbers.randrange(WORLD)
    return rank


def state_of(pid: int) -> str:
    """As the kernel calls it: R runs, S sleeps, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that has stopped, and goes on afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while state_of(pid) != "T":
            time.sleep(0.0005)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def place_of(events: Sequence[Event], stop: Stop, algorithm: str) -> str | None:
    """What the rank was at. Between two events of a call: what came next. None: it had made its last call."""
    after = bisect_left(events, stop.to_ns, key=lambda event: event.end_ns)
    if after == len(events):
        return None
    event = events[after]
    if event.start_ns > stop.from_ns and (after == 0 or events[after - 1].call != event.call):
        return BETWEEN
    if algorithm == "ring":
        return f"step {event.step}"
    return "reduce" if event.name == "post results" else event.name  # one function of the schedule
