"""A job that starts again on the store of one that failed: its ranks meet, and hear nothing of the earlier try."""

from __future__ import annotations

import time

import numpy as np

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught


def start_again(seat: Seat) -> tuple[str, float]:
    """Rank 0 gives up its first try; rank 1 comes for the second one, and before rank 0 does."""
    first = ""
    if seat.rank == 0:
        first = str(caught(lambda: seat.ring(name="again", timeout=0.5)))
    seat.meet("refused")
    if seat.rank == 0:
        time.sleep(1)
    with seat.ring(name="again", timeout=20) as ring:
        return first, float(ring.all_reduce(np.ones(3))[0])


def test_a_refusal_of_an_earlier_try_is_not_taken_for_one_s_own(run: Run) -> None:
    (refused, total), (_, other) = run(2, start_again)
    assert "no word from rank 1 of 2 in 0.5 s" in refused
    assert total == other == 2


def come_late(seat: Seat) -> Exception | None:
    """Rank 0 gives up and tries no more; rank 1 comes after that."""
    if seat.rank == 0:
        error = caught(lambda: seat.ring(timeout=0.5))
        seat.meet("refused")
        return error
    seat.meet("refused")
    return caught(lambda: seat.ring(timeout=20))


def test_a_rank_that_comes_too_late_hears_why_there_is_no_ring(run: Run) -> None:
    first, second = run(2, come_late)
    assert type(first) is type(second) is rr.RingTimeout
    assert str(first) == str(second)
