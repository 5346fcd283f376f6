"""The two halves of the ring as calls of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import reference
import ring_reduce as rr
from cases import SMALL, Case, assert_same, from_tensor, poisoned, same_memory, to_tensor
from conftest import Run
from launch import Seat, caught
from reference import FLOATS, TYPES
from ring_reduce.normalization import Normalization

WORLDS = range(1, 9)
NORMALIZATIONS = [rr.SUM, rr.MEAN, rr.divide_by(7), rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN]


def lengths(name: str) -> list[int]:
    """Elements a rank, around each boundary: odd ones, which no pack divides, and many segments."""
    pack, segment = 16 // TYPES[name].bytes, SMALL["segment_bytes"] // TYPES[name].bytes
    near = {edge + step for edge in (0, pack, segment, 2 * segment) for step in (-1, 0, 1)}
    return sorted({*(n for n in near if n >= 0), 17 * segment + 3})


def scattered(seat: Seat, cases: list[Case]) -> list[np.ndarray]:
    ring = seat.kept_ring(**SMALL)
    results = []
    for case in cases:
        x = to_tensor(case.input(seat.rank), case.element)
        before = x.clone()
        out = None
        if case.out_of_place:
            out, around = poisoned(case.size // seat.world, case.element, case.offset)
        count = case.counts[seat.rank] if case.counts is not None else None
        result = ring.reduce_scatter(x, case.normalization, out=out, count=count)
        assert out is None or result is out
        assert same_memory(x, before), f"{case}: the input changed"
        results.append(from_tensor(result, case.element).copy())
        if case.out_of_place:
            result.copy_(poisoned(len(result), case.element)[0])
            whole = poisoned(len(result), case.element, case.offset)[1]
            assert same_memory(around, whole), f"{case}: outside"
    return results


def gathered(seat: Seat, cases: list[Case]) -> list[np.ndarray]:
    ring = seat.kept_ring(**SMALL)
    results = []
    for case in cases:
        x = to_tensor(case.input(seat.rank), case.element)
        before = x.clone()
        out = None
        if case.out_of_place:
            out, around = poisoned(case.size * seat.world, case.element, case.offset)
        result = ring.all_gather(x, out=out)
        assert out is None or result is out
        assert same_memory(x, before), f"{case}: the input changed"
        results.append(from_tensor(result, case.element).copy())
        if case.out_of_place:
            result.copy_(poisoned(len(result), case.element)[0])
            whole = poisoned(len(result), case.element, case.offset)[1]
            assert same_memory(around, whole), f"{case}: outside"
    return results


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_to_the_bit(run: Run, world: int, name: str) -> None:
    kinds = NORMALIZATIONS if name in FLOATS else [rr.SUM]
    counts = tuple(float((3 * rank + 2) % 5) for rank in range(world))
    combinations = [(length * world, kind) for length in lengths(name) for kind in kinds]
    cases = [
        Case(
            name,
            size,
            kind,
            seed=i,
            counts=counts if kind.uses_count else None,
            out_of_place=i % 2 == 1,
            offset=i % 3,
        )
        for i, (size, kind) in enumerate(combinations)
    ]
    by_rank = run(world, scattered, cases)
    for i, case in enumerate(cases):
        expected = reference.reduce_scatter(case.inputs(world), case.element, case.normalization, case.counts)
        for rank in range(world):
            assert_same(by_rank[rank][i], expected[rank], f"{case}, rank {rank} of {world}")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_to_the_bit(run: Run, world: int, name: str) -> None:
    cases = [
        Case(name, length, seed=i, out_of_place=i % 2 == 1, offset=i % 3)
        for i, length in enumerate([*lengths(name), *lengths(name)[1:]])
    ]
    by_rank = run(world, gathered, cases)
    for i, case in enumerate(cases):
        expected = np.concatenate(case.inputs(world))
        for rank in range(world):
            assert_same(by_rank[rank][i], expected, f"{case}, rank {rank} of {world}")


def both_halves(seat: Seat, normalization: Normalization, size: int) -> tuple[np.ndarray, np.ndarray]:
    ring = seat.kept_ring(lanes=2)
    x = np.random.default_rng(seat.rank).standard_normal(size).astype(np.float32)
    count = seat.rank + 1 if normalization.uses_count else None
    whole = ring.all_reduce(x.copy(), normalization, count=count)
    halves = ring.all_gather(ring.reduce_scatter(x, normalization, count=count))
    return whole, halves


@pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=repr)
@pytest.mark.parametrize("size", [2 * 4 * 40, 1 << 19])
def test_the_halves_together_are_an_all_reduce(run: Run, size: int, normalization: Normalization) -> None:
    """Where chunks and equal parts are the same, so are the bits."""
    results = [array for pair in run(2, both_halves, normalization, size) for array in pair]
    for other in results[1:]:
        assert_same(other, results[0], normalization)


def in_place_parts(seat: Seat) -> tuple[Any, Any]:
    import torch

    ring = seat.kept_ring(**SMALL)
    x = torch.arange(12.0 * 50) * (seat.rank + 1)
    part = x.view(seat.world, -1)[seat.rank]
    reduced = ring.reduce_scatter(x, out=part).clone()
    expected = torch.arange(600.0) * (seat.rank + 1)
    expected.view(seat.world, -1)[seat.rank] = reduced
    assert torch.equal(x, expected)  # the other parts are as they were
    ring.all_gather(part, out=x)
    return reduced.numpy(), x.numpy()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_in_place_parts(run: Run, world: int) -> None:
    """out= may be this rank's own part of x, and x this rank's own part of out=, as in torch."""
    total = np.arange(600, dtype=np.float32) * (world * (world + 1) // 2)
    for rank, (reduced, gathered_again) in enumerate(run(world, in_place_parts)):
        assert_same(reduced, total.reshape(world, -1)[rank], rank)
        assert_same(gathered_again, total, rank)


def shapes(seat: Seat) -> list[tuple[int, ...]]:
    import torch

    ring = seat.kept_ring()
    results = [
        ring.reduce_scatter(torch.ones(4, 3, 5)),
        ring.all_gather(torch.ones(4, 3, 5)),
        ring.all_gather(torch.tensor(3.0)),
        ring.all_gather(np.ones((2, 0))),
        ring.reduce_scatter(np.ones((2, 2))),
        ring.reduce_scatter(torch.ones(3, 2), out=torch.empty(3)),
        ring.all_gather(torch.ones(2, 3), out=torch.empty(12)),
    ]
    return [tuple(result.shape) for result in results]


def test_shapes(run: Run) -> None:
    assert run(2, shapes) == [[(2, 3, 5), (8, 3, 5), (2,), (4, 0), (1, 2), (3,), (12,)]] * 2


def wrong_shapes(seat: Seat) -> list[str]:
    import torch

    ring = seat.kept_ring()
    calls = [
        lambda: ring.reduce_scatter(torch.ones(5)),
        lambda: ring.reduce_scatter(torch.tensor(1.0)),
        lambda: ring.reduce_scatter(torch.ones(4), out=torch.empty(3)),
        lambda: ring.all_gather(torch.ones(4), out=torch.empty(7)),
    ]
    texts = []
    for call in calls:
        error = caught(call)
        assert isinstance(error, ValueError), error
        texts.append(str(error))
    ring.all_reduce(np.ones(3))  # as if nothing had been
    return texts


def test_wrong_shapes_are_local_errors(run: Run) -> None:
    for texts in run(2, wrong_shapes):
        assert "2 ranks" in texts[0]
        assert "(5,)" in texts[0]
        assert "()" in texts[1]
        assert "3" in texts[2]
        assert "2 elements" in texts[2]
        assert "8 elements" in texts[3]
        assert "7" in texts[3]


def bytes_of_halves(seat: Seat, size: int) -> list[tuple[int, int]]:
    ring = seat.kept_ring(**SMALL)
    moved = []
    for call in (
        partial(ring.reduce_scatter, np.ones(size * seat.world)),
        partial(ring.all_gather, np.ones(size)),
    ):
        before = ring.stats
        call()
        moved.append(
            (ring.stats.bytes_sent - before.bytes_sent, ring.stats.bytes_received - before.bytes_received)
        )
    return moved


@pytest.mark.parametrize("world", [1, 2, 5])
def test_each_half_moves_n_less_1_parts(run: Run, world: int) -> None:
    length = 1001 * 8 * (world - 1)
    assert run(world, bytes_of_halves, 1001) == [[(length, length)] * 2] * world


def gather_after_mismatch(seat: Seat) -> tuple[Exception | None, bool]:
    with seat.ring(**SMALL) as ring:
        out = np.full(seat.world * 500 + seat.world * seat.rank, 7.0)
        before = out.tobytes()
        error = caught(lambda: ring.all_gather(np.ones(500 + seat.rank), out=out))
        return error, out.tobytes() == before


@pytest.mark.parametrize("world", [2, 4])
def test_no_output_is_written_before_all_agree(run: Run, world: int) -> None:
    """All_gather writes at its first receive, so the headers go round before."""
    results = run(world, gather_after_mismatch)
    for error, unchanged in results:
        assert isinstance(error, rr.RingMismatch)
        assert str(error) == str(results[0][0])
        assert unchanged
