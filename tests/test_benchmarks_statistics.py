"""The benchmark's statistics on numbers with known answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ring_reduce.benchmarks.summary import Ratio, median_interval, ratio_of_medians, slowest_rank, summarize


def test_summary_is_of_all_calls() -> None:
    times: Any = np.arange(1.0, 102.0).reshape(101, 1)
    np.random.default_rng(0).shuffle(times)
    summary = summarize(times)
    assert (summary.median, summary.minimum, summary.p99) == (51.0, 1.0, 100.0)


def test_a_call_takes_what_its_slowest_rank_takes() -> None:
    by_rank = np.array([[[1.0, 9.0], [3.0, 4.0]], [[2.0, 5.0], [8.0, 1.0]]])
    assert slowest_rank(by_rank).tolist() == [[2.0, 9.0], [8.0, 4.0]]


def test_ratio_pairs_the_rounds() -> None:
    """Drift that hits both sides of a round alike must leave the ratio and its interval alone."""
    drift = np.random.default_rng(1).uniform(1, 10, (31, 1)) * np.ones((31, 5))
    ratio = ratio_of_medians(2 * drift, drift)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_interval_covers_the_true_ratio_in_spite_of_correlated_calls() -> None:
    """Calls of a round move together; an interval that took them for independent would cover far less than 95 %."""
    random = np.random.default_rng(2)
    covered = 0
    for trial in range(200):
        sides = [np.exp(random.normal(0, 0.1, (40, 1)) + random.normal(0, 0.02, (40, 16))) for _ in range(2)]
        ratio = ratio_of_medians(1.5 * sides[0], sides[1], resamples=300, seed=trial)
        covered += ratio.low <= 1.5 <= ratio.high
    # Binomial(200, 0.95) is below 177 once in 3,000 trials; resampling calls covers about 70.
    assert covered >= 177


def test_interval_shows_a_difference_and_does_not_invent_one() -> None:
    random = np.random.default_rng(3)
    slow, fast = random.normal(110, 5, (100, 8)), random.normal(100, 5, (100, 8))
    assert ratio_of_medians(slow, fast).low > 1.05
    same = ratio_of_medians(fast, random.normal(100, 5, (100, 8)))
    assert same.low < 1.0 < same.high


def test_ratio_refuses_sides_of_different_rounds() -> None:
    with pytest.raises(ValueError, match="3 and 4 rounds"):
        ratio_of_medians(np.ones((3, 2)), np.ones((4, 2)))


@pytest.mark.parametrize(("low", "high", "meaningless"), [(0.9, 1.1, False), (0.5, 1.6, True)])
def test_wide_intervals_are_called_meaningless(low: float, high: float, meaningless: bool) -> None:
    assert Ratio(1.0, low, high).is_meaningless is meaningless


def test_too_few_rounds_have_no_interval() -> None:
    """Four rounds that happen to agree must not pass for certainty."""
    ratio = ratio_of_medians(np.full((4, 16), 2.0), np.full((4, 16), 1.0))
    assert ratio.value == 2.0
    assert math.isnan(ratio.low)
    assert math.isnan(ratio.high)
    assert ratio.is_meaningless
    assert median_interval(np.ones((4, 16))) is None


def test_interval_of_a_median_holds_it_and_is_of_rounds() -> None:
    random = np.random.default_rng(4)
    rounds = random.normal(100, 5, (40, 1)) * np.ones((40, 16))
    low, high = median_interval(rounds) or (math.nan, math.nan)
    assert low <= float(np.median(rounds)) <= high
    # 640 independent calls would have an interval a quarter as wide.
    assert high - low > 1.5
    assert median_interval(np.full((5, 2), 7.0)) == (7.0, 7.0)
