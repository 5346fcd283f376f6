"""Numbers by every algorithm: what is not finite, denormals, -0.0 and wrapping integers; and the same bits every time.

The ring's own special values are in test_all_reduce.py, the counts that leave NaN out in test_normalization.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cases import SMALL, SMALL_DIRECT, Case, assert_same, from_tensor, poisoned, same_memory, to_tensor
from conftest import Run
from launch import Seat
from reference import FLOATS, INTEGERS, TYPES, same_bits
from ring_reduce.normalization import DIVIDE_BY_COUNT, MEAN, SUM, WEIGHTED_MEAN

ONE_SHOT: dict[str, Any] = {"algorithm": "direct"}
ALGORITHMS = {"ring": {"algorithm": "ring", **SMALL}, "direct": SMALL_DIRECT, "one shot": ONE_SHOT}
WORLD = 3
REPEATS = 7  # of each column, so that it meets whole vectors and their ends

# By column: what each of three ranks puts in, in units of the smallest positive number where it says so, and the sum.
INF, NAN = np.inf, np.nan
COLUMNS = [
    ([NAN, 1, 1], NAN),
    ([1, 1, NAN], NAN),
    ([INF, 1, 2], INF),
    ([1, -INF, 2], -INF),
    ([INF, -INF, 0], NAN),
]
ZEROS = [([-0.0, -0.0, -0.0], -0.0), ([-0.0, 0.0, -0.0], 0.0)]
DENORMALS = [([1, 1, -1], 1), ([3, 0, -1], 2), ([-1, 1, 0], 0), ([1, 1, 1], 3)]


def table(name: str) -> np.ndarray:
    """Inputs of the ranks, then the sum, one a row."""
    tiny = TYPES[name].tiny
    columns = [[*inputs, total] for inputs, total in COLUMNS + ZEROS]
    columns += [[value * tiny for value in (*inputs, total)] for inputs, total in DENORMALS]
    rows: np.ndarray = np.repeat(np.array(columns, TYPES[name].compute), REPEATS, axis=0).T
    return rows


def special(seat: Seat) -> dict[tuple[str, str], np.ndarray]:
    found = {}
    for algorithm, tuning in ALGORITHMS.items():
        ring = seat.kept_ring(**tuning)
        for name in FLOATS:
            x = to_tensor(np.ascontiguousarray(table(name)[seat.rank]), TYPES[name])
            found[algorithm, name] = from_tensor(ring.all_reduce(x), TYPES[name])
    return found


def test_special_values_reach_every_rank(run: Run) -> None:
    for rank, found in enumerate(run(WORLD, special)):
        assert len(found) == len(ALGORITHMS) * len(FLOATS)
        for (algorithm, name), got in found.items():
            assert_same(got, table(name)[WORLD], f"{algorithm}, {name}, rank {rank}")


def wrapped(seat: Seat) -> list[list[int]]:
    found = []
    for tuning in ALGORITHMS.values():
        for name in INTEGERS:
            limits = np.iinfo(name)
            x = np.array([limits.max, limits.min, -1, limits.max // 2 + 1] * 9, name)
            found.append(seat.kept_ring(**tuning).all_reduce(x).tolist())
    return found


def test_integers_wrap_as_torch_s_sum_does(run: Run) -> None:
    import torch

    for found in run(WORLD, wrapped):
        for got, name in zip(found, INTEGERS * len(ALGORITHMS), strict=True):
            limits = torch.iinfo(getattr(torch, name))
            column = torch.tensor(
                [limits.max, limits.min, -1, limits.max // 2 + 1], dtype=getattr(torch, name)
            )
            assert got == column.expand(WORLD, 4).sum(0, dtype=column.dtype).tolist() * 9


def repeated(seat: Seat, case: Case, tuning: dict[str, Any]) -> tuple[np.ndarray, list[str]]:
    """The result, and in what ways of making the same call it came out otherwise."""
    ring = seat.kept_ring(**tuning)
    count = case.counts[seat.rank] if case.counts is not None else None
    values = to_tensor(case.input(seat.rank), case.element)
    first = None
    differ = []
    for out_of_place in (False, True, False):
        for offset in (0, 1, 3, 8):
            x = poisoned(case.size, case.element, offset)[0]
            x.copy_(values)
            out = poisoned(case.size, case.element, 7 - offset % 7)[0] if out_of_place else None
            got = ring.all_reduce(x, case.normalization, out=out, count=count).clone()
            first = got if first is None else first
            if not same_memory(got, first):
                differ.append(f"out of place: {out_of_place}, offset {offset}")
    return from_tensor(first, case.element), differ


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_the_same_input_gives_the_same_bits(run: Run, name: str, algorithm: str) -> None:
    """Call after call, in place and out of place, whatever the alignment, on every rank."""
    size = 700 if algorithm == "one shot" else 5003
    for normalization in (SUM, MEAN, DIVIDE_BY_COUNT, WEIGHTED_MEAN):
        counts = (3.0, 0.5, 11.0) if normalization.uses_count else None
        case = Case(name, size, normalization, seed=9, counts=counts)
        results = run(WORLD, repeated, case, ALGORITHMS[algorithm])
        for rank, (got, differ) in enumerate(results):
            assert differ == [], f"{case}, rank {rank}"
            assert same_bits(got, results[0][0]), f"{case}: rank {rank} differs from rank 0"
