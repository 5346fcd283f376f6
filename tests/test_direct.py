"""The all-reduces that go not round the ring: direct, and in one shot. To the bit, and beside the ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reference
import ring_reduce as rr
from cases import SMALL_DIRECT, Case, Values, assert_reduced, assert_same, bytes_moved, results_of, sizes
from conftest import Run
from launch import Seat, caught
from reference import FLOATS, TYPES

VALUES: tuple[Values, ...] = ("exact", "random")
# As much as fits the outbox of any size tested here.
ONE_SHOT: dict[str, Any] = {"algorithm": "direct", "part_bytes": 1 << 17, "one_shot_bytes": 1 << 30}
COUNTS = ((3.0, 1.0, 4.0, 1.0, 5.0), (0.0, 2.0, 0.0, 0.5, 7.0), (0.0, 0.0, 0.0, 0.0, 0.0))
WEIGHTED = (rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN)


@pytest.mark.parametrize("tuning", [SMALL_DIRECT, ONE_SHOT], ids=["direct", "one_shot"])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_every_type_and_size(run: Run, world: int, name: str, tuning: dict[str, Any]) -> None:
    cases = [
        Case(name, size, values=values, seed=seed, out_of_place=seed % 2 == 1)
        for size in sizes(world, TYPES[name], segment_bytes=128, depth=1, window=1)
        for seed, values in enumerate(VALUES)
    ]
    assert_reduced(run, world, cases, **tuning)


@pytest.mark.parametrize("tuning", [SMALL_DIRECT, ONE_SHOT], ids=["direct", "one_shot"])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("world", [2, 5])
def test_every_normalization(run: Run, world: int, name: str, tuning: dict[str, Any]) -> None:
    plain = [Case(name, 301, n, seed=seed) for seed, n in enumerate((rr.SUM, rr.MEAN, rr.divide_by(0.3)))]
    counted = [
        Case(name, 301, normalization, seed=seed, counts=counts[:world])
        for normalization in WEIGHTED
        for seed, counts in enumerate(COUNTS)
    ]
    for case, results in results_of(run, world, plain + counted, **tuning):
        inputs = case.inputs(world)
        true = reference.true_result(inputs, case.normalization, case.counts)
        bound = reference.error_bound(inputs, case.element, case.normalization, case.counts)
        for got in results:
            assert_same(got, case.expected(world, "direct"), case)
            assert (np.abs(got - true) <= bound).all()


@pytest.mark.parametrize("name", ["float64", "float32", "int32"])
def test_the_bits_are_those_of_the_ring(run: Run, name: str) -> None:
    """Where a wire holds what is computed in, no algorithm rounds more than another."""
    cases = [
        Case(name, size, rr.MEAN if name != "int32" else rr.SUM, seed=size)
        for size in (0, 1, 40, 5000, 50_000)
    ]
    expected = [case.expected(4) for case in cases]
    for tuning in (SMALL_DIRECT, ONE_SHOT, {"algorithm": "auto"}, {"algorithm": "auto", "lanes": 3}):
        for want, (case, results) in zip(expected, results_of(run, 4, cases, **tuning), strict=True):
            for got in results:
                assert_same(got, want, f"{case}, {tuning}")


@pytest.mark.parametrize("lanes", [1, 3])
def test_large_tensors_on_several_lanes(run: Run, lanes: int) -> None:
    size = 3 * (3 << 18) // 2 + 5
    cases = [Case("bfloat16", size, seed=s, out_of_place=s == 1, offset=3 * s) for s in range(2)]
    assert_reduced(run, 3, cases, lanes=lanes, algorithm="direct", stream_bytes=1 << 16)


def any_order(seat: Seat, seed: int) -> list[np.ndarray]:
    """One shot, direct and round the ring by turns, in an order and of sizes that all ranks draw alike."""
    ring = seat.kept_ring(algorithm="direct", part_bytes=256, one_shot_bytes=600, segment_bytes=256)
    numbers = np.random.default_rng(seed)
    results = []
    for call in range(150):
        size = seat.world * int(numbers.integers(0, 700))
        x = np.random.default_rng([seed, call, seat.rank]).integers(-99, 99, size).astype(np.float32)
        which = numbers.integers(0, 4)
        if which == 0:
            results.append(ring.reduce_scatter(x))
        elif which == 1:
            results.append(ring.all_gather(x[: size // seat.world]))
        else:
            results.append(ring.all_reduce(x))
    return results


def expected_in_any_order(world: int, rank: int, seed: int) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    results = []
    for call in range(150):
        size = world * int(numbers.integers(0, 700))
        inputs = [
            np.random.default_rng([seed, call, peer]).integers(-99, 99, size).astype(np.float32)
            for peer in range(world)
        ]
        which = numbers.integers(0, 4)
        total = np.stack(inputs).sum(axis=0)
        part = size // world
        if which == 0:
            results.append(total[rank * part : (rank + 1) * part])
        elif which == 1:
            results.append(np.concatenate([x[:part] for x in inputs]))
        else:
            results.append(total)
    return results


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_algorithms_take_turns(run: Run, world: int, seed: int) -> None:
    for rank, got in enumerate(run(world, any_order, seed)):
        for call, (mine, right) in enumerate(zip(got, expected_in_any_order(world, rank, seed), strict=True)):
            assert_same(mine, right, f"call {call} of seed {seed} on rank {rank}")


@pytest.mark.parametrize("world", [2, 3, 8])
def test_stats_are_the_bytes_of_the_formula(run: Run, world: int) -> None:
    """Directly, every rank sends the parts of others, and its own chunk to each of them; in one shot, all to all."""
    elements = [0, 1, 17, 4096, 10_003]
    for rank, moved in enumerate(run(world, bytes_moved, elements, None, SMALL_DIRECT)):
        for size, (sent, received, headers, _) in zip(elements, moved, strict=True):
            chunk = reference.chunks(size, TYPES["float32"], world)[rank]
            own = 4 * (chunk.stop - chunk.start)
            assert sent == received == 4 * size - own + (world - 1) * own
            assert headers >= 64 * (world - 1)
            assert headers % (64 * (world - 1)) == 0
    for moved in run(world, bytes_moved, elements, None, ONE_SHOT):
        assert moved == [
            (4 * size * (world - 1), 4 * size * (world - 1), 64 * (world - 1), 1) for size in elements
        ]


def special_values(seat: Seat, tuning: dict[str, Any]) -> np.ndarray:
    result: np.ndarray = seat.kept_ring(**tuning).all_reduce(_special_input(seat.rank))
    return result


def _special_input(rank: int) -> np.ndarray:
    inf = np.inf
    columns = [
        [np.nan, 1, 1],
        [1, 1, np.nan],
        [inf, 1, 2],
        [inf, -inf, 0],
        [-0.0] * 3,
        [-0.0, 0.0, -0.0],
        [5e-324] * 3,
    ]
    return np.repeat(np.array([column[rank] for column in columns]), 5)


@pytest.mark.parametrize("tuning", [SMALL_DIRECT, ONE_SHOT], ids=["direct", "one_shot"])
def test_special_values_pass(run: Run, tuning: dict[str, Any]) -> None:
    expected = np.repeat([np.nan, np.nan, np.inf, np.nan, -0.0, 0.0, 15e-324], 5)
    for got in run(3, special_values, tuning):
        assert_same(got, expected, tuning)


def counted_out(seat: Seat, tuning: dict[str, Any]) -> list[Any]:
    """A rank whose count is 0 holds NaN."""
    ring = seat.kept_ring(**tuning)
    mine, count = np.full(40, np.nan if seat.rank == 1 else 6.0, np.float32), 0 if seat.rank == 1 else 2
    return [
        ring.all_reduce(mine.copy(), rr.WEIGHTED_MEAN, count=count),
        ring.all_reduce(mine.copy(), rr.DIVIDE_BY_COUNT, count=count),
        ring.all_reduce(np.full(40, np.nan), rr.WEIGHTED_MEAN, count=0),
        ring.stats.last_count,
    ]


@pytest.mark.parametrize("tuning", [SMALL_DIRECT, ONE_SHOT], ids=["direct", "one_shot"])
def test_a_count_of_0_leaves_a_rank_out(run: Run, tuning: dict[str, Any]) -> None:
    for weighted, divided, nothing, last_count in run(3, counted_out, tuning):
        assert weighted.tolist() == [6] * 40
        assert divided.tolist() == [3] * 40
        assert nothing.tolist() == [0] * 40
        assert last_count == 0


def of_another_size(seat: Seat, sizes_of: list[int]) -> tuple[str, bool]:
    ring = seat.ring(algorithm="direct", part_bytes=1024, one_shot_bytes=2048)
    ring.all_reduce(np.ones(5, np.float32))
    x = np.full(sizes_of[seat.rank], 7, np.float32)
    error = caught(lambda: ring.all_reduce(x))
    assert isinstance(error, rr.RingMismatch)
    return str(error), bool((x == 7).all())


@pytest.mark.parametrize("sizes_of", [[512, 513, 512], [5000, 5000, 1], [600, 700, 600]])
def test_other_sizes_that_take_another_algorithm_are_told(run: Run, sizes_of: list[int]) -> None:
    """One shot and direct, which hear of each other by the headers in their outboxes."""
    outcomes = run(3, of_another_size, sizes_of)
    text, _ = outcomes[0]
    assert all(outcome == (text, True) for outcome in outcomes)
    assert "element count is" in text
    assert {str(size) for size in sizes_of} <= set(text.replace(":", " ").split())


def round_the_ring_alone(seat: Seat, scatters: bool) -> tuple[str, bool]:
    """The last rank makes a call that goes round the ring, and the others one that does not."""
    ring = seat.ring(timeout=10, one_shot_bytes=2048)
    last = seat.rank == seat.world - 1
    x = np.full(6000 if last and not scatters else 510, 7, np.float32)
    error = caught(lambda: ring.reduce_scatter(x) if last and scatters else ring.all_reduce(x))
    return f"{type(error).__name__}: {error}", bool((x == 7).all())


@pytest.mark.parametrize(("world", "scatters"), [(2, False), (2, True), (3, True)])
def test_who_waits_where_the_others_do_not_write_is_told(run: Run, world: int, scatters: bool) -> None:
    """No header comes: what ends the wait is that all announce what they call."""
    outcomes = run(world, round_the_ring_alone, scatters)
    assert outcomes == [outcomes[0]] * world
    text, unchanged = outcomes[0]
    assert text.startswith("RingMismatch: ranks disagree in call 1: ")
    assert ("operation is" if scatters else "element count is") in text
    assert unchanged


def other_algorithm(seat: Seat) -> str:
    error = caught(lambda: seat.ring(algorithm=["direct", "ring"][seat.rank]))
    assert isinstance(error, rr.RingMismatch)
    return str(error)


def test_ranks_agree_on_the_algorithm(run: Run) -> None:
    for text in run(2, other_algorithm):
        assert "algorithm is 'direct' on rank 0 and 'ring' on rank 1" in text


def test_an_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="algorithm='tree'; there are auto, ring and direct"):
        rr.Ring(rank=0, world=1, algorithm="tree")
