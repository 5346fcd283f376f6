"""Wrong: the mean over the tokens of each micro-batch, then over micro-batches and ranks. No factor: weighting.

    ring-reduce verify examples/verify/wrong_mean_of_means.py --world 2 --micro-batches 3

A token of a micro-batch with few labels weighs more than one of a micro-batch with many, so that the gradient has
another direction. Right is token_language_model.py: sums and counts, divided once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from token_language_model import Batch, batches, losses, model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ring_reduce.verification import Job

__all__ = ["batches", "losses", "model", "step"]


def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    ddp = DistributedDataParallel(model)
    for batch in batches:
        last = batch is batches[-1]
        with contextlib.nullcontext() if last else ddp.no_sync():
            values = losses(ddp, batch)
            (values.sum() / max(1, len(values)) / len(batches)).backward()
