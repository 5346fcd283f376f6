"""What is wrong with the gradients of one step: right, a factor, a weighting or something else, and the remedy.

Questions are asked in an order, and the first that is answered gives the verdict. Every comparison is by element,
within the bound of ``yardstick.Yardstick``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import questions
from .effects import effects, logged_loss
from .measured import Measured, Vector
from .unreduced import ranks_differ
from .verdict import Case, Finding, Verdict, listed
from .wording import joined_in_words
from .yardstick import Yardstick

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

# What is said about a step whose whole batch may have been put together wrongly.
OF_THE_WHOLE = (
    Verdict.FACTOR,
    Verdict.WEIGHTING,
    Verdict.PER_PARAMETER,
    Verdict.BATCH_DEPENDENT,
    Verdict.UNKNOWN,
)

# Of a gradient's largest element: a square has twice that, and the type ends at 1024.
LARGE_EXPONENT = 200


@dataclass(frozen=True)
class ParameterLine:
    """One parameter of a step."""

    name: str
    verdict: Verdict  # RIGHT, FACTOR, MISSING, NOT_REDUCED, NOT_FINITE or UNTOLD of its own; else that of the whole
    factor: float | None  # of rank 0's gradient; None where none fits
    names: tuple[str, ...]  # of the factor
    difference: float  # of any rank: max|g - right| / max|right|; inf if not finite


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Finding):
    """The verdict on a step, in numbers and in words."""

    parameters: tuple[ParameterLine, ...]
    difference: float  # the largest of the parameters
    logged: str  # a sentence on the logged loss; empty if there is none
    effects: tuple[str, ...]  # of a wrong factor, on Adam, on weight decay and on clipping; else empty


def diagnose(measured: Measured) -> Diagnosis:
    """Says what is wrong with the gradients of a step. Pure: numbers in, words out."""
    case = Case(*_computable(measured))
    finding = questions.not_finite(measured)
    if finding is None:
        answers = (question(case) for question in QUESTIONS)
        finding = next((answer for answer in answers if answer is not None), None) or questions.unknown(case)
    if finding.right is not None and finding.verdict is not Verdict.NOT_FINITE:
        finding = _qualified(measured, case, finding)
    lines = tuple(_line(measured, case, finding.verdict, name) for name in measured.names)
    return Diagnosis(
        **vars(finding),
        parameters=lines,
        difference=max((line.difference for line in lines), default=0.0),
        logged=logged_loss(measured),
        effects=effects(finding.factor) if finding.factor is not None and finding.factor != 1 else (),
    )


def _qualified(measured: Measured, case: Case, finding: Finding) -> Finding:
    """The finding, unless what was given to the step can't show whether it holds; with what could not be told."""
    notes = list(finding.notes)
    blank = [name for name, where in case.spans.items() if case.blank(where)]
    if blank:
        notes.append(f"Nothing could be told for {listed(blank)}: the reference gradient is zero there.")
    if finding.right and measured.twins is not None:
        ranks = f"ranks {measured.twins[0]} and {measured.twins[1]}"
        remedy = "give each rank its own"
        text = f"{ranks} have the same data, so a missing reduction can't be seen; {remedy}"
        return Finding(Verdict.UNTOLD, text, remedy, right=None, notes=tuple(notes))
    if measured.constant and finding.verdict in OF_THE_WHOLE:
        notes.append(joined_in_words(measured.constant))
        return replace(finding, right=None, notes=tuple(notes))
    return replace(finding, notes=tuple(notes))


def _computable(measured: Measured) -> tuple[Measured, Yardstick]:
    """The step, times a power of two where a square could vanish or overflow; 0 for what is not finite.

    The parameters that are finite have a line so, and neither factors nor weights change.
    """
    vectors = {name: getattr(measured, name) for name in ("stepped", "whole", "parts")}
    finite: dict[str, Any] = {
        name: values if np.isfinite(values).all() else np.where(np.isfinite(values), values, 0.0)
        for name, values in vectors.items()
    }
    largest = max(float(np.max(np.abs(finite[name]), initial=0)) for name in ("whole", "parts"))
    exponent = math.frexp(largest)[1]
    if abs(exponent) > LARGE_EXPONENT:  # else not copied
        finite = {name: np.ldexp(values, -exponent) for name, values in finite.items()}
        finite["smallest"] = math.ldexp(measured.smallest, -exponent)
    computable = replace(measured, **finite)
    return computable, Yardstick.of(computable)


def _relative(distance: Vector, right: Vector) -> float:
    """The largest distance, as a share of the largest element: 0.5 for half of the right gradient."""
    most, largest = float(np.max(distance, initial=0)), float(np.max(np.abs(right), initial=0))
    if largest == 0:
        return math.inf if most else 0.0
    return most / largest


def _line(measured: Measured, case: Case, overall: Verdict, name: str) -> ParameterLine:
    where = case.spans[name]
    if not all(
        np.isfinite(rows[..., where]).all() for rows in (measured.stepped, measured.whole, measured.parts)
    ):
        return ParameterLine(name, Verdict.NOT_FINITE, None, (), math.inf)
    distance = case.distance(where)
    far = distance > case.yardstick.bound[where]
    difference = _relative(distance, case.yardstick.right[where])
    if overall is Verdict.ZERO:
        return ParameterLine(name, overall, None, (), difference)
    if any(name in names for names in measured.missing) and far.any():
        return ParameterLine(name, Verdict.MISSING, None, (), difference)
    if case.differing[where].any():
        return ParameterLine(name, Verdict.NOT_REDUCED, None, (), difference)
    if case.blank(where):
        return ParameterLine(name, Verdict.UNTOLD, None, (), difference)
    scale = case.yardstick.factor_of(case.gradient, case.yardstick.right, where)
    factor_too = overall is Verdict.FACTOR and scale is not None and scale.apart(1.0)
    if not far.any() and not factor_too:
        return ParameterLine(name, Verdict.RIGHT, 1.0, ("1",), difference)
    if overall in (Verdict.WEIGHTING, Verdict.BATCH_DEPENDENT, Verdict.UNTOLD):
        return ParameterLine(name, overall, None, (), difference)
    if scale is None:
        return ParameterLine(name, Verdict.UNKNOWN, None, (), difference)
    names = tuple(map(str, case.named(scale)))
    return ParameterLine(name, Verdict.FACTOR, scale.factor, names, difference)
