"""Right: a language model whose micro-batches have any number of labels that count, down to none.

Losses are summed, labels counted, and the one is divided by the other once: no mean of means.

    ring-reduce verify examples/verify/token_language_model.py --world 2 --micro-batches 3
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ring_reduce as rr
from ring_reduce.verification import Job

VOCABULARY, LENGTH, IGNORED = 31, 12, -100

Batch = dict[str, Tensor]


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))


def batches(rank: int, world: int, micro_batches: int) -> list[Batch]:
    """Five sequences each, padded to one length. The prompt grows and counts for nothing; nor does padding."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for index in range(micro_batches):
        tokens = torch.randint(VOCABULARY, (5, LENGTH), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[:, : 2 + 5 * rank + 3 * index] = IGNORED  # rank 1 has nothing left in its last micro-batch
        labels[:, -1] = IGNORED
        found.append({"tokens": tokens, "labels": labels})
    return found


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """One for each label that counts."""
    labels = batch["labels"].flatten()
    counted = labels != IGNORED
    return cross_entropy(model(batch["tokens"]).flatten(0, 1)[counted], labels[counted], reduction="none")


def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    """Divided by the labels of all micro-batches of all ranks, in the all-reduce that adds the gradients up."""
    with rr.Ring.from_group() as ring, rr.Accumulator(model, rr.DIVIDE_BY_COUNT, ring=ring) as accumulator:
        for batch in batches:
            summed = losses(model, batch)
            summed.sum().backward()
            accumulator.add(count=len(summed))
