"""The gradient as a weighted sum of the micro-batches' gradients: which weights, and whose mistake they are.

With G_k the gradient of the summed loss of micro-batch k, the right gradient is sum_k G_k / T: every count weighs
1/T. A mean of means weighs a count by the company that it is in. That turns the gradient, and no factor on the
learning rate repairs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .measured import Sizes, Vector
from .patterns import Pattern, Weights, patterns
from .yardstick import Mask, Yardstick

MOST_ROWS = 20_000  # for least squares; what comes of it is checked against every element
CLEAR = 0.1  # weights are told if rounding could move them by less than this share of the largest
MOST_NUMBERS = 12  # of weights in a text


@dataclass(frozen=True)
class Weighting:
    """Weights that give the gradient."""

    weights: Weights
    patterns: tuple[Pattern, ...] = ()  # all known mistakes that give them, up to the factor
    factor: float = 1.0
    left_out: tuple[tuple[int, int], ...] = ()  # rank and micro-batch of the weights that are 0


@dataclass(frozen=True)
class Fit:
    """What least squares found: one weight for each of U unknowns, or why they cannot be told."""

    weights: Vector | None  # [U]; NaN where an unknown has no gradient
    noise: Vector  # [U] standard error of each
    obstacle: str = ""


def find(yardstick: Yardstick, gradient: Vector) -> tuple[Weighting | None, str]:
    """The weights that give ``gradient``, or None and why they could not be told ("" if no weights give it).

    A known mistake first, since it leaves nothing to fit; then one times a factor; then least squares with one weight
    a rank, and at last one a micro-batch.
    """
    known = patterns(yardstick.sizes)
    fitting = tuple(pattern for pattern in known if yardstick.explains(pattern.flat, gradient))
    if fitting:
        return Weighting(fitting[0].weights, fitting), ""
    if yardstick.proves(1):
        for pattern in known:
            factor = _scale(gradient, pattern.flat @ yardstick.parts)
            if yardstick.explains(factor * pattern.flat, gradient):
                return _times(pattern, factor, known), ""
    obstacle = ""
    for groups in _groupings(yardstick.sizes):
        weighting, obstacle = _fit_groups(yardstick, gradient, groups)
        if weighting is not None:
            return weighting, ""
    return None, obstacle


def describe(weights: Weights, sizes: Sizes) -> str:
    """The weights of a count beside the right one: ``per-token weights 0.1 and 0.5, right is 1/6``."""
    unit = "sample" if sizes.counts == sizes.samples else "token"
    counted = [[w for w in of_rank if not math.isnan(w)] for of_rank in weights]
    by_rank = [f"{of_rank[0]:.4g}" if of_rank else "none" for of_rank in counted]
    flat = [weight for of_rank in counted for weight in of_rank]
    if (
        all(math.isclose(w, of_rank[0], rel_tol=1e-9) for of_rank in counted for w in of_rank)
        and len(weights) > 1
    ):
        numbers = by_rank
    elif len(weights) == 1:
        numbers = [f"{weight:.4g}" for weight in flat]
    else:
        numbers = [
            f"{', '.join(f'{w:.4g}' for w in ws)} (rank {rank})" for rank, ws in enumerate(counted) if ws
        ]
    if max(len(numbers), len(flat) if numbers is not by_rank else 0) > MOST_NUMBERS:
        text = f"from {min(flat):.4g} to {max(flat):.4g}"
    else:
        text = " and ".join(numbers) if len(numbers) <= 2 else ", ".join(numbers[:-1]) + f" and {numbers[-1]}"
    return f"per-{unit} weights {text}, right is 1/{sizes.total_count}"


def weights_among(yardstick: Yardstick, gradient: Vector, among: Mask, where: Mask) -> Vector | None:
    """[K] Weights of the micro-batches ``among`` [K] alone that give ``gradient``; 0 for the others."""
    index = np.flatnonzero(among)
    fit = least_squares(yardstick, gradient, yardstick.parts[index], where)
    if fit.weights is None:
        return None
    weights = np.zeros(len(yardstick.parts))
    weights[index] = np.nan_to_num(fit.weights)
    return weights if yardstick.explains(weights, gradient, where) else None


def least_squares(yardstick: Yardstick, gradient: Vector, columns: Vector, where: Mask | None = None) -> Fit:
    """Fits ``gradient`` [P] by ``columns`` [U, P], every element in units of its own bound."""
    present = np.flatnonzero(np.any(columns != 0, axis=1))
    unknowns, none = len(present), np.zeros(len(columns))
    if not yardstick.proves(unknowns, where):
        rows = yardstick.rows(where)
        return Fit(None, none, f"elements with a gradient are too few ({rows}) to tell {unknowns} weights")
    chosen = np.flatnonzero(yardstick.informative if where is None else yardstick.informative & where)
    chosen = chosen[:: -(-len(chosen) // MOST_ROWS)]
    unit = yardstick.bound[chosen]
    matrix = (columns[np.ix_(present, chosen)] / unit).T
    lengths = np.linalg.norm(matrix, axis=0)
    alike = Fit(None, none, "the gradients of the micro-batches are too much alike to tell their weights")
    if np.any(lengths == 0):
        return alike
    q, triangle = np.linalg.qr(matrix / lengths)
    if np.linalg.svd(triangle, compute_uv=False)[-1] < 1e-10:
        return alike
    inverse = np.linalg.inv(triangle)
    measured = gradient[chosen] / unit
    found = inverse @ (q.T @ measured) / lengths
    spread = np.linalg.norm(inverse, axis=1) / lengths  # of a weight, when every element is off by its bound
    if float(np.max(spread)) * yardstick.sizes.total_count > CLEAR:
        return alike
    rest = measured - matrix @ found
    weights, noise = np.full(len(columns), math.nan), none
    weights[present] = found
    noise[present] = spread * math.sqrt(float(rest @ rest) / (len(chosen) - unknowns))
    return Fit(weights, noise)


def _fit_groups(yardstick: Yardstick, gradient: Vector, groups: list[int]) -> tuple[Weighting | None, str]:
    """One weight for all micro-batches of a group; ``groups`` [K] numbers them."""
    index = np.array(groups)
    columns, number = yardstick.parts, max(groups) + 1
    if number < len(index):
        columns = np.array([yardstick.parts[index == group].sum(axis=0) for group in range(number)])
    fit = least_squares(yardstick, gradient, columns)
    if fit.weights is None:
        return None, fit.obstacle
    flat = fit.weights[index]
    if not yardstick.explains(np.nan_to_num(flat), gradient):
        return None, ""
    zero = np.abs(flat) <= 4 * fit.noise[index] + 1e-6 * np.nanmax(np.abs(flat))
    flat = np.where(zero, 0.0, flat)
    counts = yardstick.sizes.counts
    places = [(rank, i) for rank, of_rank in enumerate(counts) for i in range(len(of_rank))]
    weights = [[math.nan] * len(of_rank) for of_rank in counts]
    for (rank, i), weight in zip(places, flat, strict=True):
        weights[rank][i] = float(weight) if counts[rank][i] else math.nan
    left_out = tuple(place for place in places if weights[place[0]][place[1]] == 0)
    return Weighting(tuple(map(tuple, weights)), left_out=left_out), ""


def _groupings(sizes: Sizes) -> list[list[int]]:
    """By rank, and by micro-batch; the group of each micro-batch."""
    by_rank = [rank for rank, counts in enumerate(sizes.counts) for _ in counts]
    return [by_rank, list(range(len(by_rank)))] if len(by_rank) > sizes.world else [by_rank]


def _times(pattern: Pattern, factor: float, known: tuple[Pattern, ...]) -> Weighting:
    """A known mistake, and all that give the same weights, times a factor."""
    same = tuple(other for other in known if np.allclose(other.flat, pattern.flat, rtol=1e-9, atol=0))
    weights = tuple(tuple(factor * weight for weight in of_rank) for of_rank in pattern.weights)
    return Weighting(weights, same, factor)


def _scale(gradient: Vector, by: Vector) -> float:
    """The multiple of ``by`` that is nearest to ``gradient``."""
    square = float(by @ by)
    return float(gradient @ by) / square if square else 0.0
