"""Uneven inputs under join(): a rank that has left counts 0, and a mean without counts keeps the initial world."""

from __future__ import annotations

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_cases import Case, Step, assert_gradients, examples, make_model, quotient, summed, taken
from ddp_helpers import group
from launch import Seat

STEPS = [0, 2, 4]  # of each rank: one never trains, one leaves after the buckets were rebuilt
SIZES = (4, 2, 8)


def join_uneven(seat: Seat, case: Case) -> list[Step]:
    with group(seat) as ring:
        model = case.model()
        state = rr.attach(model, ring, case.normalization)
        with model.join():
            return [case.backward(model, state, seat.rank, step) for step in range(STEPS[seat.rank])]


def still_training(step: int) -> list[int]:
    return [rank for rank, steps in enumerate(STEPS) if step < steps]


@pytest.mark.parametrize(
    "case",
    [
        Case(rr.DIVIDE_BY_COUNT, SIZES),
        Case(rr.WEIGHTED_MEAN, SIZES),
        Case(rr.MEAN, SIZES),  # the initial world
        Case(rr.divide_by(14), SIZES),
        Case(rr.SUM, (4, 4, 8)),  # its total has to be a power of two
    ],
    ids=lambda case: repr(case.normalization),
)
def test_a_rank_that_has_left_adds_nothing_and_counts_0(run: Run, case: Case) -> None:
    for rank, steps in enumerate(run(3, join_uneven, case)):
        assert len(steps) == STEPS[rank]
        for step, seen in enumerate(steps):
            active = still_training(step)
            assert_gradients(seen, case.expected(step, active), f"rank {rank}, step {step}, {active} train")
            assert seen.last is not None
            assert seen.last[:2] == case.last(active)


def mean_over_active(seat: Seat) -> list[Step]:
    """Local means, and a count of 1 for each rank that trains."""
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
        seen = []
        with model.join():
            for step in range(STEPS[seat.rank]):
                model.zero_grad()
                state.add_count(1)
                model(examples(seat.rank, step, SIZES[seat.rank])).mean().backward()
                seen.append(taken(model, state))
        return seen


def test_a_count_of_1_gives_the_mean_over_active_ranks(run: Run) -> None:
    for rank, steps in enumerate(run(3, mean_over_active)):
        for step, seen in enumerate(steps):
            active = still_training(step)
            means = [examples(r, step, SIZES[r], torch.float64).mean(0) for r in active]
            assert_gradients(seen, quotient(summed(means), len(active)), f"rank {rank}, step {step}")
