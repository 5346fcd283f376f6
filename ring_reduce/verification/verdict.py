"""The verdicts on a step, and the case that they are found for."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import factors, weighting
from .measured import Measured, Sizes, Vector
from .patterns import Weights
from .yardstick import Mask, Scale, Yardstick

MOST_LISTED = 6  # names in a sentence


class Verdict(enum.Enum):
    """What a gradient is, beside the right one. The value is for a person."""

    RIGHT = "right"
    FACTOR = "factor"  # one number times the right gradient
    WEIGHTING = "weighting"  # counts do not weigh alike
    NOT_REDUCED = "not reduced"  # ranks step with their own micro-batches
    PER_PARAMETER = "per parameter"  # a factor for each parameter, and not the same
    BATCH_DEPENDENT = "batch dependent"  # the samples of a batch act on each other
    MISSING = "missing"  # no gradient where other ranks, or the reference, have one
    NOT_FINITE = "not finite"
    ZERO = "zero"  # the reference is zero, so nothing can be told
    UNTOLD = "nothing could be told"  # neither right nor wrong
    UNKNOWN = "unknown"  # wrong, and none of these


@dataclass(frozen=True)
class Finding:
    """The answer to one question about a case."""

    verdict: Verdict
    text: str  # what the gradient is, why, and what to do: one sentence
    remedy: str = ""  # what to do, once more; empty if nothing
    right: bool | None = False  # None: could not tell
    factor: float | None = (
        None  # the gradient is this times the right one; BATCH_DEPENDENT: times sum(parts) / T
    )
    names: tuple[
        str, ...
    ] = ()  # of the factor: "1/n (n = 8)"; all of the simplest, where sizes can't tell them apart
    weights: Weights | None = None  # of one count, where right is 1/T
    notes: tuple[str, ...] = ()  # sentences that qualify the verdict


@dataclass(frozen=True)
class Case:
    """A step whose numbers are finite, with what several questions need."""

    measured: Measured
    yardstick: Yardstick

    @property
    def sizes(self) -> Sizes:
        """How the data is spread."""
        return self.measured.sizes

    @property
    def gradient(self) -> Vector:
        """[P] What rank 0 steps with."""
        return np.asarray(self.measured.stepped[0])

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The elements of each parameter."""
        return spans(self.measured)

    @cached_property
    def additive(self) -> bool:
        """Whether the micro-batches' gradients add up to that of the whole batch."""
        return self.yardstick.agree(self.yardstick.average, self.yardstick.right)

    @cached_property
    def zero(self) -> bool:
        """Whether the reference is zero, or what rounding leaves of a sum that is."""
        left = np.abs(self.yardstick.right) <= self.measured.tolerance * self.yardstick.magnitude
        return bool(np.all(left))

    @cached_property
    def differing(self) -> Mask:
        """[P] Where ranks step with different gradients, by the bound of a gradient of their size."""
        made_of = float(np.linalg.norm(self.yardstick.magnitude))
        largest = max(float(np.linalg.norm(gradient)) for gradient in self.measured.stepped)
        size = 2 * largest / made_of if made_of else 1.0
        return np.asarray(np.ptp(self.measured.stepped, axis=0) > size * self.yardstick.bound)

    @cached_property
    def weighting(self) -> tuple[weighting.Weighting | None, str]:
        """The weights of the micro-batches that give the gradient, or why they cannot be told."""
        return weighting.find(self.yardstick, self.gradient)

    def right_in(self, where: slice) -> bool:
        """Whether every rank's gradient is right at these elements."""
        return bool(np.all(self.distance(where) <= self.yardstick.bound[where]))

    def distance(self, where: slice) -> Vector:
        """How far the rank that is farthest from the right gradient is from it, at each of these elements."""
        right = self.yardstick.right[where]
        farthest = np.zeros_like(right)
        for gradient in self.measured.stepped:  # one after the other, for the sake of memory
            np.maximum(farthest, np.abs(gradient[where] - right), out=farthest)
        return farthest

    def blank(self, where: slice) -> bool:
        """Whether all is zero at these elements, as it would be with any divisor and without a reduction."""
        yardstick = self.yardstick
        shown = (yardstick.right[where], yardstick.magnitude[where], *self.measured.stepped[:, where])
        return len(shown[0]) > 0 and not any(values.any() for values in shown)

    @cached_property
    def scales(self) -> tuple[Scale | None, ...]:
        """By rank: the factor that fits best."""
        yardstick = self.yardstick
        return tuple(yardstick.scale_of(gradient, yardstick.right) for gradient in self.measured.stepped)

    def named(self, factor: float | Scale) -> tuple[factors.Name, ...]:
        """The names of a factor, within its standard error if that is known, else within the tolerance."""
        if isinstance(factor, Scale):
            return factors.named(factor.factor, self.sizes, factor.within)
        return factors.named(factor, self.sizes, self.measured.tolerance)


def spans(measured: Measured) -> dict[str, slice]:
    """The elements of each parameter."""
    starts = (0, *measured.ends)
    return {
        name: slice(start, end)
        for name, start, end in zip(measured.names, starts, measured.ends, strict=False)
    }


def listed(names: Iterable[str]) -> str:
    """Names in a sentence, the first few of many."""
    every = list(names)
    more = f" and {len(every) - MOST_LISTED} more" if len(every) > MOST_LISTED else ""
    return ", ".join(every[:MOST_LISTED]) + more
