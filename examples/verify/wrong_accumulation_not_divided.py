"""Wrong: the means of the micro-batches are added up and never divided by their number. N.

    ring-reduce verify examples/verify/wrong_accumulation_not_divided.py --world 2 --micro-batches 3

Right is ddp_accumulation.py.
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
    for batch in batches:
        last = batch is batches[-1]
        with contextlib.nullcontext() if last else ddp.no_sync():
            losses(ddp, batch).mean().backward()
