"""Wrong at the end of an epoch only: divided by the planned number of micro-batches, whatever the group has. k/N.

    ring-reduce verify examples/verify/wrong_short_group.py --world 2 --micro-batches 3

Right with all 3 micro-batches, and 2/3 of the right gradient in the short group of 2. Right is ddp_accumulation.py, or
dropping the rest.
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
            (losses(ddp, batch).mean() / job.micro_batches).backward()
