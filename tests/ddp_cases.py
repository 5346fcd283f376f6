"""Exact DDP steps: a model whose gradients are integers, so that every divisor is seen to the bit.

The gradient of a block is the sum of its examples. With small integers, local batches that are powers of two and one
division at the end, no sum rounds, in any order and any type: what a rank gets has to be the very quotient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import ring_reduce as rr
from conftest import Run
from ddp_helpers import group, wrap
from launch import Seat
from ring_reduce.normalization import Kind, Normalization

BLOCKS = 5
WIDTH = 300
ONE_BLOCK_MB = 0.0005  # less than any block, so that rebuilt buckets hold one block each


class Blocks(nn.Module):
    """A sum of linear terms, one of each block; ``blocks`` of them are used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(WIDTH, dtype=dtype) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, blocks: int = BLOCKS) -> torch.Tensor:
        terms = [x[:, block] @ self.weights[block] for block in range(blocks)]
        return torch.stack(terms).sum(0)


def make_model(dtype: torch.dtype = torch.float32, frozen: Sequence[int] = (), **options: Any) -> Any:
    """Blocks under DDP; those that are ``frozen`` take no gradient."""
    net = Blocks(dtype)
    for block in frozen:
        net.weights[block].requires_grad_(False)
    return wrap(net, **{"bucket_cap_mb": ONE_BLOCK_MB, **options})


def examples(rank: int, step: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rank's batch: integers from -4 to 4, others in every step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-4, 5, (size, BLOCKS, WIDTH), generator=generator).to(dtype)


@dataclass(frozen=True)
class Step:
    """What a backward left: the gradient of each block (None where there is none), and ``state.last``."""

    gradients: list[torch.Tensor | None]
    last: tuple[float, float, int] | None


def taken(model: Any, state: rr.RingHookState) -> Step:
    """The step just made, with copies of its gradients."""
    gradients = [None if w.grad is None else w.grad.clone() for w in model.module.weights]
    last = state.last
    return Step(gradients, None if last is None else (last.total_count, last.divisor, last.buckets))


@dataclass(frozen=True)
class Case:
    """Batches of ``sizes`` by rank, and what divides the sum of their gradients."""

    normalization: Normalization
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] | None = None  # that each rank uses; None: all
    frozen: tuple[int, ...] = ()  # blocks that take no gradient
    buckets: int = BLOCKS  # once DDP has rebuilt them

    def model(self) -> Any:
        return make_model(self.dtype, self.frozen, **self.options)

    def used(self, rank: int) -> int:
        return BLOCKS if self.blocks is None else self.blocks[rank]

    def loss_divisor(self, rank: int) -> int:
        """Of a rank's sum of losses: what its normalization is made for."""
        local_mean = self.normalization.kind in (Kind.MEAN, Kind.WEIGHTED_MEAN)
        if self.normalization.kind is Kind.SUM:
            return sum(self.sizes)
        return self.sizes[rank] if local_mean else 1

    def backward(self, model: Any, state: rr.RingHookState, rank: int, step: int) -> Step:
        """One step of a rank."""
        model.zero_grad()
        if self.normalization.uses_count:
            state.add_count(self.sizes[rank])
        outputs = model(examples(rank, step, self.sizes[rank], self.dtype), self.used(rank))
        (outputs.sum() / self.loss_divisor(rank)).backward()
        return taken(model, state)

    def last(self, active: Sequence[int] | None = None) -> tuple[float, float]:
        """Total count and divisor that ``state.last`` has to give, where the ranks ``active`` train (None: all)."""
        counted = sum(self.sizes if active is None else [self.sizes[rank] for rank in active])
        match self.normalization.kind:
            case Kind.SUM:
                return 0.0, 1.0
            case Kind.MEAN:
                return 0.0, float(len(self.sizes))
            case Kind.DIVIDE_BY:
                return 0.0, self.normalization.total
            case Kind.DIVIDE_BY_COUNT | Kind.WEIGHTED_MEAN:
                return float(counted), float(counted)

    def expected(self, step: int, active: Sequence[int] | None = None) -> list[torch.Tensor | None]:
        """By one process: the exact sum, divided once in float32 (float64 for float64) and rounded to the type."""
        ranks = range(len(self.sizes)) if active is None else active
        sums = torch.zeros(BLOCKS, WIDTH, dtype=torch.float64)
        for rank in ranks:
            own = examples(rank, step, self.sizes[rank], torch.float64).sum(0)
            own[self.used(rank) :] = 0
            sums += own / self.sizes[rank] if self.normalization.kind is Kind.MEAN else own
        # The loss has divided what SUM adds.
        divisor = sum(self.sizes) if self.normalization.kind is Kind.SUM else self.last(active)[1]
        none = {*self.frozen, *range(max(self.used(rank) for rank in ranks), BLOCKS)}
        return [None if i in none else g for i, g in enumerate(quotient(sums, divisor, self.dtype))]


def summed(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


def quotient(sums: torch.Tensor, divisor: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Exact ``sums`` divided once, by block."""
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    return list((sums.to(compute) / divisor).to(dtype))


def every_normalization(total: float) -> list[Normalization]:
    return [rr.SUM, rr.MEAN, rr.divide_by(total), rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN]


def assert_gradients(step: Step, expected: Sequence[torch.Tensor | None], what: object) -> None:
    """Equal to the bit, block by block."""
    assert len(step.gradients) == len(expected), what
    for block, (got, want) in enumerate(zip(step.gradients, expected, strict=True)):
        if got is None or want is None:
            assert got is want, f"{what}, block {block}: one is None"
        else:
            assert got.dtype == want.dtype, what
            assert torch.equal(got, want), f"{what}, block {block}: {got[:4]} and not {want[:4]}"


STEPS = 4  # DDP rebuilds its buckets after the first or the second


def train(seat: Seat, cases: list[Case]) -> list[list[Step]]:
    """All steps of all cases, each with a model of its own, over one ring."""
    results = []
    with group(seat) as ring:
        for case in cases:
            model = case.model()
            state = rr.attach(model, ring, case.normalization)
            assert state.last is None
            results.append([case.backward(model, state, seat.rank, step) for step in range(STEPS)])
    return results


def assert_trained(run: Run, world: int, cases: list[Case]) -> None:
    for rank, results in enumerate(run(world, train, cases)):
        for case, steps in zip(cases, results, strict=True):
            for step, seen in enumerate(steps):
                what = f"{case}, step {step}, rank {rank}"
                assert_gradients(seen, case.expected(step), what)
                assert seen.last is not None, what
                assert seen.last[:2] == case.last(), what
                if step > 1:  # static_graph learns its graph in the first step and rebuilds after the second
                    assert seen.last[2] == case.buckets, f"{what}: the buckets were not rebuilt"
