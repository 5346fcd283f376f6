"""The divisor's cases: what gradient comes out of DDP over the ring for each loss with each normalization."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr

from .data import split_batch
from .factors import Case, Loss, name_factor, predict_factor
from .model import WholeBatchReference, build_model, flat_gradient, sum_of_losses
from .train import RankContext

EXAMPLES_A_RANK = 24  # more than the most ranks, so that B/n is never n as well
UNEQUAL_STEP = 8  # rank r takes 8(r+1) examples: 16 ranks then take 1,088 of the 1,437

EQUAL_CASES = tuple(itertools.product((Loss.GLOBAL, Loss.LOCAL_MEAN), (rr.SUM, rr.MEAN)))
UNEQUAL_CASES = tuple(itertools.product(Loss, (rr.SUM, rr.MEAN, rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN)))


def measure_equal(context: RankContext) -> list[Case]:
    """The four cases in which every rank takes as many examples."""
    return _measure(context, [EXAMPLES_A_RANK] * context.ring.world, EQUAL_CASES)


def measure_unequal(context: RankContext) -> list[Case]:
    """The cases in which each rank takes more examples than the one before."""
    counts = [UNEQUAL_STEP * (rank + 1) for rank in range(context.ring.world)]
    return _measure(context, counts, UNEQUAL_CASES)


def _measure(
    context: RankContext, counts: Sequence[int], cases: Iterable[tuple[Loss, rr.Normalization]]
) -> list[Case]:
    ring, global_batch = context.ring, sum(counts)
    batch = np.random.default_rng(0).permutation(len(context.digits.train_labels))[:global_batch]
    model = build_model()
    reference = WholeBatchReference().gradient(model, *context.examples(batch)).double()
    measured = []
    for loss, normalization in cases:
        gradient = _reduced_gradient(context, batch, counts, loss, normalization).double()
        # The factor f that makes |gradient - f reference| least.
        factor = float(gradient.dot(reference) / reference.dot(reference))
        residual = float((gradient - factor * reference).norm() / gradient.norm())
        verdict = name_factor(factor, residual, world=ring.world, global_batch=global_batch)
        predicted = predict_factor(loss, normalization, counts)
        measured.append(Case(loss, repr(normalization), tuple(counts), factor, residual, predicted, verdict))
    return measured


def _reduced_gradient(
    context: RankContext,
    batch: np.ndarray,
    counts: Sequence[int],
    loss: Loss,
    normalization: rr.Normalization,
) -> torch.Tensor:
    """One backward pass of DDP over the ring, as a user would write it."""
    ring = context.ring
    images, labels = context.examples(split_batch(batch, counts, ring.rank))
    model = build_model()
    ddp = DistributedDataParallel(model)
    state = rr.RingHookState(ring, normalization)
    ddp.register_comm_hook(state, rr.ring_hook)
    if normalization.uses_count:
        state.add_count(len(labels))
    (sum_of_losses(ddp, images, labels) / loss.divisor(len(labels), len(batch))).backward()
    return flat_gradient(model)
