"""What one rank of ``ring-reduce trace`` does. The only module of the package that imports torch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr

from .command import Orders
from .recorder import RankTrace, Recorder

WARM_UPS = 3  # DDP cuts its buckets anew after the first
LATE_S = 0.02
LAYERS = 4
BATCH = 32
# Longer than anything here takes, with room for a first import of torch from a cold disk by the last rank.
TIMEOUT_S = 180.0

# What is traced: one call, or one step.
Work = Callable[[Recorder], None]


def run_rank(rank: int, orders: Orders, say: Callable[[str], None]) -> list[RankTrace]:
    """Joins the group, warms up, records; rank 0 returns the traces of all ranks."""
    torch.set_num_threads(1)  # the ranks share the cores
    # A host name that resolves to nothing, as in some containers, would keep Gloo from starting.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{orders.store_path}",
        rank=rank,
        world_size=orders.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    with rr.Ring.from_group(timeout=TIMEOUT_S, algorithm=orders.algorithm) as ring:
        say("tracing")
        trace = record(ring, orders, ddp_step(ring, orders) if orders.ddp else one_call(ring, orders))
        traces: list[RankTrace | None] = [None] * orders.world
        dist.gather_object(trace, traces if rank == 0 else None)
    dist.destroy_process_group()
    return [each for each in traces if each is not None]


def record(ring: rr.Ring, orders: Orders, work: Work) -> RankTrace:
    """The trace of this rank, without the call that lets the ranks begin together."""
    recorder = Recorder(ring, limit=orders.limit)
    for _ in range(WARM_UPS):
        work(recorder)
    with recorder:
        ring.all_reduce(torch.zeros(1))
        start_ns = time.monotonic_ns()
        for _ in range(orders.calls):
            work(recorder)
    return recorder.trace.since(start_ns)


def one_call(ring: rr.Ring, orders: Orders) -> Work:
    """An all_reduce in place."""
    dtype = getattr(torch, orders.dtype)
    x = torch.ones(max(1, orders.nbytes // dtype.itemsize), dtype=dtype)
    count = ring.rank + 1 if orders.normalization.uses_count else None

    def work(_: Recorder) -> None:
        _be_late(ring, orders)
        ring.all_reduce(x, orders.normalization, count=count)

    return work


def ddp_step(ring: rr.Ring, orders: Orders) -> Work:
    """A training step of a small network, whose gradients fill a bucket a layer."""
    dtype = getattr(torch, orders.dtype)
    layer_bytes = orders.nbytes / LAYERS
    width = max(1, math.isqrt(int(layer_bytes) // dtype.itemsize))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(dtype), bucket_cap_mb=layer_bytes / (1 << 20))
    state = rr.attach(model, ring, orders.normalization)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, width, dtype=dtype)

    def work(recorder: Recorder) -> None:
        optimizer.zero_grad()
        if orders.normalization.uses_count:
            state.add_count(ring.rank + 1)
        with recorder.span("forward"):
            loss = model(x).square().mean()
        _be_late(ring, orders)
        with recorder.span("backward"):
            loss.backward()
        with recorder.span("optimizer"):
            optimizer.step()

    return work


def _be_late(ring: rr.Ring, orders: Orders) -> None:
    if ring.rank == orders.late:
        time.sleep(LATE_S)
