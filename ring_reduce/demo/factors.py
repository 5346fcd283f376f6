"""Losses and normalizations, the factor that theory predicts for a pair of them, and the name of a measured factor.

A data-parallel gradient is right when it is that of the mean loss over the global batch: factor 1. Anything that
divides once too often, or never, multiplies the gradient by a clean factor. Weighting the ranks wrongly turns its
direction as well, and then no factor describes it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ring_reduce.normalization import Kind, Normalization

# Rounding of float32 leaves some 1e-6; wrong weights leave more than 1e-2 on real data.
TOLERANCE = 1e-4


class Loss(enum.Enum):
    """How a rank reduces the losses of its own examples before the backward pass."""

    GLOBAL = "divided by the global batch"
    LOCAL_MEAN = "local mean"
    LOCAL_SUM = "local sum"

    def divisor(self, count: int, global_batch: int) -> int:
        """What the sum of the rank's example losses is divided by."""
        match self:
            case Loss.GLOBAL:
                return global_batch
            case Loss.LOCAL_MEAN:
                return count
            case Loss.LOCAL_SUM:
                return 1


@dataclass(frozen=True)
class Verdict:
    """What a measured factor means."""

    right: bool
    symbol: str | None  # "1/n"; None when no clean factor fits
    words: str

    def __str__(self) -> str:
        return self.words if self.symbol in (None, "1") else f"{self.symbol}: {self.words}"


@dataclass(frozen=True)
class Case:
    """One loss with one normalization: the gradient measured against that of the whole batch."""

    loss: Loss
    normalization: str
    counts: tuple[int, ...]  # examples of each rank
    factor: float  # least squares: the factor times the reference comes closest to the gradient
    residual: float  # what the factor leaves of the gradient, relative: the sine of the angle between the two
    predicted: float | None  # by predict_factor; the measurement does not use it
    verdict: Verdict

    @property
    def clean(self) -> bool:
        """Whether the gradient is a multiple of the reference."""
        return self.residual <= TOLERANCE

    @property
    def as_predicted(self) -> bool:
        """Whether the measurement came out as theory says."""
        if self.predicted is None:
            return not self.clean
        return self.clean and math.isclose(self.factor, self.predicted, rel_tol=TOLERANCE)


def predict_factor(loss: Loss, normalization: Normalization, counts: Sequence[int]) -> float | None:
    """The factor from the definitions alone: an example's weight times the global batch, if all weigh alike."""
    global_batch = sum(counts)
    match normalization.kind:
        case Kind.SUM:
            divisor: float = 1
        case Kind.MEAN:
            divisor = len(counts)
        case Kind.DIVIDE_BY:
            divisor = normalization.total
        case Kind.DIVIDE_BY_COUNT | Kind.WEIGHTED_MEAN:
            divisor = global_batch
    factors = []
    for count in counts:
        entering = count if normalization.kind is Kind.WEIGHTED_MEAN else 1
        factors.append(entering * global_batch / (loss.divisor(count, global_batch) * divisor))
    return factors[0] if all(math.isclose(factor, factors[0]) for factor in factors) else None


def name_factor(factor: float, residual: float, *, world: int, global_batch: int) -> Verdict:
    """Puts a measured factor into words. Where several products match (n = B, say), all are named."""
    if not residual <= TOLERANCE:  # NaN included
        return Verdict(False, None, f"no factor: the ranks are weighted wrongly ({residual:.0%} off)")
    n, batch = world, global_batch
    candidates = [
        (1.0, "1", "right"),
        (1 / batch, "1/B", "divided twice"),
        (float(batch), "B", "never divided"),
    ]
    if n > 1:
        candidates += [
            (1 / n, "1/n", "divided twice"),
            (float(n), "n", "never divided"),
            (batch / n, "B/n", "divided by n, not by B"),
            (n / batch, "n/B", "divided by B, not by n"),
        ]
    matches = [entry for entry in candidates if math.isclose(factor, entry[0], rel_tol=TOLERANCE)]
    if not matches:
        return Verdict(False, None, f"a factor of {factor:.4g}, which is no product of n and B")
    if matches[0][1] == "1":
        return Verdict(True, "1", "right")
    symbols = " = ".join(symbol for _, symbol, _ in matches)
    words = " or ".join(dict.fromkeys(words for _, _, words in matches))
    return Verdict(False, symbols, words)
