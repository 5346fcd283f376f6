"""What divides the sum: every normalization to the bit, its range, counts of 0, and torch's own division."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import reference
import ring_reduce as rr
from cases import SMALL, Case, assert_reduced, assert_same, from_tensor, results_of, sizes, to_tensor
from conftest import Run
from launch import Seat, caught
from reference import FLOATS, TYPES
from ring_reduce.normalization import Normalization

DIVIDING = [rr.MEAN, rr.divide_by(7), rr.divide_by(1e-3), rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN]
WEIGHTED = [rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN]
WORLDS = range(1, 9)


def counts_of(world: int, seed: int) -> tuple[float, ...]:
    """Whole numbers, some 0, and now and then fractions."""
    numbers = np.random.default_rng([seed, world])
    counts = numbers.integers(0, 9, world) * numbers.integers(0, 2, world)
    return tuple(float(c) * (0.3 if seed % 3 == 2 else 1.0) for c in counts)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_normalization_to_the_bit(run: Run, world: int, name: str) -> None:
    combinations = [
        (size, normalization)
        for size in sizes(world, TYPES[name], **SMALL)
        for normalization in DIVIDING
        for _ in range(2)
    ]
    cases = [
        Case(
            name,
            size,
            normalization,
            seed=seed,
            values="exact" if seed % 4 == 0 else "random",
            counts=counts_of(world, seed) if normalization.uses_count else None,
            out_of_place=seed % 2 == 1,
        )
        for seed, (size, normalization) in enumerate(combinations)
    ]
    assert_reduced(run, world, cases, **SMALL)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_random_results_are_near_the_true_ones(run: Run, world: int, name: str) -> None:
    cases = [
        Case(name, 2000, normalization, seed=seed, counts=counts if normalization.uses_count else None)
        for normalization in DIVIDING
        for seed, counts in enumerate([tuple(range(1, world + 1)), (0.0,) * (world - 1) + (3.0,)])
    ]
    for case, results in results_of(run, world, cases, **SMALL):
        inputs = case.inputs(world)
        bound = reference.error_bound(inputs, case.element, case.normalization, case.counts)
        true = reference.true_result(inputs, case.normalization, case.counts)
        representable = np.abs(true) <= case.element.largest
        assert representable.mean() > 0.25, case
        assert (np.abs(results[0] - true) <= bound)[representable].all(), case


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("divisor", ["world", 3.0, 256.0])
def test_a_division_is_torch_s(run: Run, name: str, divisor: float | str) -> None:
    """For exact sums: bit for bit what torch's sum followed by div_ gives, which a reciprocal would not."""
    import torch

    world = 3
    normalization = rr.MEAN if divisor == "world" else rr.divide_by(float(divisor))
    for case, results in results_of(run, world, [Case(name, 5000, normalization, values="exact")]):
        tensors = [to_tensor(x, case.element) for x in case.inputs(world)]
        expected = (
            torch.stack(tensors).sum(0).div_(world if normalization == rr.MEAN else normalization.total)
        )
        for got in results:
            assert_same(got, from_tensor(expected, case.element), case)


@pytest.mark.parametrize("normalization", WEIGHTED, ids=repr)
@pytest.mark.parametrize("lanes", [2, 3])
def test_counts_ride_in_every_lane(run: Run, normalization: Normalization, lanes: int) -> None:
    size = 2 * lanes * (1 << 16) + 3  # a chunk of as many times 256 KB
    cases = [Case("float32", size, normalization, seed=lanes, counts=(2.0, 5.0))]
    assert_reduced(run, 2, cases, lanes=lanes)


def reduced(
    seat: Seat, name: str, inputs: list[list[float]], normalization: Normalization, counts: list[Any] | None
) -> np.ndarray:
    """The result of this rank's row of ``inputs``."""
    element = TYPES[name]
    x = to_tensor(element.store(np.array(inputs[seat.rank], element.compute)), element)
    count = counts[seat.rank] if counts is not None else None
    result = seat.kept_ring(**SMALL).all_reduce(x, normalization, count=count)
    return from_tensor(result, element)


def reduce_rows(
    run: Run,
    name: str,
    rows: list[list[float]],
    normalization: Normalization,
    counts: list[Any] | None = None,
) -> list[float]:
    """The result of a rank for each row of input, the same on all."""
    results = run(len(rows), reduced, name, rows, normalization, counts)
    for other in results[1:]:
        assert_same(other, results[0], "another rank's result")
    values: list[float] = results[0].tolist()
    return values


