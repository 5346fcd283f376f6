"""The DDP hook on exact data: gradients and state.last to the bit, for every normalization."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_cases import (
    BLOCKS,
    WIDTH,
    Case,
    Step,
    assert_gradients,
    every_normalization,
    examples,
    make_model,
    quotient,
    summed,
    taken,
)
from ddp_helpers import group
from launch import Seat
from ring_reduce.normalization import Kind, Normalization

STEPS = 4  # DDP rebuilds its buckets after the first or the second


def train(seat: Seat, cases: list[Case]) -> list[list[Step]]:
    """All steps of all cases, each with a model of its own, over one ring."""
    results = []
    with group(seat) as ring:
        for case in cases:
            model = make_model(case.dtype, **case.options)
            state = rr.attach(model, ring, case.normalization)
            assert state.last is None
            results.append([case.backward(model, state, seat.rank, step) for step in range(STEPS)])
    return results


def assert_trained(run: Run, world: int, cases: list[Case]) -> None:
    for rank, results in enumerate(run(world, train, cases)):
        for case, steps in zip(cases, results, strict=True):
            for step, seen in enumerate(steps):
                what = f"{case}, step {step}, rank {rank}"
                assert_gradients(seen, case.expected(step), what)
                assert seen.last is not None, what
                assert seen.last[:2] == case.last, what
                if step > 1:  # static_graph learns its graph in the first step and rebuilds after the second
                    assert seen.last[2] == BLOCKS, f"{what}: the buckets were not rebuilt"


# Powers of two, whose local means are exact; for SUM the total has to be one as well.
SIZES: dict[int, list[tuple[int, ...]]] = {
    1: [(8,)],
    2: [(4, 4), (8, 2)],
    4: [(2, 2, 2, 2), (1, 2, 4, 1), (8, 1, 2, 2)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", SIZES)
def test_every_normalization_to_the_bit(run: Run, world: int, dtype: torch.dtype) -> None:
    cases = [
        Case(normalization, sizes, dtype)
        for sizes in SIZES[world]
        for normalization in every_normalization(sum(sizes))
        if normalization.kind is not Kind.SUM or sum(sizes) & (sum(sizes) - 1) == 0
    ]
    assert_trained(run, world, cases)


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_every_way_of_making_buckets_to_the_bit(run: Run, view: bool) -> None:
    """Rank 1 leaves two blocks out where DDP can find that; it counts for them all the same."""
    unused = {"find_unused_parameters": True}
    cases = [
        Case(rr.DIVIDE_BY_COUNT, (8, 2), options={"gradient_as_bucket_view": view}),
        Case(rr.WEIGHTED_MEAN, (8, 2), options={"gradient_as_bucket_view": view, "static_graph": True}),
        Case(rr.WEIGHTED_MEAN, (8, 2), options={"gradient_as_bucket_view": view, **unused}),
        Case(rr.WEIGHTED_MEAN, (8, 2), options={"gradient_as_bucket_view": view, **unused}, blocks=(5, 3)),
        Case(rr.DIVIDE_BY_COUNT, (8, 2), options={"gradient_as_bucket_view": view, **unused}, blocks=(3, 5)),
        Case(rr.MEAN, (4, 4), options={"gradient_as_bucket_view": view, **unused}, blocks=(5, 1)),
    ]
    assert_trained(run, 2, cases)


def random_steps(
    seat: Seat, normalizations: list[Normalization], sizes: list[int]
) -> list[tuple[float, float]]:
    """The largest error of each normalization, in units of its bound; and of the same gradient divided twice."""
    total, seen = sum(sizes), []
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(size, BLOCKS, WIDTH, generator=generator) for size in sizes]
    exact = torch.cat(batches).double().sum(0) / total
    # Of sum |x| / total: additions of examples and ranks, and what a mean, a weight, a loss's divisor and the last
    # division round; (1 + u)^k - 1 < 1.01 k u for these k. The same for any order of additions.
    roundings = total + len(sizes) + 6
    bound = 1.01 * roundings * 2**-24 * torch.cat(batches).double().abs().sum(0) / total
    with group(seat) as ring:
        for normalization in normalizations:
            case = Case(normalization, tuple(sizes))
            model = make_model()
            state = rr.attach(model, ring, normalization)
            if normalization.uses_count:
                state.add_count(sizes[seat.rank])
            (model(batches[seat.rank]).sum() / case.loss_divisor(seat.rank)).backward()
            got = torch.stack([w.grad for w in model.module.weights]).double()
            wrong = float(((got / 2 - exact).abs() / bound).max())
            seen.append((float(((got - exact).abs() / bound).max()), wrong))
    return seen


@pytest.mark.parametrize(
    ("world", "sizes"), [(1, [7]), (2, [5, 5]), (2, [3, 11]), (4, [3, 3, 3, 3]), (4, [1, 9, 4, 6])]
)
def test_random_data_within_what_float32_rounds(run: Run, world: int, sizes: list[int]) -> None:
    normalizations = [
        n for n in every_normalization(sum(sizes)) if n.kind is not Kind.MEAN or len({*sizes}) == 1
    ]
    for errors in run(world, random_steps, normalizations, sizes):
        for normalization, (error, divided_twice) in zip(normalizations, errors, strict=True):
            assert error <= 1, normalization
            assert divided_twice > 1000  # the bound is tight enough to tell


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_micro_batches_reduce_once(run: Run, view: bool) -> None:
    sizes = [(4, 2, 8), (1, 8, 2)]
    whole = summed(
        examples(rank, micro, size, torch.float64).sum(0)
        for rank, mine in enumerate(sizes)
        for micro, size in enumerate(mine)
    )
    for calls, last_before, steps in run(2, micro_batches, sizes, view):
        assert calls == [0, 0, BLOCKS], "calls of the ring after each micro-batch of the last step"
        assert last_before is None
        for step in steps:
            assert_gradients(step, quotient(whole, 25), "micro-batches")
            assert step.last is not None
            assert step.last[:2] == (25.0, 25.0)


def micro_batches(seat: Seat, sizes: list[tuple[int, ...]], view: bool) -> tuple[list[int], Any, list[Step]]:
    """Three steps, each of three micro-batches of which the last reduces."""
    with group(seat) as ring:
        model = make_model(gradient_as_bucket_view=view)
        state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
        last_before, steps = None, []
        for step in range(3):
            calls, before = [], ring.stats.calls
            model.zero_grad()
            for micro, size in enumerate(sizes[seat.rank]):
                with model.no_sync() if micro < 2 else contextlib.nullcontext():
                    state.add_count(size)
                    model(examples(seat.rank, micro, size)).sum().backward()
                calls.append(ring.stats.calls - before)
                if step == 0 and micro < 2:
                    last_before = last_before or state.last
            steps.append(taken(model, state))
        return calls, last_before, steps


def no_sync_around_backward(seat: Seat) -> tuple[Step, Step]:
    """The mistake: forward has decided already, so each micro-batch reduces what is in p.grad."""
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
        seen = []
        for micro in range(2):
            state.add_count(4)
            loss = model(examples(seat.rank, micro, 4)).sum()
            with model.no_sync():
                loss.backward()
            seen.append(taken(model, state))
        return seen[0], seen[1]


def test_no_sync_that_wraps_only_backward_reduces_all_the_same(run: Run) -> None:
    sums = [summed(examples(rank, micro, 4, torch.float64).sum(0) for rank in range(2)) for micro in range(2)]
    for first, second in run(2, no_sync_around_backward):
        assert_gradients(first, quotient(sums[0], 8), "the first micro-batch is reduced")
        assert first.last is not None
        assert second.last is not None
        assert first.last[:2] == second.last[:2] == (8.0, 8.0), "each with its own count, and not 16"
        # Both ranks bring the reduced gradient along, and it is divided again.
        assert_gradients(second, quotient(2 * sums[0] / 8 + sums[1], 8), "the second micro-batch")
