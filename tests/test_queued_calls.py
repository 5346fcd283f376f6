"""A thousand calls are queued when a rank dies: all of them fail, and at once."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

import ring_reduce as rr
from launch import Seat, Team, caught

CALLS = 1000
DETECTION_S = 10.0  # ten times what is promised


def queue_many(seat: Seat) -> tuple[list[str], float, bool]:
    """Rank 1 makes no call. Texts of all errors, when the last was raised, and whether tensors are unchanged."""
    with seat.ring() as ring:
        if seat.rank == 1:
            seat.store.get("queued")
            os.kill(os.getpid(), signal.SIGKILL)
        tensors = [np.full(100, float(number)) for number in range(CALLS)]
        works = [ring.all_reduce(x, async_op=True) for x in tensors]
        seat.store.set("queued", b"")
        errors = [caught(work.wait) for work in works]
        ended = time.monotonic()
        unchanged = all((x == number).all() for number, x in enumerate(tensors[1:], start=1))
    return [f"{type(error).__name__}: {error}" for error in errors], ended, unchanged


def test_a_thousand_queued_calls_fail_at_once() -> None:
    with Team(2) as team:
        team.begin(queue_many)
        team.wait_for("queued")
        killed = time.monotonic()
        texts, ended, unchanged = team.finish(lost={1})[0]
    assert len(texts) == CALLS
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"{rr.PeerLost.__name__}: rank 1 ended (killed")
    assert unchanged
    assert ended - killed < DETECTION_S
