"""The weights of a count that known mistakes give. They follow from the sizes alone, so there is nothing to fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .measured import Sizes, Vector

Weights = tuple[
    tuple[float, ...], ...
]  # of one count: by rank, then by micro-batch; NaN where none can be told

_SUMS = "or sum the losses and use DIVIDE_BY_COUNT with the same count"
_BY_RANK = f"use WEIGHTED_MEAN with count = what the rank's mean is over, {_SUMS}"
_BY_BATCH = "sum the losses of each micro-batch, count what they are over, and divide once: DIVIDE_BY_COUNT"
_TOKENS = "let the count be the tokens that are not ignored, not the samples"


@dataclass(frozen=True)
class Pattern:
    """A known mistake as weights."""

    formula: str  # of the weight of one count
    words: str
    remedy: str
    weights: Weights

    @property
    def flat(self) -> Vector:
        """[K] 0 where nothing is counted."""
        return np.array([0.0 if math.isnan(w) else w for of_rank in self.weights for w in of_rank])


@dataclass(frozen=True)
class _Counts:
    """What formulas are made of, for a micro-batch i of rank r."""

    sizes: Sizes
    r: int
    i: int

    @property
    def c(self) -> int:
        """Count of the micro-batch."""
        return self.sizes.counts[self.r][self.i]

    @property
    def rank(self) -> int:
        """C_r"""
        return self.sizes.rank_counts[self.r]

    @property
    def ran(self) -> int:
        """k_r"""
        return len(self.sizes.counts[self.r])

    @property
    def samples(self) -> int:
        """b: samples of the micro-batch."""
        return self.sizes.samples[self.r][self.i]

    @property
    def rank_samples(self) -> int:
        """B_r"""
        return sum(self.sizes.samples[self.r])


_Weight = Callable[[_Counts], float]
_Row = tuple[str, str, str, _Weight]

# C_r is the count of a rank, c of a micro-batch; n, N, T, B as in factors.py.
_RANKS: tuple[_Row, ...] = (
    ("1/(n C_r)", "the mean of the ranks' means", _BY_RANK, lambda x: 1 / (x.sizes.world * x.rank)),
    ("1/C_r", "the sum of the ranks' means", _BY_RANK, lambda x: 1 / x.rank),
)
_MICRO_BATCHES: tuple[_Row, ...] = (
    (
        "1/(n N c)",
        "the mean of the micro-batches' means",
        _BY_BATCH,
        lambda x: 1 / (x.sizes.world * x.sizes.micro_batches * x.c),
    ),
    ("1/c", "the sum of the micro-batches' means", _BY_BATCH, lambda x: 1 / x.c),
)
_BOTH: tuple[_Row, ...] = (
    (
        "1/(n c)",
        "the micro-batches' means added up on each rank, and the mean over the ranks",
        _BY_BATCH,
        lambda x: 1 / (x.sizes.world * x.c),
    ),
    (
        "C_r/(T N c)",
        "the mean of each rank's micro-batches' means, and WEIGHTED_MEAN over the ranks",
        _BY_BATCH,
        lambda x: x.rank / (x.sizes.total_count * x.sizes.micro_batches * x.c),
    ),
    (
        "C_r/(T c)",
        "the micro-batches' means added up on each rank, and WEIGHTED_MEAN over the ranks",
        _BY_BATCH,
        lambda x: x.rank / (x.sizes.total_count * x.c),
    ),
)
# k_r micro-batches ran on the rank, K on all: what these divide by, which does not repair unequal groups.
_SHORT: tuple[_Row, ...] = (
    (
        "1/(n k_r c)",
        "the mean over the ranks of the mean of each one's micro-batches' means",
        _BY_BATCH,
        lambda x: 1 / (x.sizes.world * x.ran * x.c),
    ),
    (
        "1/(K c)",
        "the mean of all micro-batches' means",
        _BY_BATCH,
        lambda x: 1 / (sum(map(len, x.sizes.counts)) * x.c),
    ),
)
# b samples in the micro-batch, B_r on the rank: samples where counted tokens belong.
_RANK_SAMPLES: tuple[_Row, ...] = (
    (
        "B_r/(B C_r)",
        "the ranks' means over tokens, weighted by samples",
        _TOKENS,
        lambda x: x.rank_samples / (x.sizes.total_samples * x.rank),
    ),
    (
        "1/(n B_r)",
        "the ranks' sums over tokens, divided by the rank's samples and averaged",
        _TOKENS,
        lambda x: 1 / (x.sizes.world * x.rank_samples),
    ),
)
_BATCH_SAMPLES: tuple[_Row, ...] = (
    (
        "b/(B c)",
        "the micro-batches' means over tokens, weighted by samples",
        _TOKENS,
        lambda x: x.samples / (x.sizes.total_samples * x.c),
    ),
)
# Of a rank's own micro-batches, where nothing was reduced.
_OWN: tuple[_Row, ...] = (
    ("1/C_r", "its own mean", "", lambda x: 1 / x.rank),
    ("1/(N c)", "the mean of its own micro-batches' means", "", lambda x: 1 / (x.sizes.micro_batches * x.c)),
    ("1/c", "the sum of its own micro-batches' means", "", lambda x: 1 / x.c),
    ("1/T", "its own sum over the total count", "", lambda x: 1 / x.sizes.total_count),
    ("1", "its own sum", "", lambda x: 1.0),
)


def patterns(sizes: Sizes) -> tuple[Pattern, ...]:
    """The known mistakes that turn the gradient with these sizes, the simplest first.

    Those that weigh every count alike are left out: they are factors. So are those that are others by definition, as
    micro-batches' means are ranks' means where a rank has one micro-batch.
    """
    several_ranks, several_batches = sizes.world > 1, sizes.micro_batches > 1
    tokens = sizes.samples != sizes.counts
    rows = _RANKS if several_ranks else ()
    if several_batches:
        rows += _MICRO_BATCHES + (_BOTH if several_ranks else ())
    if any(len(counts) != sizes.micro_batches for counts in sizes.counts):
        rows += _SHORT
    if tokens and len({sum(samples) for samples in sizes.samples}) > 1:
        rows += _RANK_SAMPLES
    if tokens and several_batches and len({each for samples in sizes.samples for each in samples}) > 1:
        rows += _BATCH_SAMPLES
    return tuple(pattern for pattern in _patterns(sizes, rows) if not is_uniform(pattern.weights))


def own_patterns(sizes: Sizes) -> tuple[Pattern, ...]:
    """What a rank has whose gradient was not reduced: weights of its own micro-batches."""
    return _patterns(sizes, _OWN)


def is_uniform(weights: Weights) -> bool:
    """Whether all counts weigh alike."""
    flat = [weight for of_rank in weights for weight in of_rank if not math.isnan(weight)]
    return all(math.isclose(weight, flat[0], rel_tol=1e-9) for weight in flat)


def _patterns(sizes: Sizes, rows: tuple[_Row, ...]) -> tuple[Pattern, ...]:
    """The rows with numbers; NaN where nothing is counted."""
    return tuple(
        Pattern(
            formula,
            words,
            remedy,
            tuple(
                tuple(weight(_Counts(sizes, r, i)) if counts[i] else math.nan for i in range(len(counts)))
                for r, counts in enumerate(sizes.counts)
            ),
        )
        for formula, words, remedy, weight in rows
    )
