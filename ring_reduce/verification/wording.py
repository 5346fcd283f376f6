"""Factors, weights and suspects in the sentences of a finding."""

from __future__ import annotations

import math

from . import factors
from .effects import meaning
from .measured import Measured
from .verdict import Case, listed
from .weighting import Weighting, describe
from .yardstick import Scale


def factor_in_words(case: Case, scale: Scale) -> tuple[tuple[str, ...], str, str]:
    """The names of a factor; ``0.125 = 1/n (n = 8): mistake; remedy``; the remedy alone."""
    found = scale.factor
    if found == 0:
        remedy = "see that the gradient is read after backward and before zero_grad"
        return (), f"zero, and should not be; {remedy}", remedy
    names = [name for name in case.named(scale) if name.symbol != "1"]
    words, meanings = [str(name) for name in names], [meaning(name.symbol) for name in names]
    hint = factors.divisor_of_world(found, case.sizes, scale.within)
    if hint is not None and (not names or names[0].symbols > 1):
        words.append(hint[0])
        meanings.append((hint[1], "divide by the number of ranks that hold different data"))
    number = _number(found, case.measured.tolerance)
    if not meanings:
        remedy = _unnamed_remedy(found, case.measured.tolerance)
        return (), f"{number} times the right one, and no product of the sizes; {remedy}", remedy
    equal = " = ".join([number, *(word for word in words if word != "-1")])
    said = [f"{mistake}{' ' if mistake.endswith('?') else '; '}{remedy}" for mistake, remedy in meanings]
    remedy = "; or ".join(remedy for _, remedy in meanings)
    return tuple(words), f"{equal}: {'either ' if len(said) > 1 else ''}{'; or '.join(said)}", remedy


def _number(factor: float, tolerance: float) -> str:
    """As many digits as mean something."""
    if abs(factor) >= 1e4 or abs(factor - 1) < 1e-3:
        return f"{factor:.7g}"
    return f"{factor:.4g}" if tolerance < 1e-3 else f"{factor:.3g}"


def _unnamed_remedy(factor: float, tolerance: float) -> str:
    power = math.log2(abs(factor))
    if power > 1 and math.isclose(power, round(power), abs_tol=tolerance):
        return "look for a power of two that is left in, such as GradScaler's scale: unscale before the step"
    return (
        "return before clip_grad_norm_, if the step clips; else look for a number that the loss or the gradient is "
        "multiplied by"
    )


def apart(names: tuple[str, ...]) -> str:
    """How to tell names of one factor apart."""
    return (
        f"{len(names)} products come to this number; the check of a full group, or sizes without a common divisor "
        f"(n = 2, N = 3, m = 5, and k unlike n), tell them apart."
    )


def weights_in_words(case: Case, found: Weighting) -> tuple[str, str]:
    """The weights and the mistake; the remedy."""
    text, remedy = describe(found.weights, case.sizes), "let every count weigh 1/T: sums, and DIVIDE_BY_COUNT"
    if found.patterns:
        text += f": {' or '.join(f'{pattern.words}, {pattern.formula}' for pattern in found.patterns)}"
        remedy = "; or ".join(dict.fromkeys(pattern.remedy for pattern in found.patterns))
    if found.factor != 1:
        times = f"{found.factor:.4g}{''.join(f' = {name}' for name in case.named(found.factor))}"
        text += f", times {times}"
        remedy += f"; and look for what multiplies by {times}"
    if found.left_out:
        text += f"; left out (weight 0): {_places(case, found.left_out)}"
        remedy = "see that no zero_grad, no assignment and no early reduction drops them"
    return text, remedy


def _places(case: Case, left_out: tuple[tuple[int, int], ...]) -> str:
    """Ranks and micro-batches."""
    counts, out = case.sizes.counts, set(left_out)
    counted = {(r, i) for r, of_rank in enumerate(counts) for i, count in enumerate(of_rank) if count}
    if counted - out == {(r, len(of_rank) - 1) for r, of_rank in enumerate(counts) if of_rank}:
        return "all but the last micro-batch of each rank, so only the last one counts"
    ranks = range(len(counts)) if len(counts) > 1 else ()
    whole = [rank for rank in ranks if {place for place in counted if place[0] == rank} <= out]
    words = [f"rank {rank}" for rank in whole]
    return listed(words + [f"micro-batch {i} of rank {r}" for r, i in left_out if r not in whole])


def joined_in_words(constant: tuple[str, ...]) -> str:
    """What a tensor may be that is the same in all micro-batches."""
    places = listed(f"batch{path}" for path in constant)
    return (
        f"{places}: the same in all micro-batches, and as long as one of them, so it is ambiguous: it was taken for "
        f"samples and joined for the whole batch; what is no sample (class weights) belongs into the model or losses()."
    )


def look_inside(measured: Measured) -> str:
    """Where samples of a batch act on each other."""
    suspects = f": {listed(measured.suspects)}" if measured.suspects else " (batch norm, in-batch negatives)"
    return f"look for something that depends on the batch inside the forward pass{suspects}"


def not_additive(measured: Measured) -> str:
    """A sentence without its end."""
    suspects = listed(measured.suspects) if measured.suspects else "batch norm, in-batch negatives"
    return f"The micro-batches by themselves give another gradient than as one batch ({suspects})"
