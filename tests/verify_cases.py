"""The public reports of wrong divisors, shrunk, as steps for verify. Each is named as in the table of the issue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ring_reduce.verification import Job
from verify_helpers import (
    Batch,
    Counts,
    Losses,
    Scaled,
    Step,
    batches_of,
    losses_of,
    make_model,
    sum_gradients,
)

TOKENS = 10  # positions of a micro-batch whose counts are of tokens


def total_of(counts: Counts) -> int:
    return sum(map(sum, counts))


@dataclass(frozen=True)
class Case:
    """A report: who has what, and the step that was wrong."""

    counts: Counts  # by rank and micro-batch
    step: Step
    samples: int | None = None  # positions of a micro-batch, where counts are of tokens
    planned: int | None = None  # micro-batches, where the group is short
    model: Callable[[], nn.Module] = make_model
    losses: Losses = losses_of
    batches: Callable[[int], list[Any]] | None = None  # of a rank

    def batches_of(self, rank: int) -> list[Any]:
        if self.batches is not None:
            return self.batches(rank)
        return batches_of(self.counts, rank, samples=self.samples)


def summed_over_ranks_then_divided(counts: Counts) -> Step:
    """loss / global tokens, and an engine that averages after its sum."""

    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        for batch in batches:
            (losses_of(model, batch).sum() / total_of(counts)).backward()
        sum_gradients(model, job.world)

    return step


def weight_of_one() -> nn.Module:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    return model


def four_numbers(rank: int) -> list[Tensor]:
    """x = -1, 2 on rank 0, and -3, 4 on rank 1."""
    return [torch.tensor([[-1.0], [2.0]] if rank == 0 else [[-3.0], [4.0]], dtype=torch.float64)]


def objective_is_a_sum(model: nn.Module, x: Tensor) -> Tensor:
    """verify takes the mean over all 4 samples; the report's objective is their sum."""
    values: Tensor = 4 * model(x).square().flatten()
    return values


def loss_sum_under_ddp(model: nn.Module, batches: Sequence[Tensor], job: Job) -> float:
    ddp = DistributedDataParallel(model)
    loss: Tensor = ddp(batches[0]).square().sum()
    loss.backward()
    return loss.item()


def same_on_pairs(rank: int) -> list[Batch]:
    """Ranks 0 and 1 hold the same data, 2 and 3 too: two ways of data parallelism, two of another kind."""
    return batches_of([[5], [5]], rank // 2)


def times_world_for_half_of_it(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    """Divided by the tokens of the data-parallel ranks, times world, averaged over the data-parallel ranks."""
    (losses_of(model, batches[0]).sum() / 10 * job.world).backward()
    if job.rank % 2:
        model.zero_grad()  # not of this data-parallel group; the sum below is over ranks 0 and 2
    sum_gradients(model, job.world // 2)


def right_accumulation_wrong_ranks(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    """Each rank divides by its own tokens of all micro-batches; DDP averages over the ranks."""
    own = max(1, sum(len(losses_of(model, batch)) for batch in batches))
    ddp = DistributedDataParallel(model)
    for batch in batches:
        with contextlib.nullcontext() if batch is batches[-1] else ddp.no_sync():
            (losses_of(ddp, batch).sum() / own).backward()


def batch_norm_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)]
    return nn.Sequential(*layers).double()


def sequence_parallel_left_out(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    """Each rank holds 100 of 800 tokens; divided by 800, and averaged over the ranks of the sequence."""
    (losses_of(model, batches[0]).sum() / 800).backward()
    sum_gradients(model, job.world)


TWO_RANKS = [[5, 5, 5], [5, 5, 5]]
UNEQUAL_TOKENS = [[7, 3, 1], [2, 9, 4]]

CASES: dict[str, Case] = {
    "pytorch/pytorch PR 42471": Case(
        [[2], [2]], loss_sum_under_ddp, model=weight_of_one, losses=objective_is_a_sum, batches=four_numbers
    ),
    "OpenNMT-py #2451": Case(
        UNEQUAL_TOKENS, Scaled(lambda count, job: total_of(UNEQUAL_TOKENS)), samples=TOKENS
    ),
    "sparseml PR 135": Case([[5]] * 4, Scaled(lambda count, job: count / job.world)),
    "torchtune PR 2172": Case([[7], [3]], Scaled(lambda count, job: 10), samples=TOKENS),
    "torchtune PR 2436": Case([[5]] * 4, times_world_for_half_of_it, batches=same_on_pairs),
    "Arctic-Platform PR 119": Case([[7], [3], [2], [9]], Scaled(lambda count, job: 21), samples=TOKENS),
    "DeepSpeed #4662": Case(UNEQUAL_TOKENS, summed_over_ranks_then_divided(UNEQUAL_TOKENS), samples=TOKENS),
    "prime-rl PR 1957": Case([[5], [1]], Scaled(lambda count, job: count), samples=TOKENS),
    "speculators PR 942": Case([[1], [9]], Scaled(lambda count, job: count), samples=TOKENS),
    "transformers #34242": Case([[2, 3], [1, 0]], right_accumulation_wrong_ranks, samples=TOKENS),
    "transformers PR 47261": Case([[5] * 8, [5] * 8], Scaled(lambda count, job: count)),
    "ms-swift #10117": Case([[5] * 4] * 2, Scaled(lambda count, job: count * job.micro_batches**2)),
    "DeepSpeed #7773": Case([[5] * 4] * 2, Scaled(lambda count, job: count)),
    "Megatron-DeepSpeed PR 169": Case(
        [[1, 9]], Scaled(lambda count, job: count * job.micro_batches), samples=TOKENS
    ),
    "accelerate docs recipe, short group": Case(
        [[5] * 7] * 2, Scaled(lambda count, job: count * job.micro_batches), planned=8
    ),
    "VeOmni PR 338": Case([[100]] * 8, sequence_parallel_left_out),
    "eight micro-batches of four": Case([[4] * 8] * 2, Scaled(lambda count, job: job.micro_batches)),
    "batch norm": Case(
        TWO_RANKS,
        Scaled(lambda count, job: count * job.micro_batches),
        model=batch_norm_model,
    ),
}
