"""What a call has to give, in float64 and with nothing of the ring in it, and how far from that it may be."""

from __future__ import annotations

import numpy as np

from ring_reduce.normalization import Kind

from .plan import CallPlan
from .tensors import Values, values_of

# Largest relative error of one rounding, and the smallest positive number.
_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_TINY = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


def problem_of(plan: CallPlan, world: int, member: int, got: Values) -> str | None:
    """What is wrong with a member's result; None if nothing is."""
    if plan.operation == "all_gather":
        return _first_difference(got, np.concatenate([values_of(plan, each) for each in range(world)]))
    part = slice(None)
    if plan.operation == "reduce_scatter":
        length = plan.elements // world
        part = slice(member * length, (member + 1) * length)
    if plan.dtype.startswith("int"):
        total = np.zeros(plan.elements, np.int64)
        for each in range(world):
            total += values_of(plan, each)  # wraps, as the ring does
        return _first_difference(got, total.astype(plan.dtype).astype(np.int64)[part])
    expected, bound = expectation(plan, world)
    return _first_outside(got, expected[part], bound[part])


def expectation(plan: CallPlan, world: int) -> tuple[Values, Values]:
    """The result in float64, and how far from it a right one may be: by element, from the type and the ranks.

    Each of n ranks adds a rounded product and a sum, and for 16-bit floats a rounding on the wire; the end rounds a
    divisor, a quotient and the result. The reference itself rounds as often in float64, hence twice. What underflows
    on the way counts with the smallest number.
    """
    kind = plan.normalization.kind
    counts = plan.counts if plan.counts is not None else (1.0,) * world
    total, magnitude = np.zeros(plan.elements), np.zeros(plan.elements)
    with np.errstate(invalid="ignore"):
        for each, count in enumerate(counts):
            if count == 0:  # left out, whatever it holds
                continue
            values = values_of(plan, each) * (count if kind is Kind.WEIGHTED_MEAN else 1.0)
            total += values
            magnitude += np.abs(values)
        divisor = plan.normalization.divisor(world, sum(counts))
        if divisor == 0:
            return np.zeros(plan.elements), np.zeros(plan.elements)
        wide = _UNIT["float64" if plan.dtype == "float64" else "float32"]
        narrow = _UNIT[plan.dtype] if plan.dtype in ("float16", "bfloat16") else 0.0
        relative = 2 * (2 * world + 3) * wide + 1.01 * (world + 1) * narrow
        smallest = 2 * world * _TINY[plan.dtype] * max(1.0, 2 * world / divisor)
        return total / divisor, relative * magnitude / divisor + smallest


def _first_outside(got: Values, expected: Values, bound: Values) -> str | None:
    if got.shape != expected.shape:
        return f"it has {got.size} elements and should have {expected.size}"
    finite = np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        near = np.abs(got - expected) <= bound
    right = np.where(finite, near, (got == expected) | (np.isnan(got) & np.isnan(expected)))
    return _told(right, got, expected)


def input_problem_of(plan: CallPlan, member: int, found: Values) -> str | None:
    """Whether a call out of place has left its input alone."""
    problem = _first_difference(found, values_of(plan, member))
    return None if problem is None else f"its input has changed: {problem}"


def _first_difference(got: Values, expected: Values) -> str | None:
    if got.shape != expected.shape:
        return f"it has {got.size} elements and should have {expected.size}"
    same = (got == expected) | ((got != got) & (expected != expected))
    return _told(same, got, expected)


def _told(right: Values, got: Values, expected: Values) -> str | None:
    if right.all():
        return None
    first = int(np.argmin(right))
    wrong = int(right.size - np.count_nonzero(right))
    return (
        f"{wrong} of {right.size} elements are wrong: the first, number {first}, is {got[first]!r} and should be "
        f"{expected[first]!r}"
    )
