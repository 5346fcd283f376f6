"""What is wrong with the gradients of one step: right, a factor, a weighting or something else, and the remedy.

Questions are asked in an order, and the first that is answered gives the verdict. Every comparison is by element,
within the bound of ``yardstick.Yardstick``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ring_reduce.verification import questions
from ring_reduce.verification.effects import effects, logged_loss
from ring_reduce.verification.measured import Measured
from ring_reduce.verification.patterns import Weights
from ring_reduce.verification.unreduced import ranks_differ
from ring_reduce.verification.verdict import Case, Finding, Verdict
from ring_reduce.verification.yardstick import Yardstick

__all__ = ["Diagnosis", "ParameterLine", "Verdict", "diagnose"]

QUESTIONS: tuple[Callable[[Case], Finding | None], ...] = (
    questions.zero,
    questions.missing,
    ranks_differ,
    questions.right,
    questions.factor,
    questions.batch_dependent,
    questions.weighting,
    questions.per_parameter,
)


@dataclass(frozen=True)
class ParameterLine:
    """One parameter of a step."""

    name: str
    verdict: Verdict  # RIGHT, FACTOR, MISSING, NOT_REDUCED or NOT_FINITE of its own; else that of the whole
    factor: float | None  # of rank 0's gradient; None where none fits
    names: tuple[str, ...]  # of the factor
    difference: (
        float  # the tolerance that it takes to call every element of every rank right; inf if not finite
    )


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a step, in numbers and in words."""

    verdict: Verdict
    right: bool | None  # None: could not tell
    factor: float | None  # the gradient is this times the right one; BATCH_DEPENDENT: times sum(parts) / T
    names: tuple[str, ...]  # of the factor: "1/n (n = 8)"; all of the simplest
    weights: (
        Weights | None
    )  # of one count, by rank and micro-batch, where right is 1/T; NaN where none can be told
    text: str  # what the gradient is, why, and what to do: one sentence
    remedy: str  # what to do, once more; empty if nothing
    notes: tuple[str, ...]  # sentences that qualify the verdict
    parameters: tuple[ParameterLine, ...]
    difference: float  # the largest of the parameters
    logged: str  # a sentence on the logged loss; empty if there is none
    effects: tuple[
        str, ...
    ]  # of the factor, on Adam, on weight decay and on clipping; empty without a wrong factor


def diagnose(measured: Measured) -> Diagnosis:
    """Says what is wrong with the gradients of a step. Pure: numbers in, words out."""
    case = Case(*_computable(measured))
    finding = questions.not_finite(measured)
    if finding is None:
        answers = (question(case) for question in QUESTIONS)
        finding = next((answer for answer in answers if answer is not None), None) or questions.unknown(case)
    lines = tuple(_line(measured, case, finding.verdict, name) for name in measured.names)
    return Diagnosis(
        verdict=finding.verdict,
        right=finding.right,
        factor=finding.factor,
        names=finding.names,
        weights=finding.weights,
        text=finding.text,
        remedy=finding.remedy,
        notes=finding.notes,
        parameters=lines,
        difference=max((line.difference for line in lines), default=0.0),
        logged=logged_loss(measured),
        effects=effects(finding.factor) if finding.factor is not None and finding.factor != 1 else (),
    )


def _computable(measured: Measured) -> tuple[Measured, Yardstick]:
    """The step times a power of two, so that no square vanishes or overflows; 0 for what is not finite.

    The parameters that are finite have a line so, and neither factors nor weights change.
    """
    vectors = {name: getattr(measured, name) for name in ("stepped", "whole", "parts")}
    finite = {
        name: values if np.isfinite(values).all() else np.where(np.isfinite(values), values, 0.0)
        for name, values in vectors.items()
    }
    largest = max(float(np.max(np.abs(finite[name]), initial=0)) for name in ("whole", "parts"))
    exponent = math.frexp(largest)[1]
    scaled = replace(measured, **{name: np.ldexp(values, -exponent) for name, values in finite.items()})
    return scaled, Yardstick.of(scaled)


def _line(measured: Measured, case: Case, overall: Verdict, name: str) -> ParameterLine:
    where = case.spans[name]
    if not all(
        np.isfinite(rows[..., where]).all() for rows in (measured.stepped, measured.whole, measured.parts)
    ):
        return ParameterLine(name, Verdict.NOT_FINITE, None, (), math.inf)
    bound = case.yardstick.bound[where]
    distance = np.max(np.abs(case.measured.stepped[:, where] - case.yardstick.right[where]), axis=0)
    far = distance > bound
    allowed = np.where(bound > 0, bound, 1.0)
    difference = measured.tolerance * float(
        np.max(np.where(bound > 0, distance / allowed, np.where(far, np.inf, 0.0)), initial=0)
    )
    if overall is Verdict.ZERO:
        return ParameterLine(name, overall, None, (), difference)
    if any(name in names for names in measured.missing) and far.any():
        return ParameterLine(name, Verdict.MISSING, None, (), difference)
    if case.differing[where].any():
        return ParameterLine(name, Verdict.NOT_REDUCED, None, (), difference)
    if not far.any():
        return ParameterLine(name, Verdict.RIGHT, 1.0, ("1",), difference)
    if overall in (Verdict.WEIGHTING, Verdict.BATCH_DEPENDENT):
        return ParameterLine(name, overall, None, (), difference)
    factor = case.yardstick.factor_of(case.gradient, case.yardstick.right, where)
    if factor is None:
        return ParameterLine(name, Verdict.UNKNOWN, None, (), difference)
    return ParameterLine(name, Verdict.FACTOR, factor, tuple(map(str, case.named(factor))), difference)
