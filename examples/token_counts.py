"""A language model's loss over tokens: ignored labels, micro-batches of different lengths, one division at the end.

The loss of a micro-batch is the SUM over its tokens, its count the number of labels that are not ignored. Sums and
counts add up over micro-batches and ranks, and DIVIDE_BY_COUNT divides the one by the other. No mean of means.

    python examples/token_counts.py
    torchrun --nproc-per-node 3 examples/token_counts.py
"""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr
from launch import launch, say

VOCABULARY, MICRO_BATCHES, IGNORED = 50, 3, -100


def make_micro_batch(rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, shorter from one micro-batch to the next; all labels of the last one of rank 0 are ignored."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    tokens = torch.randint(VOCABULARY, (2, 24 // (index + 1) + rank), generator=generator)
    labels = tokens.roll(-1, 1)
    prompt = labels.shape[1] if (rank, index) == (0, MICRO_BATCHES - 1) else 1 + 3 * rank
    labels[:, :prompt] = IGNORED
    labels[:, -1] = IGNORED
    return tokens, labels


def sum_of_losses(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    model = DistributedDataParallel(copy.deepcopy(alone))

    with rr.Ring.from_group() as ring:
        state = rr.RingHookState(ring, rr.DIVIDE_BY_COUNT)
        model.register_comm_hook(state, rr.ring_hook)
        for index in range(MICRO_BATCHES):
            tokens, labels = make_micro_batch(rank, index)
            state.add_count(int((labels != IGNORED).sum()))
            # Only the last backward reduces; no_sync must hold the forward too, which is what DDP looks at.
            last = index == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                sum_of_losses(model, tokens, labels).backward()

        # One process with every micro-batch of every rank, to check against.
        batches = [make_micro_batch(r, i) for r in range(world) for i in range(MICRO_BATCHES)]
        total = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        (torch.stack([sum_of_losses(alone, *batch) for batch in batches]).sum() / total).backward()
        difference = (gradient_of(model) - gradient_of(alone)).norm() / gradient_of(alone).norm()
        say(f"{world} ranks, {MICRO_BATCHES} micro-batches each, {total} labels that count: one division")
        say(f"relative difference from one process with all of them {difference:.1e}")
        assert difference < 1e-5, f"rank {rank}: the gradient differs by {difference:.1e}"


if __name__ == "__main__":
    launch(main)
