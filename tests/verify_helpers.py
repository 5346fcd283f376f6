"""Small models, data and steps for the tests of verify, and verify itself on the ranks of a team."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ring_reduce as rr
from ddp_helpers import group, wrap
from launch import Seat
from ring_reduce.verification import Job
from ring_reduce.verification.report import Report

FEATURES = 6
IGNORED = -100.0

Batch = tuple[Tensor, Tensor]
Counts = Sequence[Sequence[int]]  # by rank and micro-batch
Step = Callable[[nn.Module, Sequence[Any], Job], Any]
Losses = Callable[[nn.Module, Any], Tensor]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 1, dtype=dtype), nn.Flatten(0)
    )


def make_batch(
    rank: int, index: int, count: int, *, ignored: int = 0, dtype: torch.dtype = torch.float64
) -> Batch:
    """``count`` samples that count and ``ignored`` ones behind them, whose target is IGNORED."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    inputs = torch.randn(count + ignored, FEATURES, generator=generator, dtype=torch.float64)
    targets = inputs.square().sum(1) + rank
    targets[count:] = IGNORED
    return inputs.to(dtype), targets.to(dtype)


def batches_of(counts: Counts, rank: int, *, samples: int | None = None) -> list[Batch]:
    """Micro-batches with these counts; filled up to ``samples`` with ignored ones, which then are tokens."""
    return [
        make_batch(rank, index, count, ignored=0 if samples is None else samples - count)
        for index, count in enumerate(counts[rank])
    ]


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    """One for each sample that is not ignored."""
    inputs, targets = batch
    counted = targets != IGNORED
    values: Tensor = (model(inputs) - targets)[counted].square()
    return values


def sum_gradients(model: nn.Module, divisor: float = 1.0) -> None:
    """The sum over ranks, by Gloo, divided by ``divisor``."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
        parameter.grad /= divisor


@dataclass(frozen=True)
class Scaled:
    """A step that is wrong by its divisors: each micro-batch's sum is divided by ``divisor(its count)``.

    The ranks' gradients are then averaged, by DDP where there are ranks.
    """

    divisor: Callable[[int, Job], float]

    def __call__(self, model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        ddp: Any = wrap(model) if job.world > 1 else model
        for batch in batches:
            last = batch is batches[-1]
            with contextlib.nullcontext() if last or job.world == 1 else ddp.no_sync():
                values = losses_of(ddp, batch)
                (values.sum() / self.divisor(len(values), job)).backward()


def right_step(model: nn.Module, batches: Sequence[Any], job: Job) -> None:
    """Sums and counts over micro-batches and ranks, and one division."""
    count = torch.zeros(())
    for batch in batches:
        values = losses_of(model, batch)
        count += len(values)
        if len(values):
            values.sum().backward()
    if dist.is_initialized():
        dist.all_reduce(count)
    sum_gradients(model, float(count))


@contextlib.contextmanager
def ranks(seat: Seat) -> Iterator[rr.Ring]:
    """A process group and a ring; with one rank a ring alone."""
    if seat.world > 1:
        with group(seat) as ring:
            yield ring
    else:
        with rr.Ring(rank=0, world=1) as ring:
            yield ring


def check(counts: Counts, step: Step, seat: Seat, *, samples: int | None = None, **options: Any) -> Report:
    """verify on this rank of a group that is there, with the usual model and losses."""
    return rr.verify(make_model(), batches_of(counts, seat.rank, samples=samples), losses_of, step, **options)
