"""Accumulation across ranks: the gradient of a group is that of one batch that holds the samples of all ranks."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ring_reduce as rr
from conftest import Run
from ddp_helpers import (
    FEATURES,
    batch_of,
    group,
    largest_difference,
    loss_of,
    make_net,
    whole_batch_gradients,
    wrap,
)
from launch import Seat, caught
from ring_reduce.normalization import Normalization

# Micro-batches of each rank: unequal ones, a short group, a rank without any, an empty one.
GROUPS: dict[str, list[list[int]]] = {
    "equal": [[5, 5, 5], [5, 5, 5]],
    "unequal": [[5, 3, 1], [2, 7, 4]],
    "short": [[5, 5], [5]],
    "one rank has none": [[], [3, 4]],
    "an empty one": [[0, 4], [2, 0]],
    "four ranks": [[5, 3, 1], [2], [], [1, 1, 6]],
}


def micro_batches(sizes: list[list[int]], rank: int) -> list[torch.Tensor]:
    return [batch_of(rank, step, size) for step, size in enumerate(sizes[rank])]


def loss_divisor(normalization: Normalization, sizes: list[list[int]], size: int) -> float:
    """What each micro-batch's summed loss is divided by before its backward."""
    return {
        "SUM": sum(map(sum, sizes)),
        "MEAN": size,
        "DIVIDE_BY_COUNT": 1,
        "WEIGHTED_MEAN": size,
    }.get(repr(normalization), 1)


def accumulate(accumulator: rr.Accumulator, model: Any, sizes: list[list[int]], rank: int) -> None:
    normalization = accumulator.normalization
    for x in micro_batches(sizes, rank):
        if len(x):
            loss_of(model(x), loss_divisor(normalization, sizes, len(x))).backward()
        accumulator.add(count=len(x) if normalization.uses_count else None)


def step(
    seat: Seat, normalization: Normalization, sizes: list[list[int]], ddp: bool
) -> tuple[float, Any, Any]:
    net = make_net()
    right = whole_batch_gradients(
        make_net(), [x for rank in range(seat.world) for x in micro_batches(sizes, rank)]
    )
    with group(seat) as ring:
        model = wrap(net) if ddp else net
        accumulator = rr.Accumulator(model, normalization, ring=ring)
        for _ in range(2):
            with accumulator:
                accumulate(accumulator, model, sizes, seat.rank)
        got = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        return largest_difference(got, right), [g.numpy().tobytes() for g in got], accumulator.last


# A mean of means is right for equal micro-batches only.
CASES = [
    *((kind, name) for kind in ("SUM", "divide_by", "DIVIDE_BY_COUNT", "WEIGHTED_MEAN") for name in GROUPS),
    *(("MEAN", name) for name in ("equal", "short")),
]


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_group_is_one_large_batch(run: Run, kind: str, name: str, ddp: bool) -> None:
    sizes = GROUPS[name]
    total = sum(map(sum, sizes))
    normalization = rr.divide_by(total) if kind == "divide_by" else getattr(rr, kind)
    results = run(len(sizes), step, normalization, sizes, ddp)
    divisor = {"SUM": 1, "MEAN": sum(map(len, sizes))}.get(kind, total)
    for difference, bits, last in results:
        assert difference < 1e-12
        assert bits == results[0][1]
        assert last == rr.Reduction(total if normalization.uses_count else 0, divisor, (1 / divisor,))


def unused(seat: Seat) -> list[Any]:
    """Layer 0 is used by rank 0 only, layer 1 by nobody, layer 2 by all."""
    model: Any = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    with seat.ring() as ring, rr.Accumulator(model, rr.DIVIDE_BY_COUNT, ring=ring) as accumulator:
        for layer in (0, 2) if seat.rank == 0 else (2,):
            model[layer](torch.ones(1, 2)).sum().backward()
        accumulator.add(count=2)
    return [None if layer.bias.grad is None else layer.bias.grad.tolist() for layer in model]


def test_a_parameter_that_one_rank_used_has_a_gradient_on_all(run: Run) -> None:
    assert run(2, unused) == [[[0.25, 0.25], None, [0.5, 0.5]]] * 2


def half_precision(seat: Seat, name: str) -> list[float]:
    """One long sum in which a 16-bit one would stand still, and whose end is within float16."""
    model = nn.Linear(1, 1, bias=False).to(getattr(torch, name))
    with seat.ring() as ring, rr.Accumulator(model, rr.DIVIDE_BY_COUNT, ring=ring) as accumulator:
        for value in [2048.0] + [1.0] * 300:
            model.weight.grad = torch.full_like(model.weight, value)
            accumulator.add(count=1)
    assert model.weight.grad is not None
    return [model.weight.grad.item()]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_gradients_are_added_in_float32_over_ranks_too(run: Run, name: str) -> None:
    right = torch.tensor(2348 / 301, dtype=getattr(torch, name)).item()
    assert run(3, half_precision, name) == [[right]] * 3


def one_forgets_its_count(seat: Seat, how: str) -> Exception | None:
    model = nn.Linear(2, 2)

    def body() -> None:
        with seat.ring() as ring, rr.Accumulator(model, rr.DIVIDE_BY_COUNT, ring=ring) as accumulator:
            model(torch.ones(1, 2)).sum().backward()
            if seat.rank == 1 and how == "raise":
                raise ValueError("batch 7 is empty")
            accumulator.add(count=[3, None if how == "forget" else float("nan")][seat.rank])

    return caught(body)


