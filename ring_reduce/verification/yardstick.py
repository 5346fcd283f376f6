"""How far rounding may carry a gradient from the right one, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .measured import Measured, Sizes, Vector

Mask = npt.NDArray[np.bool_]  # [P]

# Elements beyond the unknowns of a fit agree by luck with a chance of about the tolerance each; more luck is no proof.
CHANCE = 1e-3
BLOCK = 1 << 18  # elements at once, for the sake of memory
MANY = 16  # elements: their largest gap is no luck
CLEAR = 8.0  # standard errors: more is no rounding


@dataclass(frozen=True)
class Scale:
    """A factor by least squares, which many elements know far better than any of them is known."""

    factor: float
    error: float  # standard
    tolerance: float  # relative, of an element
    epsilon: float  # of the type

    @property
    def within(self) -> float:
        """The relative difference to a name that rounding explains."""
        size = abs(self.factor) or 1.0
        return min(self.tolerance, 4 * self.error / size + max(self.tolerance / 8, self.epsilon))

    def apart(self, other: float, error: float = 0.0) -> bool:
        """Whether rounding does not explain the difference to another factor, whose standard error is ``error``."""
        least = max(4 * self.epsilon, self.tolerance / 8) * max(abs(other), abs(self.factor))
        return abs(self.factor - other) > max(CLEAR * math.hypot(self.error, error), least)


@dataclass(frozen=True)
class Yardstick:
    """The right gradient, what it is made of, and the bound on what rounding explains.

    G_k is the gradient of the summed loss of micro-batch k, T the total count. g = sum_k w G_k, added in any order, is
    off by at most (e + gamma_K) sum_k |w G_k| in each element, where e is the relative error of a part and gamma_K
    that of a sum of K terms (Higham 2002, section 4.2). The rounding of the reference adds e |right|. With a tolerance
    above both,

        |g - right| <= tolerance (|right| + sum_k |G_k| / T) + floor

    so what cancels between micro-batches is measured by what it is made of. What cancels within one (the gradient of a
    bias that the softmax after it ignores is all noise) shows in no part. It shows where two ways to the right gradient
    differ: the floor of a parameter is four times the largest |right - sum_k G_k / T| in it, but at most
    tolerance * (root mean square of the right gradient). And at least 1/256 of that of its own elements, and epsilon *
    (that of all), but not 1/256 of all: that is for a single micro-batch, where there is one way only, and for a
    parameter of a few elements, where two ways may agree by luck.
    """

    sizes: Sizes
    tolerance: float  # relative, of the gradients' type
    right: Vector  # [P] measured.whole
    parts: Vector  # [K, P]
    floor: Vector  # [P]
    epsilon: float = 0.0  # relative error of one rounding

    @classmethod
    def of(cls, measured: Measured) -> Yardstick:
        """The yardstick of a step whose reference is finite."""
        right, tolerance = measured.whole, measured.tolerance
        epsilon = max(measured.epsilon, tolerance**2)
        gaps = np.abs(right - measured.parts.sum(axis=0) / max(measured.sizes.total_count, 1))
        size = _root_mean_square(right)
        most, alone = tolerance * size, np.count_nonzero(measured.parts.any(axis=1)) < 2
        floor = np.zeros_like(right)
        for start, end in zip((0, *measured.ends), measured.ends, strict=False):
            own = tolerance * _root_mean_square(right[start:end]) / 256
            few = alone or end - start < MANY
            least = most / 256 if few else min(most / 256, max(own, epsilon * size))
            floor[start:end] = min(max(4 * float(np.max(gaps[start:end], initial=0)), least), most)
        return cls(measured.sizes, tolerance, right, measured.parts, floor, epsilon)

    @cached_property
    def average(self) -> Vector:
        """[P] sum_k G_k / T: the right gradient too, unless samples of a batch act on each other."""
        return np.asarray(self.parts.sum(axis=0) / max(self.sizes.total_count, 1))

    @cached_property
    def magnitude(self) -> Vector:
        """[P] sum_k |G_k| / T"""
        return self.made_of(np.ones(len(self.parts))) / max(self.sizes.total_count, 1)

    def made_of(self, weights: Vector) -> Vector:
        """[P] sum_k |weights_k G_k|, without a second copy of the parts."""
        total = np.zeros_like(self.right)
        for weight, part in zip(weights, self.parts, strict=True):
            if weight:
                total += abs(weight) * np.abs(part)
        return total

    @cached_property
    def bound(self) -> Vector:
        """[P] How far a right gradient may be from ``right``."""
        return self.tolerance * (np.abs(self.right) + self.magnitude) + self.floor

    @cached_property
    def informative(self) -> Mask:
        """[P] Whether an element stands out from the floor."""
        return np.asarray(self.tolerance * self.magnitude > self.floor)

    def agree(self, a: Vector, b: Vector, factor: float = 1.0) -> bool:
        """Whether two gradients, each ``factor`` times as large as the right one, are the same but for rounding."""
        return bool(np.all(np.abs(a - b) <= abs(factor) * self.bound))

    def factor_of(self, gradient: Vector, right: Vector, where: slice = slice(None)) -> Scale | None:
        """f = <g, r> / <r, r> by least squares, if g = f r within |f| times the bound; otherwise None."""
        scale = self.scale_of(gradient, right, where)
        if scale is None:
            return None
        off = np.abs(gradient[where] - scale.factor * right[where])
        return scale if bool(np.all(off <= abs(scale.factor) * self.bound[where])) else None

    def scale_of(self, gradient: Vector, right: Vector, where: slice = slice(None)) -> Scale | None:
        """The factor that fits best, whether or not it fits; None where ``right`` is zero.

        Its standard error is, in quadrature, that of what the residual shows (by element, so that a few large ones
        are not taken for many), what a rounding of each element gives, what one of each micro-batch as a whole gives,
        and how far the sum of the micro-batches is from the whole batch.
        """
        g, r, average, magnitude = (each[where] for each in (gradient, right, self.average, self.magnitude))
        square = float(r @ r)
        if square == 0:
            return None
        factor = float(g @ r) / square
        size, spread, made = abs(factor), 0.0, 0.0
        for start in range(0, len(r), BLOCK):
            block = slice(start, start + BLOCK)
            weights, made_of = r[block], np.abs(r[block]) + magnitude[block]
            left = (g[block] - factor * weights) / np.maximum(1 - weights**2 / square, 0.1)
            rounding = size * self.epsilon / 2 * made_of
            spread += float(np.sum(weights**2 * (left**2 + rounding**2)))
            made += float(np.abs(weights) @ made_of)
        shared = size * self.epsilon / 8 * made / square
        gap = size * abs(float(average @ r) / square - 1)
        error = math.hypot(math.sqrt(spread) / square, shared, gap)
        return Scale(factor, error, self.tolerance, self.epsilon)

    def explains(self, weights: Vector, gradient: Vector, where: Mask | None = None) -> bool:
        """Whether sum_k weights_k G_k is ``gradient``, at the elements of ``where``."""
        size = float(np.max(np.abs(weights), initial=0)) * self.sizes.total_count
        sum_of_parts = weights @ self.parts
        bound = self.tolerance * (np.abs(sum_of_parts) + self.made_of(weights)) + size * self.floor
        close = np.abs(gradient - sum_of_parts) <= bound
        return bool(np.all(close if where is None else close[where]))

    def rows(self, where: Mask | None = None) -> int:
        """How many elements say anything."""
        return int(np.count_nonzero(self.informative if where is None else self.informative & where))

    def proves(self, unknowns: int, where: Mask | None = None) -> bool:
        """Whether it is no luck when so many unknowns fit every element."""
        spare = self.rows(where) - unknowns
        return spare > 0 and self.tolerance**spare <= CHANCE


def _root_mean_square(values: Vector) -> float:
    return math.sqrt(float(np.mean(values**2))) if values.size else 0.0
