"""Steps for a diagnosis, made of random gradients of micro-batches and of the weights that a mistake gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ring_reduce.verification.measured import Measured, Sizes, Vector

FLOAT32 = 1e-4
BFLOAT16 = 0.03

Lists = Sequence[Sequence[int]]
Weight = Callable[[int, int], float]  # of a count, by rank and micro-batch


def sizes_of(counts: Lists, samples: Lists | None = None, planned: int | None = None) -> Sizes:
    """Sizes by rank and micro-batch; without ``samples`` a count is one."""
    lists = [tuple(map(tuple, each)) for each in (samples or counts, counts)]
    return Sizes(planned or max(map(len, counts)), *lists)


def equal(n: int, N: int, m: int, planned: int | None = None) -> Sizes:
    """n ranks of N micro-batches of m samples."""
    return sizes_of([[m] * N] * n, planned=planned)


def random_parts(sizes: Sizes, elements: int, seed: int = 1) -> Vector:
    """[K, P] A sum over each micro-batch's counts of random gradients with a common direction."""
    random = np.random.default_rng(seed)
    common = random.normal(size=elements)
    counts = [count for of_rank in sizes.counts for count in of_rank]
    return np.array([random.normal(size=(count, elements)).sum(axis=0) + count * common for count in counts])


def float32_noise(values: Vector, seed: int) -> Vector:
    """Off by some roundings to float32."""
    return values * (1 + 3e-7 * np.random.default_rng(seed).normal(size=values.shape))


def bfloat16(values: Vector, seed: int) -> Vector:
    """Off by a rounding to bfloat16 on the way, and rounded to its 8 bits."""
    noisy = values * (1 + 2.0**-9 * np.random.default_rng(seed).normal(size=values.shape))
    fraction, exponent = np.frexp(noisy)
    return np.asarray(np.ldexp(np.round(fraction * 256) / 256, exponent))


def exact(values: Vector, seed: int = 0) -> Vector:
    """As it is."""
    return values


def measured_of(
    sizes: Sizes,
    gradient: Vector | None = None,
    *,
    weight: Weight | None = None,
    parts: Vector | None = None,
    elements: int = 40,
    parameters: Sequence[int] | None = None,
    rounding: Callable[[Vector, int], Vector] = float32_noise,
    whole: Vector | None = None,
    **others: object,
) -> Measured:
    """A step whose gradient on every rank is ``gradient`` [P] or [n, P], or else sum_k weight_k G_k."""
    parts = random_parts(sizes, elements) if parts is None else parts
    elements = parts.shape[1]
    if gradient is None:
        assert weight is not None
        weights = [weight(r, i) for r, counts in enumerate(sizes.counts) for i in range(len(counts))]
        gradient = np.array(weights) @ parts
    right = parts.sum(axis=0) / sizes.total_count if whole is None else whole
    lengths = parameters or [elements - elements // 3, elements // 3] if elements > 2 else [elements]
    fields: dict[str, object] = {
        "sizes": sizes,
        "names": tuple(f"p{index}" for index in range(len(lengths))),
        "ends": tuple(int(end) for end in np.cumsum(lengths)),
        "stepped": np.array(np.broadcast_to(rounding(gradient, 11), (sizes.world, elements))),
        "missing": ((),) * sizes.world,
        "whole": rounding(right, 12),
        "parts": rounding(parts, 13),
        "tolerance": FLOAT32,
        **others,
    }
    return Measured(**fields)  # type: ignore[arg-type]
