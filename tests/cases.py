"""Calls of all_reduce on seeded data: run by the ranks, compared bit for bit with the reference by the test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import reference
import ring_reduce as rr
from conftest import Run
from launch import Seat
from reference import TYPES, ElementType
from ring_reduce.normalization import Normalization

Values = Literal["exact", "random"]

# Small enough that a few thousand elements fill every slot many times over.
SMALL: dict[str, Any] = {"segment_bytes": 128, "depth": 3, "window": 2}
# The same for the direct all-reduce.
SMALL_DIRECT: dict[str, Any] = {"algorithm": "direct", "part_bytes": 128, "one_shot_bytes": 0}

_GUARD = 16  # elements on both sides of an output that must stay as they are


@dataclass(frozen=True)
class Case:
    """One call. ``counts`` holds one of each rank; ``offset`` shifts the tensors from their alignment."""

    type: str
    size: int
    normalization: Normalization = rr.SUM
    seed: int = 0
    values: Values = "random"
    counts: tuple[float, ...] | None = None
    out_of_place: bool = False
    offset: int = 0

    @property
    def element(self) -> ElementType:
        return TYPES[self.type]

    def input(self, rank: int) -> np.ndarray:
        """Rank's tensor, in the type that is computed in."""
        numbers = np.random.default_rng([self.seed, self.size, rank])
        if self.values == "exact" or self.element.is_integer:
            wide = 8 if self.values == "exact" else 2**30
            return numbers.integers(-wide, wide + 1, self.size).astype(self.element.compute)
        spread = 2.0 ** numbers.integers(-8, 9, self.size)
        return self.element.store((numbers.standard_normal(self.size) * spread).astype(self.element.compute))

    def inputs(self, world: int) -> list[np.ndarray]:
        return [self.input(rank) for rank in range(world)]

    def expected(self, world: int, algorithm: str = "ring") -> np.ndarray:
        inputs = self.inputs(world)
        return reference.all_reduce(inputs, self.element, self.normalization, self.counts, algorithm)


def sizes(world: int, element: ElementType, *, segment_bytes: int, depth: int, window: int) -> list[int]:
    """Element counts around every boundary, and one with many more segments than slots."""
    pack, segment = 16 // element.bytes, segment_bytes // element.bytes
    edges = [0, 1, world, pack, world * pack, world * segment, world * segment * window]
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    return sorted({*(size for size in near if size >= 0), world * segment * (5 * depth + 1) + 3})


def to_tensor(values: np.ndarray, element: ElementType) -> Any:
    """A torch tensor of the element type; exact, since `values` hold nothing else."""
    import torch

    return torch.from_numpy(values).to(getattr(torch, element.name))


def from_tensor(tensor: Any, element: ElementType) -> np.ndarray:
    """The tensor in the type that is computed in."""
    import torch

    values: np.ndarray = tensor.to(getattr(torch, np.dtype(element.compute).name)).numpy()
    return values


def poisoned(size: int, element: ElementType, offset: int = 0) -> tuple[Any, Any]:
    """A tensor of garbage, and the larger one around it, ``offset`` elements out of alignment."""
    garbage = np.full(size + 2 * _GUARD + offset, 77 if element.is_integer else np.nan, element.compute)
    whole = to_tensor(garbage, element)
    return whole[_GUARD + offset : _GUARD + offset + size], whole


def same_memory(left: Any, right: Any) -> bool:
    """Whether two contiguous tensors hold the same bytes."""
    import torch

    if left.numel() == 0:  # of which torch makes no view
        return bool(right.numel() == 0)
    return bool(torch.equal(left.view(torch.uint8), right.view(torch.uint8)))


def reduce(ring: rr.Ring, case: Case) -> np.ndarray:
    """The result of one case on this rank; checks what must not have been written."""
    x, around_x = poisoned(case.size, case.element, case.offset)
    x.copy_(to_tensor(case.input(ring.rank), case.element))
    out, around_out = poisoned(case.size, case.element, case.offset) if case.out_of_place else (None, None)
    count = case.counts[ring.rank] if case.counts is not None else None
    before = around_x.clone()

    result: Any = ring.all_reduce(x, case.normalization, out=out, count=count)

    around = around_out if case.out_of_place else around_x
    returned_target = result is (out if case.out_of_place else x)
    assert returned_target
    values: np.ndarray = from_tensor(result, case.element).copy()
    result.copy_(poisoned(case.size, case.element)[0])
    everything = poisoned(case.size, case.element, case.offset)[1]
    assert same_memory(around, everything), f"{case}: written outside"
    if case.out_of_place:
        assert same_memory(around_x, before), f"{case}: the input changed"
    return values


def reduce_all(
    seat: Seat, cases: Sequence[Case], lanes: int | None, tuning: dict[str, Any]
) -> list[np.ndarray]:
    """The results of all cases, over one ring."""
    ring = seat.kept_ring(lanes=lanes, **{"algorithm": "ring", **tuning})
    return [reduce(ring, case) for case in cases]


def results_of(
    run: Run, world: int, cases: Iterable[Case], lanes: int | None = None, **tuning: Any
) -> list[tuple[Case, list[np.ndarray]]]:
    """Each case with the results of all ranks."""
    cases = list(cases)
    by_rank = run(world, reduce_all, cases, lanes, tuning)
    return [(case, [results[i] for results in by_rank]) for i, case in enumerate(cases)]


def assert_same(got: np.ndarray, expected: np.ndarray, what: object) -> None:
    assert got.shape == expected.shape, what
    if not reference.same_bits(got, expected):
        raise AssertionError(f"{what}: {reference.first_difference(got, expected)}")


def assert_reduced(
    run: Run, world: int, cases: Iterable[Case], lanes: int | None = None, **tuning: Any
) -> None:
    """Every element of every case on every rank is what the reference says, to the bit; by the ring, if not told."""
    for case, results in results_of(run, world, cases, lanes, **tuning):
        expected = case.expected(world, tuning.get("algorithm", "ring"))
        for rank, got in enumerate(results):
            assert_same(got, expected, f"{case}, rank {rank} of {world}")


def bytes_moved(
    seat: Seat, sizes: Sequence[int], lanes: int | None, tuning: dict[str, Any]
) -> list[tuple[int, int, int, int]]:
    """What a rank's statistics count of an all_reduce of each size, float32: sent, received, headers sent, calls."""
    ring = seat.kept_ring(lanes=lanes, **tuning)
    moved = []
    for size in sizes:
        before = ring.stats
        ring.all_reduce(np.ones(size, np.float32))
        after = ring.stats
        moved.append(
            (
                after.bytes_sent - before.bytes_sent,
                after.bytes_received - before.bytes_received,
                after.header_bytes_sent - before.header_bytes_sent,
                after.calls - before.calls,
            )
        )
    return moved
