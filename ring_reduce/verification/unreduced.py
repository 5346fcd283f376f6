"""Ranks that step with different gradients: what each of them has, and which reduction would repair it."""

from __future__ import annotations

import numpy as np

from ring_reduce.verification.measured import Vector
from ring_reduce.verification.patterns import own_patterns
from ring_reduce.verification.verdict import Case, Finding, Verdict, listed
from ring_reduce.verification.weighting import weights_among
from ring_reduce.verification.yardstick import Mask


def ranks_differ(case: Case) -> Finding | None:
    """NOT_REDUCED if the ranks' own micro-batches explain the difference, UNKNOWN if nothing does."""
    if not case.differing.any():
        return None
    names = [name for name, where in case.spans.items() if case.differing[where].any()]
    where = np.zeros(len(case.differing), np.bool_)
    for name in names:
        where[case.spans[name]] = True
    here = "" if len(names) == len(case.spans) else f" for {listed(names)}"
    text = f"the ranks step with different gradients{here}"
    remedy = _repair(case, where)
    if here:
        remedy += "; see whether DDP ignores these parameters, or they were used after the reduction"
    own = _own(case, where) or _added_after(case, where)
    if own is None:
        text += f", and their own micro-batches do not explain it{_factors(case)}"
        return Finding(Verdict.UNKNOWN, f"{text}; {remedy}", remedy)
    return Finding(Verdict.NOT_REDUCED, f"{text}: {own}; {remedy}", remedy)


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


def _added_after(case: Case, where: Mask) -> str | None:
    """Micro-batches that weigh otherwise on their own rank than on the others: they came after the reduction."""
    owner, ranks, stepped = _owner(case), range(case.sizes.world), case.measured.stepped
    everything = np.ones(len(owner), np.bool_)
    weights = [weights_among(case.yardstick, stepped[rank], everything, where) for rank in ranks]
    found = np.array([w for w in weights if w is not None])
    if len(found) < len(ranks):
        return None
    odd: list[str] = []
    for k, rank in enumerate(owner):
        others = np.delete(found[:, k], rank)
        if abs(found[rank, k] - others.mean()) > 0.1 * np.abs(found).max():
            odd.append(f"micro-batch {k - int(np.argmax(owner == rank))} of rank {rank}")
    if not 0 < len(odd) < len(owner):
        return None
    return f"of other weight on its own rank, as if added after the reduction: {listed(odd)}"


def _factors(case: Case) -> str:
    """How the ranks' gradients compare with rank 0's, if they are multiples of it."""
    first, others = case.gradient, case.measured.stepped[1:]
    square = float(first @ first)
    if square == 0 or not case.yardstick.proves(1):
        return ""
    size = float(np.linalg.norm(first) / np.linalg.norm(case.yardstick.magnitude))
    found = [float(other @ first) / square for other in others]
    pairs = zip(found, others, strict=True)
    if not all(case.yardstick.agree(other, f * first, 2 * size * max(abs(f), 1)) for f, other in pairs):
        return ""
    said = listed(f"{f:.4g} (rank {rank})" for rank, f in enumerate(found, start=1))
    return f": they are multiples of rank 0's, {said}, as if each rank scaled or clipped its own"


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
