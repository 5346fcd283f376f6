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
from ddp_helpers import wrap
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


def make_model(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Blocks under DDP."""
    return wrap(Blocks(dtype), **{"bucket_cap_mb": ONE_BLOCK_MB, **options})


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

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def loss_divisor(self, rank: int) -> int:
        """Of a rank's sum of losses: what its normalization is made for."""
        local_mean = self.normalization.kind in (Kind.MEAN, Kind.WEIGHTED_MEAN)
        if self.normalization.kind is Kind.SUM:
            return self.total
        return self.sizes[rank] if local_mean else 1

    @property
    def last(self) -> tuple[float, float]:
        """Total count and divisor that ``state.last`` has to give."""
        divisors = {Kind.SUM: 1, Kind.MEAN: len(self.sizes)}
        count = self.total if self.normalization.uses_count else 0
        return float(count), float(divisors.get(self.normalization.kind, self.total))

    def backward(self, model: Any, state: rr.RingHookState, rank: int, step: int) -> Step:
        """One step of a rank."""
        model.zero_grad()
        if self.normalization.uses_count:
            state.add_count(self.sizes[rank])
        blocks = BLOCKS if self.blocks is None else self.blocks[rank]
        outputs = model(examples(rank, step, self.sizes[rank], self.dtype), blocks)
        (outputs.sum() / self.loss_divisor(rank)).backward()
        return taken(model, state)

    def expected(self, step: int) -> list[torch.Tensor]:
        """By one process: the exact sum, divided once in float32 (float64 for float64) and rounded to the type."""
        sums = torch.zeros(BLOCKS, WIDTH, dtype=torch.float64)
        for rank, size in enumerate(self.sizes):
            own = examples(rank, step, size, torch.float64).sum(0)
            if self.blocks is not None:
                own[self.blocks[rank] :] = 0
            sums += own / size if self.normalization.kind is Kind.MEAN else own
        divisor = len(self.sizes) if self.normalization.kind is Kind.MEAN else self.total
        return quotient(sums, divisor, self.dtype)


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
