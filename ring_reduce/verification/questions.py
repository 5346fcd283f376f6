"""The questions that lead to a verdict. Each gives a finding, or None: ask the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from .measured import Measured
from .patterns import Weights, patterns
from .verdict import Case, Finding, Verdict, listed, spans
from .wording import (
    apart,
    factor_in_words,
    look_inside,
    not_additive,
    weights_in_words,
)
from .yardstick import Scale, Yardstick

SIXTEEN_BITS = 0.09  # the tolerance of bfloat16


def not_finite(measured: Measured) -> Finding | None:
    """NaN or infinity is never right. In the reference it leaves nothing to compare with."""
    parts, stepped = (np.isfinite(rows).all(axis=0) for rows in (measured.parts, measured.stepped))
    reference = np.isfinite(measured.whole) & parts
    bad = [name for name, where in spans(measured).items() if not (reference & stepped)[where].all()]
    if not bad:
        return None
    ranks = [f"rank {r}" for r, gradient in enumerate(measured.stepped) if not np.isfinite(gradient).all()]
    places = [f"on {listed(ranks)}"] if ranks else []
    places += [] if reference.all() else ["in the reference"]
    remedy, notes = "find the first layer whose output or gradient is not finite", []
    if any(count == 0 for counts in measured.sizes.counts for count in counts):
        remedy = "sum the losses, and divide once by the total count"
        notes.append(
            "The mean of a micro-batch without counted samples or tokens is 0/0, which is NaN; its sum is 0."
        )
    text = f"gradient is NaN or infinite {' and '.join(places)}: {listed(bad)}; {remedy}"
    wrong = False if reference.all() else None
    return Finding(Verdict.NOT_FINITE, text, remedy, right=wrong, notes=tuple(notes))


def zero(case: Case) -> Finding | None:
    """Every factor of zero is zero."""
    yardstick = case.yardstick
    largest = float(np.max(np.abs(yardstick.right), initial=0))
    if 0 < largest < case.measured.smallest:
        text = "the reference gradient is subnormal, below the smallest normal number of its type, and has no digits"
        remedy = "scale the loss up in losses() and in the step"
        return Finding(Verdict.UNTOLD, f"{text}; {remedy}", remedy, right=None)
    if not case.zero:
        return None
    stepped_too = all(yardstick.agree(gradient, yardstick.right) for gradient in case.measured.stepped)
    if not stepped_too and np.any(yardstick.parts != 0):
        return None  # what cancels in the reference may show in a weighting
    text = "the reference gradient is zero, so no factor can be told"
    if not stepped_too:
        text += "; the step's gradient is not zero, so it is of another loss than losses() gives"
    remedy = "verify with another batch, or at weights where the loss has a slope"
    return Finding(Verdict.ZERO, f"{text}; {remedy}", remedy, right=None)


def missing(case: Case) -> Finding | None:
    """Parameters that only some ranks have a gradient for, or none although the reference does."""
    measured = case.measured
    alive = np.any(measured.stepped != 0, axis=0) | (np.abs(measured.whole) > case.yardstick.bound)
    lost = {
        name: [rank for rank, names in enumerate(measured.missing) if name in names]
        for name, where in case.spans.items()
        if alive[where].any() and any(name in names for names in measured.missing)
    }
    if not lost:
        return None
    if all(len(ranks) == case.sizes.world for ranks in lost.values()):
        text = f"no rank has a gradient for {listed(lost)}, and the reference does"
        remedy = "see that the loss reaches the parameter (no detach, no no_grad), and that backward has run"
    else:
        ranks = sorted({rank for of_parameter in lost.values() for rank in of_parameter})
        text = f"no gradient on {listed(f'rank {rank}' for rank in ranks)} for {listed(lost)}"
        text += ", so the ranks drift apart"
        remedy = "reduce zeros for what a rank does not use (DDP: find_unused_parameters=True)"
    return Finding(Verdict.MISSING, f"{text}; {remedy}", remedy)


def right(case: Case) -> Finding | None:
    """Within the bound, element by element."""
    yardstick, scale = case.yardstick, case.scales[0]
    if not case.right_in(slice(None)):
        return None
    counts, notes = [count for of_rank in case.sizes.counts for count in of_rank], []
    if scale is not None and scale.apart(1.0):
        names = case.named(scale)
        fits = yardstick.factor_of(case.gradient, yardstick.right) is not None
        if fits and names and names[0].symbol != "1":
            return None  # within the bound of every element, but all of them together know it better
        notes.append(f"Within the tolerance, but f = {scale.factor:.4g} fits better than 1.")
    if len(counts) > 1 and len(set(counts)) == 1:
        notes.append(
            "All micro-batches count alike here, so a mean of means is right too; verify unequal ones."
        )
    notes += [
        f"Within the tolerance it cannot be told from {pattern.words}, {pattern.formula}; verify more unequal counts."
        for pattern in patterns(case.sizes)
        if yardstick.explains(pattern.flat, case.gradient)
    ]
    if not case.additive:
        notes.append(f"{not_additive(case.measured)}; the step allows for it.")
    unit = "samples" if case.sizes.counts == case.sizes.samples else "counted tokens"
    text = f"gradient is right: that of the mean loss over all {case.sizes.total_count} {unit}"
    return Finding(Verdict.RIGHT, text, right=True, factor=1.0, names=("1",), notes=tuple(notes))


def factor(case: Case) -> Finding | None:
    """One number times the right gradient."""
    yardstick = case.yardstick
    found = None if case.zero else yardstick.factor_of(case.gradient, yardstick.right)
    if found is None:
        return None
    names, text, remedy = factor_in_words(case, found)
    proved = yardstick.proves(1)
    if not (proved or names or case.additive):
        return None  # of one element, any number is a factor
    notes = [apart(names)] if len(names) > 1 else []
    if not proved:
        notes.append("So few elements cannot tell a factor from a weighting; verify a larger model.")
        notes += [
            f"As a weighting it would be {pattern.words}, {pattern.formula}; {pattern.remedy}."
            for pattern in patterns(case.sizes)
            if yardstick.explains(pattern.flat, case.gradient)
        ]
    if not case.additive:
        notes.append(f"{not_additive(case.measured)}.")
    return Finding(
        Verdict.FACTOR, f"gradient is {text}", remedy, factor=found.factor, names=names, notes=tuple(notes)
    )


def batch_dependent(case: Case) -> Finding | None:
    """The micro-batches do not add up to the whole batch: samples act on each other."""
    if case.additive:
        return None
    if _sixteen_bits(case):
        remedy = f"pass --tolerance {SIXTEEN_BITS}"
        text = f"looks like autocast or another 16-bit computation; {remedy}"
        return Finding(Verdict.UNTOLD, text, remedy, right=None)
    yardstick, names = case.yardstick, tuple[str, ...]()
    found = yardstick.factor_of(case.gradient, yardstick.average)
    factor = None if found is None else found.factor
    weights: Weights | None = None
    if yardstick.agree(case.gradient, yardstick.average):
        factor, names = 1.0, ("1",)
        said = "the gradient is right for the micro-batches by themselves, not for the whole batch"
    elif found is not None:
        names, text, _ = factor_in_words(case, found)
        said = (
            f"for the micro-batches by themselves the gradient is {text}; for the whole batch it is no factor"
        )
    elif case.weighting[0] is not None:
        weights = case.weighting[0].weights
        said = "the micro-batches by themselves are not weighted alike either: "
        said += weights_in_words(case, case.weighting[0])[0]
    else:
        said = "neither the whole batch nor the micro-batches by themselves give the gradient"
    remedy = look_inside(case.measured)
    text = f"no single factor: {remedy}; {said}"
    return Finding(Verdict.BATCH_DEPENDENT, text, remedy, factor=factor, names=names, weights=weights)


def _sixteen_bits(case: Case) -> bool:
    """Whether a tolerance of 16 bits makes all of it right, and no module is known to look at the batch."""
    if case.measured.suspects or case.measured.tolerance >= SIXTEEN_BITS:
        return False
    coarse = replace(case, yardstick=Yardstick.of(replace(case.measured, tolerance=SIXTEEN_BITS)))
    return coarse.yardstick.proves(1) and coarse.additive and coarse.right_in(slice(None))


def weighting(case: Case) -> Finding | None:
    """Counts that do not weigh alike."""
    found = case.weighting[0]
    if found is None:
        return None
    text, remedy = weights_in_words(case, found)
    text = f"weighting, not a factor: {text}; {remedy}"
    return Finding(Verdict.WEIGHTING, text, remedy, weights=found.weights)


def per_parameter(case: Case) -> Finding | None:
    """A factor for each parameter. One of a single element needs a name, or the company of a larger one."""
    yardstick, groups = case.yardstick, list[_Group]()
    for name, where in case.spans.items():
        elements = int(np.count_nonzero(np.abs(yardstick.right[where]) > yardstick.bound[where]))
        if not elements and case.right_in(where):
            continue
        found = yardstick.factor_of(case.gradient, yardstick.right, where)
        if found is None:
            return None
        tolerance = 2 * yardstick.tolerance
        near = (g for g in groups if math.isclose(found.factor, g.scale.factor, rel_tol=tolerance))
        group = next(near, None)
        if group is None:
            group = _Group(found)
            groups.append(group)
        group.parameters.append(name)
        group.proved |= elements > 1 or bool(case.named(found))
    if len(groups) < 2 or not all(group.proved for group in groups):
        return None
    said = "; ".join(f"{_equal(case, group.scale)} for {listed(group.parameters)}" for group in groups)
    remedy = (
        "look for what treats these parameters apart: tied weights, experts, hooks, or a second reduction"
    )
    text = f"no single factor, but one for each parameter: {said}; {remedy}"
    return Finding(Verdict.PER_PARAMETER, text, remedy)


def unknown(case: Case) -> Finding:
    """Wrong, and no more is known."""
    obstacle = case.weighting[1]
    off = [name for name, where in case.spans.items() if not case.right_in(where)]
    here = f" for {listed(off)}, and right for the others" if len(off) < len(case.spans) else ""
    text = f"gradient is wrong{here}: it is no factor, and no weighting of the micro-batches"
    remedy = (
        "see that the step has the same batches, no dropout, gradients that start at zero, and no clipping"
    )
    if obstacle:
        text = f"gradient is wrong{here}: it is no factor; whether it is a weighting cannot be told, since {obstacle}"
        remedy = f"verify a larger model or sample; else {remedy}"
    if case.measured.suspects:
        remedy += f"; {look_inside(case.measured)}"
    return Finding(Verdict.UNKNOWN, f"{text}; {remedy}", remedy)


@dataclass
class _Group:
    """Parameters with one factor."""

    scale: Scale
    parameters: list[str] = field(default_factory=list)
    proved: bool = False


def _equal(case: Case, scale: Scale) -> str:
    """``2 = n (n = 2)``"""
    names = (str(name) for name in case.named(scale) if name.symbol != "1")
    return " = ".join([f"{scale.factor:.4g}", *names])