@pytest.mark.parametrize("value", [60000.0, -65504.0, 65504.0])
@pytest.mark.parametrize("world", [2, 4, 7])
def test_partial_sums_of_float16_stay_in_range(run: Run, world: int, value: float) -> None:
    rows = [[value] * 40] * world
    assert reduce_rows(run, "float16", rows, rr.MEAN) == [value] * 40
    assert reduce_rows(run, "float16", rows, rr.divide_by(world)) == [value] * 40
    assert reduce_rows(run, "float16", rows, rr.DIVIDE_BY_COUNT, [1] * world) == [value] * 40
    assert reduce_rows(run, "float16", rows, rr.SUM) == [math.copysign(math.inf, value)] * 40


def test_weights_do_not_overflow_float16(run: Run) -> None:
    assert reduce_rows(run, "float16", [[300.0]] * 4, rr.WEIGHTED_MEAN, [256] * 4) == [300.0]
    assert reduce_rows(run, "float16", [[60000.0], [60000.0]], rr.WEIGHTED_MEAN, [2**40, 1]) == [60000.0]


def test_weights_do_not_overflow_float32(run: Run) -> None:
    largest = float(np.finfo(np.float32).max)
    for name in ("float32", "bfloat16"):
        value = float(TYPES[name].store(np.array([largest / 2], np.float32))[0])
        assert reduce_rows(run, name, [[value]] * 3, rr.WEIGHTED_MEAN, [2**30, 2**30, 2**31]) == [value]


def test_a_large_total_makes_nothing_vanish_on_the_way(run: Run) -> None:
    """The wire is scaled by the ranks, never by the total: 4 * 0.5 / 2**15 is a float16, and so is 4 * 3e-6 / 2."""
    assert reduce_rows(run, "float16", [[0.5]] * 4, rr.divide_by(2**15)) == [2.0**-14]
    small = float(np.float16(3e-6))  # 50 * 2**-24, of which the scaled wire may lose one
    assert reduce_rows(run, "float16", [[small]] * 4, rr.divide_by(2)) == pytest.approx([2 * small], rel=0.02)
    assert reduce_rows(run, "float16", [[small]] * 4, rr.WEIGHTED_MEAN, [256] * 4) == [small]
    assert reduce_rows(run, "float16", [[small]] * 2, rr.WEIGHTED_MEAN, [256, 256]) == [small]
    assert reduce_rows(run, "float16", [[256 * small]] * 4, rr.divide_by(4 * 256)) == [small]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("normalization", WEIGHTED, ids=repr)
def test_a_count_of_zero_leaves_out_even_nan(run: Run, name: str, normalization: Normalization) -> None:
    bad = [math.nan, math.inf, -math.inf, 3.0] * 9
    good = [1.0, 2.0, 4.0, -2.0] * 9
    scale = 1 if normalization is rr.WEIGHTED_MEAN else 2
    for position in range(3):
        rows, counts = [good, good, good], [2, 2, 2]
        rows[position], counts[position] = bad, 0
        divisor = 2 if normalization is rr.WEIGHTED_MEAN else 4
        factor = scale * (2 if normalization is rr.WEIGHTED_MEAN else 1) / divisor
        assert reduce_rows(run, name, rows, normalization, counts) == [factor * x for x in good]
    # Two of three left out, in every order that they can stand in the ring.
    for position in range(3):
        rows, counts = [bad, bad, bad], [0, 0, 0]
        rows[position], counts[position] = good, 4
        factor = 1.0 if normalization is rr.WEIGHTED_MEAN else 0.25
        assert reduce_rows(run, name, rows, normalization, counts) == [factor * x for x in good]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_total_of_zero_gives_zeros_even_over_nan(run: Run, world: int, name: str) -> None:
    rows = [[math.nan, math.inf, -1.0, 5.0] * 30] * world
    for normalization in WEIGHTED:
        got = reduce_rows(run, name, rows, normalization, [0] * world)
        assert got == [0.0] * 120
        assert not np.signbit(got).any()


@pytest.mark.parametrize("normalization", [rr.MEAN, rr.divide_by(2), *WEIGHTED], ids=repr)
def test_nan_of_a_rank_that_counts_passes(run: Run, normalization: Normalization) -> None:
    counts = [1, 3] if normalization.uses_count else None
    for name in FLOATS:
        got = reduce_rows(run, name, [[math.nan, 1.0, math.inf], [1.0, 1.0, 1.0]], normalization, counts)
        assert math.isnan(got[0])
        assert not math.isnan(got[1])
        assert got[2] == math.inf


@pytest.mark.parametrize("counts", [[2**24, 1], [2**24 + 1, 2**24 + 1], [2**52, 2**52 - 1], [2**53, 0]])
def test_large_counts_add_exactly(run: Run, counts: list[int]) -> None:
    """In float64: a float32 would lose the 1 of 2**24 + 1."""
    total = sum(counts)
    assert reduce_rows(run, "float64", [[float(total)], [0.0]], rr.DIVIDE_BY_COUNT, counts) == [1.0]
    for _, last_count in run(2, totals, counts):
        assert last_count == total


