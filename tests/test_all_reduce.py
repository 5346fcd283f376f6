"""The sum, to the bit: every world, dtype and size; whatever the lanes, segments and alignment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reference
import ring_reduce as rr
from cases import SMALL, Case, Values, assert_reduced, assert_same, bytes_moved, results_of, sizes
from conftest import Run
from launch import Seat
from reference import FLOATS, INTEGERS, TYPES

WORLDS = range(1, 9)
VALUES: tuple[Values, ...] = ("exact", "random", "random")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_every_world_type_and_size(run: Run, world: int, name: str) -> None:
    cases = [
        Case(name, size, values=values, seed=seed, out_of_place=seed % 2 == 1)
        for seed, (size, values) in enumerate(
            (size, values) for size in sizes(world, TYPES[name], **SMALL) for values in VALUES
        )
    ]
    assert_reduced(run, world, cases, **SMALL)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_sums_are_those_of_numpy(run: Run, world: int, name: str) -> None:
    """Not by way of the reference: the plain sum, which is exact here."""
    for case, results in results_of(run, world, [Case(name, 1000, values="exact", seed=s) for s in range(3)]):
        expected = np.sum(case.inputs(world), axis=0, dtype=case.element.compute)
        for got in results:
            assert_same(got, expected, case)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("world", [2, 5, 8])
def test_random_sums_are_near_the_true_ones(run: Run, world: int, name: str) -> None:
    for case, results in results_of(run, world, [Case(name, 3000, seed=s) for s in range(3)], **SMALL):
        inputs = case.inputs(world)
        error = np.abs(results[0] - reference.true_result(inputs))
        assert (error <= reference.error_bound(inputs, case.element)).all()


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_bits_do_not_depend_on_lanes_segments_or_alignment(run: Run, name: str) -> None:
    world, big = 2, 3 * (1 << 20) // TYPES[name].bytes + 11  # three lanes' worth and a rest
    cases = [Case(name, big, seed=1), Case(name, big, seed=1, out_of_place=True, offset=3)]
    expected = cases[0].expected(world)
    for lanes, tuning in [
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"segment_bytes": 4096, "depth": 2, "window": 1}),
        (2, {"segment_bytes": 65536, "depth": 9, "window": 5}),
        (1, {"stream_bytes": 0}),
        (2, {"segment_bytes": 128 * 511, "stream_bytes": 0}),
    ]:
        for case, results in results_of(run, world, cases, lanes, **tuning):
            for got in results:
                assert_same(got, expected, f"{case}, {lanes} lanes, {tuning}")


@pytest.mark.parametrize("world", [3, 4])
def test_several_lanes_with_more_ranks(run: Run, world: int) -> None:
    size = world * (3 << 18) // 4 + 5
    cases = [Case("float32", size, seed=s, out_of_place=s == 1) for s in range(2)]
    assert_reduced(run, world, cases, lanes=3, segment_bytes=1 << 15)


@pytest.mark.parametrize("offset", range(9))
def test_any_alignment(run: Run, offset: int) -> None:
    cases = [
        Case(name, size, seed=offset, out_of_place=out_of_place, offset=offset)
        for name in ("bfloat16", "float32")
        for size in (1, 37, 1000)
        for out_of_place in (False, True)
    ]
    assert_reduced(run, 3, cases, **SMALL, stream_bytes=0)


@pytest.mark.parametrize(
    "tuning", [{"spins": 0, "yields": 0}, {"spins": 10**5}, {"spins": 0, "yields": 10**6}]
)
def test_every_way_of_waiting(run: Run, tuning: dict[str, Any]) -> None:
    """Sleeping in the futex, spinning, yielding: 300 calls, so that a lost wake-up would show as a time-out."""
    assert_reduced(run, 3, [Case("float32", 40, seed=s) for s in range(300)], **SMALL, **tuning)


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_any_depth_and_window(run: Run, depth: int) -> None:
    for window in {1, depth - 1}:
        cases = [Case("float32", size, seed=depth) for size in (1, 300, 5000)]
        assert_reduced(run, 4, cases, segment_bytes=128, depth=depth, window=window)


def special_values(seat: Seat, name: str) -> np.ndarray:
    from cases import from_tensor, to_tensor

    element = TYPES[name]
    x = to_tensor(_special_input(name, seat.rank), element)
    return from_tensor(seat.kept_ring(**SMALL).all_reduce(x), element)


def _special_input(name: str, rank: int) -> np.ndarray:
    element = TYPES[name]
    inf, tiny = np.inf, element.tiny
    columns = [
        [np.nan, 1.0, 1.0],
        [1.0, 1.0, np.nan],
        [inf, 1.0, 2.0],
        [1.0, -inf, 2.0],
        [inf, -inf, 0.0],
        [-0.0, -0.0, -0.0],
        [-0.0, 0.0, -0.0],
        [tiny, tiny, -tiny],
        [3 * tiny, 0.0, -tiny],
        [-tiny, tiny, 0.0],
    ]
    return np.repeat(np.array([column[rank] for column in columns], element.compute), 7)


@pytest.mark.parametrize("name", FLOATS)
def test_special_values_pass(run: Run, name: str) -> None:
    inputs = [_special_input(name, rank) for rank in range(3)]
    expected = reference.all_reduce(inputs, TYPES[name])
    assert np.isnan(expected[:14]).all()
    assert np.isposinf(expected[14:21]).all()
    assert np.isneginf(expected[21:28]).all()
    assert np.isnan(expected[28:35]).all()
    assert (expected[35:49] == 0).all()
    assert np.signbit(expected[35:42]).all()
    assert (expected[49:56] == TYPES[name].tiny).all()  # denormals are numbers like any other
    assert (expected[56:63] == 2 * TYPES[name].tiny).all()
    for rank, got in enumerate(run(3, special_values, name)):
        assert_same(got, expected, f"{name}, rank {rank}")


def overflowing(seat: Seat, name: str) -> np.ndarray:
    x = np.array([np.iinfo(name).max, np.iinfo(name).min, -1, 5] * 9, name)
    result: np.ndarray = seat.kept_ring().all_reduce(x)
    return result


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap(run: Run, name: str) -> None:
    for got in run(2, overflowing, name):
        assert got.dtype == name
        assert got.tolist() == [-2, 0, -2, 10] * 9


@pytest.mark.parametrize(("world", "lanes"), [(1, 1), (2, 1), (2, 3), (3, 1), (8, 1)])
def test_stats_are_the_bytes_of_the_formula(run: Run, world: int, lanes: int) -> None:
    """2s less the chunk that is finished here and the one that ends here."""
    sizes = [0, 1, 17, 4096, 100_003, 700_001]
    for rank, moved in enumerate(
        run(world, bytes_moved, sizes, lanes, {"segment_bytes": 4096, "algorithm": "ring"})
    ):
        for size, (sent, received, headers, calls) in zip(sizes, moved, strict=True):
            length = [4 * (c.stop - c.start) for c in reference.chunks(size, TYPES["float32"], world)]
            right, left = length[(rank + 1) % world], length[(rank - 1) % world]
            assert calls == 1
            if world == 1:
                assert (sent, received) == (0, 0)
                continue
            assert sent == 2 * 4 * size - length[rank] - right
            assert received == 2 * 4 * size - length[rank] - left
            assert headers >= 64 * (2 * world - 2)  # for 0 elements too
            assert headers % (64 * (2 * world - 2)) == 0


@pytest.mark.parametrize("world", WORLDS)
def test_partition_is_that_of_the_reference(world: int) -> None:
    for element in TYPES.values():
        for size in [*range(70), 1000, 12_345]:
            expected = [(c.start, c.stop - c.start) for c in reference.chunks(size, element, world)]
            assert rr.partition(size, element.bytes, world) == expected