@pytest.mark.parametrize("how", ["forget", "nan", "raise"])
def test_a_mistake_of_one_rank_is_heard_by_all(run: Run, how: str) -> None:
    first, second = run(2, one_forgets_its_count, how)
    assert type(first) is rr.RingAborted
    assert type(second) is (ValueError if how == "raise" else rr.CountError)
    assert str(second) in str(first)
    assert "rank 1 aborted the ring" in str(first)


def accumulate_otherwise(seat: Seat, what: str) -> str:
    """Rank 1 has another normalization, another model, or one of as many elements."""
    odd = seat.rank == 1
    normalization = rr.WEIGHTED_MEAN if odd and what == "normalization" else rr.DIVIDE_BY_COUNT
    if what == "total":
        normalization = rr.divide_by(3 if odd else 4)
    others: dict[str, list[Any]] = {"size": [(3,)], "number": [(2,), (2,)], "shape": [(2, 2)]}
    shapes = others.get(what, [(4,)])
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in (shapes if odd else [(4,)])]

    def body() -> None:
        with seat.ring() as ring, rr.Accumulator(parameters, normalization, ring=ring):
            pass

    return str(caught(body))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("normalization", "DIVIDE_BY_COUNT on rank 0 and WEIGHTED_MEAN on rank 1"),
        ("total", "divide_by(4) on rank 0 and divide_by(3) on rank 1"),
        ("size", "1 parameters of 4 elements on rank 0 and 1 of 3 on rank 1"),
        ("number", "1 parameters of 4 elements on rank 0 and 2 of 4 on rank 1"),
        (
            "shape",
            "the parameters of rank 1 have other shapes or types, or another order, than those of rank 0",
        ),
        ("nothing", "None"),
    ],
)
def test_ranks_that_accumulate_differently(run: Run, what: str, text: str) -> None:
    first, second, third = run(3, accumulate_otherwise, what)
    assert first == second == third
    assert text in first


def loop_without_with(seat: Seat) -> tuple[float, str]:
    sizes = [[5, 3], [2, 7]]
    net = make_net()
    right = whole_batch_gradients(make_net(), [x for rank in range(2) for x in micro_batches(sizes, rank)])
    with group(seat) as ring:
        model = wrap(net)
        accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT, ring=ring)
        for _ in range(2):
            for x in micro_batches(sizes, seat.rank):
                with model.no_sync():
                    loss_of(model(x), 1).backward()
                accumulator.add(count=len(x))
            accumulator.reduce()
            difference = largest_difference([p.grad for p in net.parameters() if p.grad is not None], right)
            net.zero_grad()
        static = caught(lambda: rr.Accumulator(wrap(make_net(), static_graph=True), rr.SUM, ring=ring))
        return difference, str(static)


def test_a_loop_under_no_sync(run: Run) -> None:
    for difference, static in run(2, loop_without_with):
        assert difference < 1e-12
        assert "static_graph=True can't begin under no_sync(); accumulate model.module" in static


def parameters_of_a_ddp_model(seat: Seat, reduced: bool) -> list[str]:
    """DDP can't be seen behind its parameters."""
    with group(seat) as ring, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = wrap(make_net())
        with rr.Accumulator(model.parameters(), rr.DIVIDE_BY_COUNT, ring=ring) as accumulator:
            with contextlib.nullcontext() if reduced else model.no_sync():
                loss_of(model(batch_of(seat.rank, 0, 4)), 1).backward()
            accumulator.add(count=4)
        return [str(warning.message) for warning in seen if "same sum on all ranks" in str(warning.message)]


@pytest.mark.parametrize("reduced", [True, False])
def test_gradients_that_are_the_same_on_all_ranks(run: Run, reduced: bool) -> None:
    for texts in run(2, parameters_of_a_ddp_model, reduced):
        assert len(texts) == reduced
        assert all("DistributedDataParallel without no_sync(); pass the model" in text for text in texts)


def wrapped_ddp(seat: Seat) -> float:
    """A module that holds a DDP model, as frameworks make them."""
    sizes = [[5, 3], [2, 7]]
    net = make_net()
    right = whole_batch_gradients(make_net(), [x for rank in range(2) for x in micro_batches(sizes, rank)])
    with group(seat) as ring:
        ddp = wrap(net)
        model = nn.Sequential(ddp)
        with rr.Accumulator(ddp, rr.SUM, ring=ring) as accumulator:  # forwards that go past DDP
            loss_of(net(batch_of(0, 0, 2)), 1).backward()
            accumulator.add()
        with rr.Accumulator(model, rr.WEIGHTED_MEAN, ring=ring) as accumulator:
            accumulate(accumulator, model, sizes, seat.rank)
        return largest_difference([p.grad for p in net.parameters() if p.grad is not None], right)


def test_a_ddp_model_inside_another_module(run: Run) -> None:
    assert max(run(2, wrapped_ddp)) < 1e-12


def reduce_twice(seat: Seat) -> tuple[str, str]:
    with group(seat) as ring:
        model = wrap(make_net())
        alone = caught(lambda: rr.Accumulator(model, rr.SUM))
        accumulator = rr.Accumulator(model, rr.SUM, ring=ring)
        loss_of(model(torch.ones(3, FEATURES, dtype=torch.float64)), 1).backward()
        return str(alone), str(caught(accumulator.add))


def test_a_model_that_ddp_reduces_too(run: Run) -> None:
    for alone, twice in run(2, reduce_twice):
        assert "a DistributedDataParallel model reduces its gradients itself; pass ring=" in alone
        assert "DistributedDataParallel has reduced this micro-batch's gradient" in twice
        assert "model.no_sync()" in twice
