"""However DDP makes its buckets, gradients are exact: small or large, rebuilt, views, unused and frozen blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_cases import (
    BLOCKS,
    ONE_BLOCK_MB,
    Blocks,
    Case,
    Step,
    assert_gradients,
    assert_trained,
    train,
)
from ddp_helpers import group, wrap
from launch import Seat

UNUSED = {"find_unused_parameters": True}


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_every_way_of_making_buckets(run: Run, view: bool) -> None:
    """A rank may leave blocks out where DDP can find that; it counts for them all the same."""
    ways: dict[str, Any] = {"gradient_as_bucket_view": view}
    cases = [
        Case(rr.DIVIDE_BY_COUNT, (8, 2), options=ways),
        Case(rr.DIVIDE_BY_COUNT, (8, 2), options={**ways, "bucket_cap_mb": 25}, buckets=1),
        Case(rr.WEIGHTED_MEAN, (8, 2), options={**ways, "static_graph": True}),
        Case(rr.WEIGHTED_MEAN, (8, 2), options={**ways, **UNUSED}),
        Case(rr.WEIGHTED_MEAN, (8, 2), options={**ways, **UNUSED}, blocks=(5, 3)),
        Case(rr.DIVIDE_BY_COUNT, (8, 2), options={**ways, **UNUSED}, blocks=(3, 5)),
        Case(rr.DIVIDE_BY_COUNT, (8, 2), options={**ways, **UNUSED}, blocks=(3, 3)),
        Case(rr.MEAN, (4, 4), options={**ways, **UNUSED}, blocks=(5, 1)),
        Case(rr.MEAN, (4, 4), options=ways, frozen=(1, 3), buckets=BLOCKS - 2),
    ]
    assert_trained(run, 2, cases)


def test_buckets_are_rebuilt_while_these_tests_train(run: Run) -> None:
    options: list[dict[str, Any]] = [{}, {"static_graph": True}, UNUSED]
    cases = [Case(rr.MEAN, (4, 4), options=each) for each in options]
    for results in run(2, train, cases):
        buckets = [[step.last[2] for step in steps] for steps in results]
        assert buckets == [[1, 5, 5, 5], [1, 1, 5, 5], [5, 5, 5, 5]]


def alternate(seat: Seat, cases: list[Case]) -> list[Step]:
    """One model, whose steps use what the cases use in turn."""
    with group(seat) as ring:
        model = cases[0].model()
        state = rr.attach(model, ring, cases[0].normalization)
        return [case.backward(model, state, seat.rank, step) for step, case in enumerate(cases)]


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_what_is_unused_may_change_in_every_step(run: Run, view: bool) -> None:
    uses = [(5, 3), (3, 3), (2, 5), (1, 1), (5, 5)]
    options = {"gradient_as_bucket_view": view, **UNUSED}
    cases = [Case(rr.WEIGHTED_MEAN, (4, 8), options=options, blocks=blocks) for blocks in uses]
    for rank, steps in enumerate(run(2, alternate, cases)):
        for step, (case, seen) in enumerate(zip(cases, steps, strict=True)):
            assert_gradients(seen, case.expected(step), f"rank {rank}, step {step} of {uses}")


class CountingBlocks(Blocks):
    """Holds the number of examples that it has seen."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, blocks: int = BLOCKS) -> torch.Tensor:
        self.seen += len(x)
        return super().forward(x, blocks)


def with_buffers(seat: Seat, case: Case) -> list[tuple[float, Step]]:
    """What the buffer holds after each step."""
    with group(seat) as ring:
        model = wrap(CountingBlocks(), bucket_cap_mb=ONE_BLOCK_MB, **case.options)
        state = rr.attach(model, ring, case.normalization)
        steps = []
        for step in range(3):
            step_seen = case.backward(model, state, seat.rank, step)
            steps.append((float(model.module.seen), step_seen))
        return steps


@pytest.mark.parametrize(
    ("broadcast", "expected"),
    [(True, [[8, 16, 24], [2, 8 + 2, 16 + 2]]), (False, [[8, 16, 24], [2, 4, 6]])],
    ids=["broadcast", "own"],
)
def test_buffers_are_those_that_ddp_makes_them(run: Run, broadcast: bool, expected: list[list[int]]) -> None:
    """DDP's broadcast of rank 0's buffers goes over Gloo, before the forward."""
    case = Case(rr.WEIGHTED_MEAN, (8, 2), options={"broadcast_buffers": broadcast})
    results = run(2, with_buffers, case)
    assert [[held for held, _ in steps] for steps in results] == expected
    for steps in results:
        for step, (_, seen) in enumerate(steps):
            assert_gradients(seen, case.expected(step), f"step {step}")
