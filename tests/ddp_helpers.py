"""A model under DDP with the ring's hook, beside one process that holds the whole batch."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr
from launch import Seat

FEATURES = 12

# Gloo's destructor joins its threads while it holds the GIL, which a thread that lets go of a tensor wants: now and
# then it would hang at once after a job. Some jobs later the threads are idle.
_recent_groups: deque[Any] = deque(maxlen=3)


@contextlib.contextmanager
def group(seat: Seat) -> Iterator[rr.Ring]:
    """A Gloo group, which DDP wants for its start, and the ring of it."""
    path = seat.directory / f"gloo {seat.job}"
    if len(_recent_groups) == _recent_groups.maxlen:
        _recent_groups.popleft()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=seat.rank, world_size=seat.world)
    _recent_groups.append(dist.group.WORLD)
    try:
        with rr.Ring.from_group(timeout=60) as ring:
            yield ring
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    """Several layers, so that small buckets make several."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 40, dtype=dtype)
        self.second = nn.Linear(40, 60, dtype=dtype)
        self.third = nn.Linear(60, 60, dtype=dtype)
        self.last = nn.Linear(60, 1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x))).tanh()
        outputs: torch.Tensor = self.last(x + self.third(x).tanh())[:, 0]
        return outputs


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net(dtype)


def wrap(net: nn.Module, **options: Any) -> DistributedDataParallel:
    """DDP with buckets of 4 KB."""
    return DistributedDataParallel(net, **{"bucket_cap_mb": 0.004, **options})


def batch_of(rank: int, step: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, FEATURES, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(outputs: torch.Tensor, divisor: float) -> torch.Tensor:
    return (outputs - 0.5).square().sum() / divisor


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().clone().double() for p in model.parameters() if p.grad is not None]


def largest_difference(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative to the largest gradient."""
    assert len(got) == len(expected)
    scale = max(float(e.abs().max()) for e in expected)
    return max(float((g - e).abs().max()) for g, e in zip(got, expected, strict=True)) / scale


def whole_batch_gradients(net: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the mean of the losses over all batches, in this process alone."""
    net.zero_grad()
    loss_of(torch.cat([net(batch) for batch in batches]), sum(map(len, batches))).backward()
    return gradients(net)
