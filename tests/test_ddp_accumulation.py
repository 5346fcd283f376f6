"""Micro-batches under no_sync: the last one reduces, once, and divides by the counts of all."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_cases import BLOCKS, Step, assert_gradients, examples, make_model, quotient, summed, taken
from ddp_helpers import group
from launch import Seat, caught
from ring_reduce.normalization import Normalization

SIZES = [(4, 2, 8), (1, 8, 2)]  # by rank
TOTAL = 25
SUM_DIVISOR = 32  # of each loss under SUM: a power of two, so that it rounds nothing


def micro_batches(seat: Seat, normalization: Normalization, view: bool) -> tuple[list[int], Any, list[Step]]:
    """Three steps, each of three micro-batches of which the last reduces."""
    loss_divisor = SUM_DIVISOR if normalization == rr.SUM else 1
    with group(seat) as ring:
        model = make_model(gradient_as_bucket_view=view)
        state = rr.attach(model, ring, normalization)
        last_before, steps = None, []
        for step in range(3):
            calls, before = [], ring.stats.calls
            model.zero_grad()
            for micro, size in enumerate(SIZES[seat.rank]):
                # no_sync has to wrap the forward, where DDP decides whether to reduce.
                with model.no_sync() if micro < 2 else contextlib.nullcontext():
                    if normalization.uses_count:
                        state.add_count(size)
                    (model(examples(seat.rank, micro, size)).sum() / loss_divisor).backward()
                calls.append(ring.stats.calls - before)
                if step == 0 and micro < 2:
                    last_before = last_before or state.last
            steps.append(taken(model, state))
        return calls, last_before, steps


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize(
    ("normalization", "divisor", "last"),
    [(rr.DIVIDE_BY_COUNT, TOTAL, (25.0, 25.0)), (rr.SUM, SUM_DIVISOR, (0.0, 1.0))],
    ids=["DIVIDE_BY_COUNT", "SUM"],
)
def test_micro_batches_reduce_once(
    run: Run, normalization: Normalization, divisor: int, last: tuple[float, float], view: bool
) -> None:
    whole = summed(
        examples(rank, micro, size, torch.float64).sum(0)
        for rank, mine in enumerate(SIZES)
        for micro, size in enumerate(mine)
    )
    for calls, last_before, steps in run(2, micro_batches, normalization, view):
        assert calls == [0, 0, BLOCKS], "calls of the ring after each micro-batch of the last step"
        assert last_before is None
        for step in steps:
            assert_gradients(step, quotient(whole, divisor), "micro-batches")
            assert step.last is not None
            assert step.last[:2] == last


def no_sync_around_backward(seat: Seat, normalization: Normalization) -> tuple[list[Step], list[str]]:
    """The mistake: forward has decided already, so each micro-batch reduces what is in p.grad. With its warnings."""
    loss_divisor = 4 if normalization == rr.WEIGHTED_MEAN else 1
    seen: list[Step] = []
    with group(seat) as ring, warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        model = make_model()
        state = rr.attach(model, ring, normalization)
        for micro in range(2):
            state.add_count(4)
            loss = model(examples(seat.rank, micro, 4)).sum() / loss_divisor
            with model.no_sync():
                loss.backward()
            seen.append(taken(model, state))
    return seen, [str(w.message) for w in caught_warnings if "not zeroed" in str(w.message)]


def sums_of(micro: int) -> torch.Tensor:
    return summed(examples(rank, micro, 4, torch.float64).sum(0) for rank in range(2))


def test_no_sync_that_wraps_only_backward_reduces_all_the_same(run: Run) -> None:
    """Means forgive it: the mean of the reduced gradient, which both ranks bring along, is itself."""
    for (first, second), texts in run(2, no_sync_around_backward, rr.WEIGHTED_MEAN):
        assert texts == []
        assert_gradients(first, quotient(sums_of(0), 8), "the first micro-batch is reduced")
        assert first.last is not None
        assert second.last is not None
        assert first.last[:2] == second.last[:2] == (8.0, 8.0), "each with its own count, and not 16"
        assert_gradients(second, quotient(sums_of(0) + sums_of(1), 8), "the second micro-batch")


def test_no_sync_that_wraps_only_backward_warns_where_sums_add_up_again(run: Run) -> None:
    for (first, _), texts in run(2, no_sync_around_backward, rr.DIVIDE_BY_COUNT):
        assert_gradients(first, quotient(sums_of(0), 8), "the first micro-batch is reduced")
        assert len(texts) == 1
        for part in ("the gradient of weights.", "not zeroed", "no_sync()"):
            assert part in texts[0]


def second_count(seat: Seat) -> tuple[Exception | None, str, bool]:
    """Rank 1 adds a count for each of two micro-batches. What its step raises, and why its ring failed."""
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, rr.WEIGHTED_MEAN)

        def step() -> None:
            with model.no_sync():
                state.add_count(2)
                model(examples(seat.rank, 0, 2)).mean().backward()
            if seat.rank == 1:
                state.add_count(4)
            model(examples(seat.rank, 1, 4)).mean().backward()

        error = caught(step)
        return error, str(ring.failure), ring.closed


def test_weighted_mean_refuses_a_count_for_each_micro_batch(run: Run) -> None:
    (heard, _, _), (refused, _, _) = results = run(2, second_count)
    assert type(refused) is rr.CountError
    for part in (
        "rank 1: a second count, 4, before a backward reduced 2",
        "accumulate sums under DIVIDE_BY_COUNT",
    ):
        assert part in str(refused)
    assert heard is not None
    for _, failure, closed in results:
        assert failure == f"rank 1 aborted the ring: CountError: {refused}"
        assert failure in str(heard)
        assert closed
