"""Right: DDP and micro-batches. Divided by how many the group has, which at the end of an epoch may be fewer.

ring-reduce verify examples/verify/ddp_accumulation.py --world 2 --micro-batches 3
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ring_reduce.verification import Job

Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(rank: int, world: int, micro_batches: int) -> list[Batch]:
    """Five samples each; other ones on each rank."""
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(5, 6, generator=generator) for _ in range(micro_batches)]
    return [(x, x.square().sum(1, keepdim=True)) for x in inputs]


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """One for each sample."""
    inputs, targets = batch
    return mse_loss(model(inputs), targets, reduction="none").flatten()


def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> float:
    """The last backward reduces what all have left; no_sync must hold the forward too."""
    ddp = DistributedDataParallel(model)
    logged = 0.0
    for batch in batches:
        last = batch is batches[-1]
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = losses(ddp, batch).mean() / len(batches)
            loss.backward()
            logged += loss.item()
    return logged
