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
    differ: the floor of a parameter is four times the largest |right - sum_k G_k / T| in it, but at least 1/256 and at
    most the whole of tolerance * (root mean square of the right gradient).
    """

    sizes: Sizes
    tolerance: float  # relative, of the gradients' type
    right: Vector  # [P] measured.whole
    parts: Vector  # [K, P]
    floor: Vector  # [P]

    @classmethod
    def of(cls, measured: Measured) -> Yardstick:
        """The yardstick of a step whose reference is finite."""
        right, tolerance = measured.whole, measured.tolerance
        gaps = np.abs(right - measured.parts.sum(axis=0) / max(measured.sizes.total_count, 1))
        most = tolerance * math.sqrt(float(np.mean(right**2))) if right.size else 0.0
        floor = np.zeros_like(right)
        for start, end in zip((0, *measured.ends), measured.ends, strict=False):
            floor[start:end] = min(max(4 * float(np.max(gaps[start:end], initial=0)), most / 256), most)
        return cls(measured.sizes, tolerance, right, measured.parts, floor)

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

    def factor_of(self, gradient: Vector, right: Vector, where: slice = slice(None)) -> float | None:
        """f = <g, r> / <r, r> by least squares, if g = f r within |f| times the bound; otherwise None."""
        g, r = gradient[where], right[where]
        square = float(r @ r)
        if square == 0:
            return None
        factor = float(g @ r) / square
        return factor if bool(np.all(np.abs(g - factor * r) <= abs(factor) * self.bound[where])) else None

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
