"""Ranks that step with different gradients: what each of them has, and which reduction would repair it."""

from __future__ import annotations

import numpy as np

from .measured import Vector
from .patterns import own_patterns
from .verdict import Case, Finding, Verdict, listed
from .weighting import weights_among
from .yardstick import Mask


def ranks_differ(case: Case) -> Finding | None:
    """NOT_REDUCED if the ranks' own micro-batches explain the difference, UNKNOWN if nothing does."""
    if not case.differing.any():
        return _other_factors(case)
    names = [name for name, where in case.spans.items() if case.differing[where].any()]
    where = np.zeros(len(case.differing), np.bool_)
    for name in names:
        where[case.spans[name]] = True
    here = "" if len(names) == len(case.spans) else f" for {listed(names)}"
    text = f"the ranks step with different gradients{here}"
    remedy = _repair(case, where)
    if here:
        remedy += "; see whether DDP ignores these parameters, or they were used after the reduction"
    own = _own(case, where)
    if own is None:
        text += ", and their own micro-batches do not explain it"
        return Finding(Verdict.UNKNOWN, f"{text}; {remedy}", remedy)
    return Finding(Verdict.NOT_REDUCED, f"{text}: {own}; {remedy}", remedy)


def _other_factors(case: Case) -> Finding | None:
    """UNKNOWN if a rank's factor is another than rank 0's, though no element alone is far from rank 0's."""
    first = case.scales[0]
    if first is None:
        return None
    others = [
        f"{scale.factor:.3g} times it on rank {rank}"
        for rank, scale in enumerate(case.scales)
        if scale is not None and scale.apart(first.factor, first.error)
    ]
    if not others:
        return None
    remedy = "see what scales a gradient after the reduction, and reduce last"
    text = f"the ranks step with different gradients: {first.factor:.3g} times the right one on rank 0, and "
    return Finding(Verdict.UNKNOWN, f"{text}{listed(others)}; {remedy}", remedy)


def _owner(case: Case) -> Vector:
    """[K] The rank of each micro-batch."""
    return np.repeat(np.arange(case.sizes.world), [len(counts) for counts in case.sizes.counts])


def _own(case: Case, where: Mask) -> str | None:
    """What each rank has, if it is made of the rank's own micro-batches only."""
    owner, ranks, stepped = _owner(case), range(case.sizes.world), case.measured.stepped
    for pattern in own_patterns(case.sizes):
        flat = [np.where(owner == rank, pattern.flat, 0.0) for rank in ranks]
        if all(case.yardstick.explains(flat[rank], stepped[rank], where) for rank in ranks):
            return f"each has {pattern.words} (weight {pattern.formula}), and nothing was reduced"
    alone = [r for r in ranks if weights_among(case.yardstick, stepped[r], owner == r, where) is not None]
    if len(alone) == len(ranks):
        return "each has a weighting of its own micro-batches, and nothing was reduced"
    if alone:
        return f"{listed(f'rank {rank}' for rank in alone)} has its own micro-batches only, and the others do not"
    return None


def _repair(case: Case, where: Mask) -> str:
    """The normalization that makes these gradients right."""
    stepped, counts, total = case.measured.stepped, np.array(case.sizes.rank_counts), case.sizes.total_count
    reductions = {
        "MEAN": stepped.mean(axis=0),
        "SUM": stepped.sum(axis=0),
        "WEIGHTED_MEAN with the ranks' counts": counts @ stepped / total,
        "DIVIDE_BY_COUNT": stepped.sum(axis=0) / total,
    }
    off = {name: np.abs(reduced - case.yardstick.right) for name, reduced in reductions.items()}
    right = [name for name, distance in off.items() if np.all((distance <= case.yardstick.bound)[where])]
    return f"reduce them: {' or '.join(right)} would be right" if right else "reduce them over the ranks"
