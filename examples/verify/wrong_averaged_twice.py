"""Wrong: the loss is divided by the global batch, and DistributedDataParallel averages over the ranks again. 1/n.

    ring-reduce verify examples/verify/wrong_averaged_twice.py --world 2 --micro-batches 3

Right would be a local mean, or a hook that only sums (rr.SUM).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ddp_accumulation import Batch, batches, losses, model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ring_reduce.verification import Job

__all__ = ["batches", "losses", "model", "step"]


def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    ddp = DistributedDataParallel(model)
    global_batch = job.world * sum(len(inputs) for inputs, _ in batches)
    for batch in batches:
        last = batch is batches[-1]
        with contextlib.nullcontext() if last else ddp.no_sync():
            (losses(ddp, batch).sum() / global_batch).backward()
