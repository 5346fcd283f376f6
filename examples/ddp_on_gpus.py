"""DDP on GPUs: the hook reduces on a stream of its own, beside backward, and the counts never leave the device.

The number of labels that count is only known on the GPU; to print it would make the host wait for the device. Without a
GPU the same lines run on the CPU.

    python examples/ddp_on_gpus.py
    torchrun --nproc-per-node 2 examples/ddp_on_gpus.py

With a GPU for each rank, a job of your own may as well make its group with backend "nccl".
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr
from launch import launch, say

CLASSES, FEATURES, IGNORED, STEPS = 10, 16, -100, 5


def device_of_rank() -> torch.device:
    """This rank's GPU, which several may share; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def make_batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """32 inputs and labels, of which a part is ignored: more on higher ranks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(32, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (32,), generator=generator)
    labels[torch.rand(32, generator=generator) < rank / (rank + 2)] = IGNORED
    return inputs.to(device), labels.to(device)


def sum_of_losses(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs), labels, ignore_index=IGNORED, reduction="sum")


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    rank, world, device = dist.get_rank(), dist.get_world_size(), device_of_rank()
    torch.manual_seed(0)  # the same first weights everywhere
    alone = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES)).to(device)
    model = DistributedDataParallel(copy.deepcopy(alone))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)

    with rr.Ring.from_group(device=device) as ring:
        state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
        for step in range(STEPS):
            inputs, labels = make_batch(step, rank, device)
            optimizer.zero_grad()
            state.add_count((labels != IGNORED).sum())  # a tensor on the device
            sum_of_losses(model, inputs, labels).backward()

            # One process with the batches of all ranks, to check against.
            batches = [make_batch(step, r, device) for r in range(world)]
            all_inputs, all_labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer_alone.zero_grad()
            cross_entropy(alone(all_inputs), all_labels, ignore_index=IGNORED).backward()
            difference = float((gradient_of(model) - gradient_of(alone)).norm() / gradient_of(alone).norm())
            say(f"step {step}: relative difference from one process with all batches {difference:.1e}")
            assert difference < 1e-5, f"rank {rank}, step {step}: the gradient differs by {difference:.1e}"
            optimizer.step()
            optimizer_alone.step()
        say(f"{world} ranks on {device.type}, over {ring.transport}: every step is that of one process")


if __name__ == "__main__":
    launch(main)
