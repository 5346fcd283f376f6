"""Wrong: each rank takes the mean over its own samples, and the means are summed over the ranks. n.

    ring-reduce verify examples/verify/wrong_summed_local_means.py --world 2 --micro-batches 3

Right would be rr.MEAN, or rr.WEIGHTED_MEAN with the number of samples where that differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ddp_accumulation import Batch, batches, losses, model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr
from ring_reduce.verification import Job

__all__ = ["batches", "losses", "model", "step"]


def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    ddp = DistributedDataParallel(model)
    with rr.Ring.from_group() as ring:
        rr.attach(ddp, ring, rr.SUM)
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        losses(ddp, (inputs, targets)).mean().backward()
