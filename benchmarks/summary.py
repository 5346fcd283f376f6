"""What is said of the measured times: medians, tails, and how sure a median or a ratio is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]  # microseconds, by (round, call in the round)

MEANINGLESS_SPREAD = 0.25  # relative half-width of an interval from which on a ratio says little
LEAST_ROUNDS = 5  # fewer have no interval: resampling them would show hardly any spread
RESAMPLES = 2000


@dataclass(frozen=True)
class Summary:
    """Microseconds of one contender at one size."""

    median: float
    minimum: float
    p99: float


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its bootstrap 95 % interval, which is NaN where too few rounds were measured."""

    value: float
    low: float
    high: float

    @property
    def is_meaningless(self) -> bool:
        """Whether the spread leaves nothing to compare, or isn't known."""
        return not self.high - self.low <= 2 * MEANINGLESS_SPREAD * self.value


def slowest_rank(times_by_rank: npt.NDArray[np.float64]) -> Times:
    """An all-reduce is over when its last rank is: the maximum over ranks (axis 0) of each call's time."""
    return np.asarray(times_by_rank.max(axis=0), dtype=np.float64)


def summarize(times: Times) -> Summary:
    """Median, minimum and 99th percentile over all calls."""
    return Summary(float(np.median(times)), float(times.min()), float(np.percentile(times, 99)))


def median_interval(times: Times, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float] | None:
    """The bootstrap 95 % interval of the median over all calls, rounds resampled; None for too few rounds."""
    if len(times) < LEAST_ROUNDS:
        return None
    picks = np.random.default_rng(seed).integers(0, len(times), (resamples, len(times)))
    low, high = np.percentile(_medians(times, picks), [2.5, 97.5])
    return float(low), float(high)


def ratio_of_medians(
    numerator: Times, denominator: Times, *, resamples: int = RESAMPLES, seed: int = 0
) -> Ratio:
    """median(numerator) / median(denominator), and the 95 % interval of it.

    Whole rounds are resampled, the same ones on both sides: calls of a round follow each other, so a disturbance of
    the machine hits several at once, and hits both contenders of the round. Resampling single calls would take them
    for independent, and report an interval that is too narrow.
    """
    if len(numerator) != len(denominator):
        raise ValueError(
            f"the two sides have {len(numerator)} and {len(denominator)} rounds; measure them in the same rounds"
        )
    value = float(np.median(numerator) / np.median(denominator))
    rounds = len(numerator)
    if rounds < LEAST_ROUNDS:
        return Ratio(value, math.nan, math.nan)
    picks = np.random.default_rng(seed).integers(0, rounds, (resamples, rounds))
    low, high = np.percentile(_medians(numerator, picks) / _medians(denominator, picks), [2.5, 97.5])
    return Ratio(value, float(low), float(high))


def _medians(times: Times, picks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.asarray(np.median(times[picks].reshape(len(picks), -1), axis=1), dtype=np.float64)
