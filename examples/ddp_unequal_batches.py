"""DDP with local batches of different sizes and an ordinary mean loss: the hook weights each rank by its batch.

DDP's own averaging gives every rank the same weight, so an example of a small batch counts for more than one of a
large batch. With WEIGHTED_MEAN each example counts once, as in one process that holds the whole batch.

    python examples/ddp_unequal_batches.py
    torchrun --nproc-per-node 3 examples/ddp_unequal_batches.py
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr
from launch import launch, say

STEPS = 10


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The local batch: 3 examples on rank 0, 7 on rank 1, 11 on rank 2, ..."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(4 * rank + 3, 6, generator=generator)
    return inputs, inputs.square().sum(1, keepdim=True) + rank


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first weights everywhere
    alone = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(copy.deepcopy(alone))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.05)

    with rr.Ring.from_group() as ring:
        state = rr.RingHookState(ring, rr.WEIGHTED_MEAN)
        model.register_comm_hook(state, rr.ring_hook)
        for step in range(STEPS):
            inputs, targets = make_batch(step, rank)
            optimizer.zero_grad()
            state.add_count(len(inputs))  # before the backward that it counts
            mse_loss(model(inputs), targets).backward()

            # One process with the whole batch, to check against.
            batches = [make_batch(step, r) for r in range(world)]
            all_inputs, all_targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer_alone.zero_grad()
            mse_loss(alone(all_inputs), all_targets).backward()
            difference = (gradient_of(model) - gradient_of(alone)).norm() / gradient_of(alone).norm()
            say(f"step {step}: relative difference from one process with the whole batch {difference:.1e}")
            assert difference < 1e-5, f"rank {rank}, step {step}: the gradient differs by {difference:.1e}"
            optimizer.step()
            optimizer_alone.step()
        say(f"local batches 3 to {4 * world - 1}: every step is that of one process")


if __name__ == "__main__":
    launch(main)
