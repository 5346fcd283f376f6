"""The names of factors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from diagnosis_cases import FLOAT32, Lists, equal, measured_of, sizes_of
from ring_reduce.verification.diagnosis import diagnose
from ring_reduce.verification.factors import divisor_of_world, matches, named
from ring_reduce.verification.measured import Sizes

COPRIME = equal(2, 3, 5)
TOKENS = sizes_of([[100]] * 8, samples=[[1]] * 8)


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (2, "n (n = 2)"),
        (1 / 2, "1/n (n = 2)"),
        (3, "N (N = 3)"),
        (1 / 3, "1/N (N = 3)"),
        (5, "m (m = 5)"),
        (1 / 5, "1/m (m = 5)"),
        (30, "B (B = 30)"),
        (1 / 30, "1/B (B = 30)"),
        (15, "B/n (n = 2, B = 30)"),
        (1 / 15, "n/B (n = 2, B = 30)"),
        (6, "n N (n = 2, N = 3)"),
        (1 / 6, "1/(n N) (n = 2, N = 3)"),
        (10, "n m (n = 2, m = 5)"),
        (2 / 3, "n/N (n = 2, N = 3)"),
        (1 / 4, "1/n^2 (n = 2)"),
        (90, "N B (N = 3, B = 30)"),
        (-1 / 2, "-1/n (n = 2)"),
        (1, "1"),
        (-1, "-1"),
    ],
)
def test_one_name_where_sizes_are_coprime(factor: float, name: str) -> None:
    """n = 2, N = 3, m = 5, also with noise below the tolerance, and with none above it."""
    assert matches(factor, COPRIME, FLOAT32) == (name,)
    assert matches(factor * (1 + 0.9 * FLOAT32), COPRIME, FLOAT32) == (name,)
    assert name not in matches(factor * (1 + 1.2 * FLOAT32), COPRIME, FLOAT32)


@pytest.mark.parametrize(
    "factor", [7, 0.37, 1.01, 1 / 7, 1024, 8, 27, 125, 900, 0, math.nan, math.inf, -math.inf]
)
def test_no_name_for_what_nobody_does(factor: float) -> None:
    """Other primes, cubes, B squared, and what is no number."""
    assert matches(factor, COPRIME, FLOAT32) == ()


@pytest.mark.parametrize(
    ("sizes", "factor", "names"),
    [
        (equal(4, 4, 5), 4, ["n (n = 4)", "N (N = 4)"]),
        (equal(4, 4, 4), 1 / 4, ["1/n (n = 4)", "1/N (N = 4)", "1/m (m = 4)"]),
        (equal(2, 1, 2), 1 / 2, ["1/n (n = 2)", "n/B (n = 2, B = 4)"]),
        (equal(4, 2, 5), 8, ["n N (n = 4, N = 2)"]),
        (equal(4, 2, 5), 16, ["n^2 (n = 4)"]),
        (equal(8, 2, 4), 8, ["n (n = 8)", "B/n (n = 8, B = 64)"]),
        (equal(6, 2, 5), 6, ["n (n = 6)"]),
        (equal(4, 2, 3), 2, ["N (N = 2)"]),  # and not n/N, which takes two
    ],
)
def test_all_of_the_simplest_are_named_and_none_is_picked(
    sizes: Sizes, factor: float, names: list[str]
) -> None:
    assert list(matches(factor, sizes, FLOAT32)) == names


@pytest.mark.parametrize(
    ("counts", "planned", "factor", "name"),
    [
        ([[4] * 7], 8, 7 / 8, "k/N = 7/8 (k = 7 micro-batches of N = 8 planned)"),
        ([[4] * 7], 8, 8 / 7, "N/k = 8/7 (k = 7 micro-batches of N = 8 planned)"),
        ([[4] * 7], 8, 7, "k (k = 7 micro-batches)"),
        ([[4] * 7], 8, 1 / 8, "1/N (N = 8 planned)"),
        ([[4] * 7] * 3, 8, 7 / 24, "k/(n N) (n = 3, N = 8 planned, k = 7 micro-batches)"),
        ([[4] * 4, [4] * 3], 4, 7 / 8, "K/(n N) = 7/8 (K = 7 micro-batches of n N = 8 planned)"),
        (
            [[5, 5, 5, 4], [5, 5, 5, 2]],
            4,
            36 / 40,
            "B/(n N m) = 36/40 (B = 36 samples of n N m = 40 planned)",
        ),
    ],
)
def test_short_groups(counts: Lists, planned: int, factor: float, name: str) -> None:
    assert matches(factor, sizes_of(counts, planned=planned), FLOAT32) == (name,)


def test_a_short_group_is_as_simple_as_one_size() -> None:
    """1/2 is 1/n as well as k/N: both are named."""
    names = matches(1 / 2, equal(2, 3, 5, planned=6), FLOAT32)
    assert names == ("1/n (n = 2)", "k/N = 3/6 (k = 3 micro-batches of N = 6 planned)")


def test_a_short_group_of_one() -> None:
    """Divided by N although only one ran, or divided by N once more: 1/N both. And B/n is m, which is one name."""
    sizes = equal(2, 1, 5, planned=3)
    names = matches(1 / 3, sizes, FLOAT32)
    assert names == ("1/N (N = 3 planned)", "k/N = 1/3 (k = 1 micro-batch of N = 3 planned)")
    assert matches(5, sizes, FLOAT32) == ("B/n (n = 2, B = 10)",)
    found = diagnose(measured_of(sizes, weight=lambda r, i: 1 / 30))
    assert "divide by N once" in found.text
    assert "the group is short" in found.text


def test_a_full_group_has_no_short_name() -> None:
    for factor in (7 / 8, 1 / 2, 3, 36 / 40):
        assert not any("k" in name or "planned" in name for name in matches(factor, equal(2, 3, 5), FLOAT32))


@pytest.mark.parametrize(
    ("sizes", "factor", "name"),
    [
        (TOKENS, 1 / 8, "1/n (n = 8)"),
        (TOKENS, 800, "T (T = 800 tokens)"),
        (TOKENS, 100, "T/n (n = 8, T = 800 tokens)"),
        (sizes_of([[7, 7], [7, 7]], samples=[[3, 3], [3, 3]]), 7, "c (c = 7 tokens)"),
        (sizes_of([[7, 7], [7, 7]], samples=[[3, 3], [3, 3]]), 3, "m (m = 3)"),
        (sizes_of([[7, 4]], samples=[[3, 2]]), 11, "T (T = 11 tokens)"),
        (sizes_of([[7, 4]], samples=[[3, 2]]), 11 / 5, "T/B (B = 5, T = 11 tokens)"),
        (sizes_of([[7, 4]], samples=[[3, 2]]), 5, "B (B = 5)"),
    ],
)
def test_counted_tokens_have_names_of_their_own(sizes: Sizes, factor: float, name: str) -> None:
    assert name in matches(factor, sizes, FLOAT32)


def test_samples_that_count_have_no_second_name() -> None:
    assert all(
        "tokens" not in name for factor in (30, 5, 15, 1 / 30) for name in matches(factor, COPRIME, FLOAT32)
    )


def test_unequal_micro_batches_have_no_size() -> None:
    """m = 5 in one of them names nothing, nor does the mean. B/n is one size only where all ranks have as much."""
    sizes = sizes_of([[5, 3, 7], [4, 5, 11]])
    assert matches(5, sizes, FLOAT32) == ()
    assert matches(35 / 6, sizes, FLOAT32) == ("B/(n N) (n = 2, N = 3, B = 35)",)
    assert [name.symbols for name in named(35 / 2, sizes, FLOAT32)] == [2]
    assert [name.symbols for name in named(15, sizes_of([[5, 3, 7], [4, 5, 6]]), FLOAT32)] == [1]


def test_sizes_of_one_name_nothing() -> None:
    sizes = sizes_of([[6]])
    assert matches(6, sizes, FLOAT32) == ("B (B = 6)",)
    assert matches(1, sizes, FLOAT32) == ("1",)
    assert [name.symbol for name in named(1 / 6, sizes, FLOAT32)] == ["1/B"]


@pytest.mark.parametrize(
    ("world", "factor", "d"), [(4, 2, 2), (4, 1 / 2, 2), (8, 4, 4), (8, 1 / 2, 2), (6, 3, 3)]
)
def test_divisors_of_the_world_ask_for_a_second_parallel_dimension(world: int, factor: float, d: int) -> None:
    hint = divisor_of_world(factor, equal(world, 1, 5), FLOAT32)
    assert hint is not None
    name, question = hint
    assert name.endswith(f"a divisor of n = {world}")
    assert name.startswith("1 over") == (factor < 1)
    assert question == f"is the data-parallel size {world // d} (world / {d})?"


@pytest.mark.parametrize(("world", "factor"), [(4, 4), (4, 1 / 4), (4, 3), (4, 1), (2, 2), (1, 1), (7, 2)])
def test_the_world_itself_is_no_proper_divisor(world: int, factor: float) -> None:
    assert divisor_of_world(factor, equal(world, 1, 5), FLOAT32) is None


def test_the_tables_of_the_guide() -> None:
    """The factors of docs/normalization.md, n = 4 and B = 32."""
    sizes, said = equal(4, 1, 8), {}
    rows: dict[str, Callable[[float], float]] = {
        "sum / global batch": lambda divisor: 1 / divisor,
        "local mean": lambda divisor: 4 / divisor,
        "local sum": lambda divisor: 32 / divisor,
    }
    for row, factor in rows.items():
        said[row] = [[name.symbol for name in named(factor(d), sizes, FLOAT32)] for d in (1, 4, 32)]
    assert said == {
        "sum / global batch": [["1"], ["1/n"], ["1/B"]],
        "local mean": [["n"], ["1"], ["n/B"]],
        "local sum": [["B"], ["B/n"], ["1"]],
    }