def totals(seat: Seat, counts: list[int]) -> tuple[float, float]:
    ring = seat.kept_ring()
    work = ring.all_reduce(np.ones(5), rr.DIVIDE_BY_COUNT, count=counts[seat.rank], async_op=True)
    work.wait()
    return work.total_count, ring.stats.last_count


def test_the_total_is_known_to_every_rank(run: Run) -> None:
    assert run(3, totals, [3, 0, 4]) == [(7.0, 7.0)] * 3


def numbers_as_counts(seat: Seat) -> list[float]:
    import torch

    ring = seat.kept_ring()
    counts = [2, 2.0, np.int64(2), np.float32(2), torch.tensor(2), torch.tensor(2.0), np.array(2)]
    return [float(ring.all_reduce(np.full(3, 3.0), rr.WEIGHTED_MEAN, count=c)[0]) for c in counts]


def test_a_count_may_be_any_number(run: Run) -> None:
    assert run(2, numbers_as_counts) == [[3.0] * 7] * 2


@pytest.mark.parametrize("total", [0, -1, 0.0, -0.0, math.nan, math.inf, -math.inf])
def test_divide_by_takes_a_positive_finite_number(total: float) -> None:
    error = caught(lambda: rr.divide_by(total))
    assert isinstance(error, ValueError)
    assert str(float(total)) in str(error)


@pytest.mark.parametrize("total", ["3", None, True, [3]])
def test_divide_by_takes_nothing_else(total: Any) -> None:
    with pytest.raises(TypeError, match=type(total).__name__):
        rr.divide_by(total)


def test_normalizations_are_values() -> None:
    assert rr.divide_by(8) == rr.divide_by(8.0) != rr.divide_by(9)
    assert [repr(n) for n in (rr.SUM, rr.WEIGHTED_MEAN, rr.divide_by(8))] == [
        "SUM",
        "WEIGHTED_MEAN",
        "divide_by(8)",
    ]
    assert [n.uses_count for n in (rr.SUM, rr.MEAN, rr.divide_by(2), *WEIGHTED)] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("total", [1e-46, 1e-39, 3.5e38, 1e300])
def test_a_total_that_float32_does_not_hold(name: str, total: float) -> None:
    x = torch.ones(3, dtype=getattr(torch, name))
    with rr.Ring(rank=0, world=1) as ring:
        with pytest.raises(ValueError, match=f"on {name}: it is divided in float32"):
            ring.all_reduce(x, rr.divide_by(total))
        assert x.tolist() == [1, 1, 1]
        wide = ring.all_reduce(np.full(3, total), rr.divide_by(total))
        assert wide.tolist() == [1, 1, 1]


def test_the_least_and_the_largest_total_of_float32() -> None:
    least, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    with rr.Ring(rank=0, world=1) as ring:
        for total in (least, largest):
            x = np.array([total, 0], np.float32)
            assert ring.all_reduce(x, rr.divide_by(total)).tolist() == [1, 0]
        assert ring.all_reduce(np.array([least]), rr.DIVIDE_BY_COUNT, count=least).tolist() == [1]
        with pytest.raises(rr.CountError, match=r"count is 1e-300; one that is not 0 is at least 2\*\*-126"):
            ring.all_reduce(np.ones(3), rr.WEIGHTED_MEAN, count=1e-300)


def test_truth_and_complex_values_are_no_counts() -> None:
    with rr.Ring(rank=0, world=1) as ring:
        for count in (
            True,
            np.True_,
            np.array(True),
            torch.tensor(True),
            3 + 0j,
            np.complex64(3),
            torch.tensor(3 + 0j),
        ):
            with pytest.raises(rr.CountError, match="it has to be a finite number, 0 or more"):
                ring.all_reduce(np.ones(3), rr.WEIGHTED_MEAN, count=count)


def fractional_total(seat: Seat) -> list[float]:
    """Counts whose float64 sum depends on the order."""
    ring = seat.kept_ring(segment_bytes=1024)
    totals = []
    for elements in (0, 1, 7, 100_000):
        ring.all_reduce(np.ones(elements), rr.DIVIDE_BY_COUNT, count=[0.1, 0.2, 0.3, 0.7, 1e-17][seat.rank])
        totals.append(ring.stats.last_count)
    return totals


def test_the_total_of_fractional_counts_is_the_same_on_every_rank(run: Run) -> None:
    totals = run(5, fractional_total)
    assert totals == [totals[0]] * 5
    assert totals[0] == pytest.approx([1.3] * 4, rel=1e-15)
