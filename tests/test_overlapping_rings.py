"""Rings that share ranks, called in orders that can't be met: a time-out that names who was waited for, and no sum.

Asynchronous calls have no such orders: each ring has a thread of its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught

TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Knot:
    """Rings by name, and which each rank calls, in its order: all wait in their first for one that is not there."""

    members: dict[str, tuple[int, ...]]
    orders: tuple[str, ...]


KNOTS = [
    pytest.param(Knot({"A": (0, 1), "B": (0, 1)}, ("AB", "BA")), id="two rings of two ranks"),
    pytest.param(Knot({"A": (0, 1), "B": (1, 2), "C": (2, 0)}, ("AC", "BA", "CB")), id="a cycle of three"),
]
SIZES = [1, 1 << 18]


def make_rings(seat: Seat, knot: Knot, timeout: float, stack: contextlib.ExitStack) -> dict[str, rr.Ring]:
    """Those of this rank. All are made in one order: made in others they would be the same knot."""
    rings = {}
    seat.meet("start")  # no rank's deadline is over before another has begun
    for name, members in knot.members.items():
        if seat.rank in members:
            ring = rr.Ring(
                seat.store, rank=members.index(seat.rank), world=len(members), name=name, timeout=timeout
            )
            rings[name] = stack.enter_context(ring)
    return rings


def call_in_order(seat: Seat, knot: Knot, size: int) -> list[tuple[str, Exception | None, list[float]]]:
    """By call: its ring, what it raised, and its tensor's values then. No second call before all gave up the first."""
    said = []
    with contextlib.ExitStack() as stack:
        rings = make_rings(seat, knot, TIMEOUT_S, stack)
        for name in knot.orders[seat.rank]:
            x = np.full(size, 1.0 + seat.rank)
            said.append((name, caught(partial(rings[name].all_reduce, x)), sorted(set(x))))
            seat.meet(f"call {len(said)}")
    return said


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("knot", KNOTS)
def test_rings_in_opposite_orders_end_by_the_deadline(run: Run, knot: Knot, size: int) -> None:
    by_rank = run(len(knot.orders), call_in_order, knot, size)
    told: dict[str, set[str]] = {name: set() for name in knot.members}
    for rank, said in enumerate(by_rank):
        for name, error, values in said:
            assert type(error) is rr.RingTimeout
            assert values == [1.0 + rank]  # it is as it was
            told[name].add(str(error))
        name, error, _ = said[0]
        absent = 1 - knot.members[name].index(rank)  # as the ring counts its ranks
        assert f"rank {absent} has not made call 1 (it has completed 0)" in str(error)
    assert [len(texts) for texts in told.values()] == [1] * len(told)  # the same on both of its ranks


def call_at_once(seat: Seat, knot: Knot, size: int) -> dict[str, list[float]]:
    with contextlib.ExitStack() as stack:
        rings = make_rings(seat, knot, 60, stack)
        works = {
            name: rings[name].all_reduce(np.full(size, 1.0 + seat.rank), async_op=True)
            for name in knot.orders[seat.rank]
        }
        return {name: sorted(set(work.wait())) for name, work in works.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("knot", KNOTS)
def test_asynchronous_calls_of_several_rings_have_no_order(run: Run, knot: Knot, size: int) -> None:
    for sums in run(len(knot.orders), call_at_once, knot, size):
        assert len(sums) == 2
        for name, values in sums.items():
            assert values == [sum(1.0 + rank for rank in knot.members[name])]


def leave_the_first(seat: Seat, knot: Knot) -> Exception | None:
    """As a program does: nobody catches the error, which leaves all `with` rings."""

    def body() -> None:
        with contextlib.ExitStack() as stack:
            rings = make_rings(seat, knot, TIMEOUT_S, stack)
            for name in knot.orders[seat.rank]:
                rings[name].all_reduce(np.ones(3))

    return caught(body)


@pytest.mark.parametrize("knot", KNOTS)
def test_a_time_out_that_leaves_one_ring_ends_the_others(run: Run, knot: Knot) -> None:
    """Whoever gives up first says so to all that wait for it in another ring, so that nobody is left behind."""
    errors = run(len(knot.orders), leave_the_first, knot)
    assert any(type(error) is rr.RingTimeout for error in errors)
    for error in errors:
        assert isinstance(error, rr.RingError)
        assert "has not made call 1" in str(error)
