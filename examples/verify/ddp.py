"""Right: DistributedDataParallel averages over the ranks, which fits the mean over a local batch if all are equal.

ring-reduce verify examples/verify/ddp.py --world 2 --micro-batches 1
"""

from __future__ import annotations

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
    """One backward; more than one micro-batch is put together first."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    ddp = DistributedDataParallel(model)
    loss = losses(ddp, (inputs, targets)).mean()
    loss.backward()
    return loss.item()
