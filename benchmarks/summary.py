"""What is said of the measured times: medians, tails, and how sure a ratio is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]  # microseconds, by (round, call in the round)

MEANINGLESS_SPREAD = 0.25  # relative half-width of an interval from which on a ratio says little


@dataclass(frozen=True)
class Summary:
    """Microseconds of one contender at one size."""

    median: float
    minimum: float
    p99: float


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its bootstrap 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_meaningless(self) -> bool:
        """Whether the spread leaves nothing to compare."""
        return self.high - self.low > 2 * MEANINGLESS_SPREAD * self.value


def slowest_rank(times_by_rank: npt.NDArray[np.float64]) -> Times:
    """An all-reduce is over when its last rank is: the maximum over ranks (axis 0) of each call's time."""
    return np.asarray(times_by_rank.max(axis=0), dtype=np.float64)


def summarize(times: Times) -> Summary:
    """Median, minimum and 99th percentile over all calls."""
    return Summary(float(np.median(times)), float(times.min()), float(np.percentile(times, 99)))


def ratio_of_medians(numerator: Times, denominator: Times, *, resamples: int = 2000, seed: int = 0) -> Ratio:
    """median(numerator) / median(denominator), and the 95 % interval of it.

    Whole rounds are resampled, the same ones on both sides: calls of a round follow each other, so a disturbance of
    the machine hits several at once, and hits both contenders of the round. Resampling single calls would take them
    for independent, and report an interval that is too narrow.
    """
    if len(numerator) != len(denominator):
        raise ValueError(
            f"the two sides have {len(numerator)} and {len(denominator)} rounds; measure them in the same rounds"
        )
    rounds = len(numerator)
    picks = np.random.default_rng(seed).integers(0, rounds, (resamples, rounds))
    medians = [np.median(side[picks].reshape(resamples, -1), axis=1) for side in (numerator, denominator)]
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return Ratio(float(np.median(numerator) / np.median(denominator)), float(low), float(high))
