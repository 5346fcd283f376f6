"""What one rank does, from joining the group to the report. The only module that the parent process never imports."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import ring_reduce as rr

from .cases import measure_equal, measure_unequal
from .data import Job
from .results import Result
from .timing import measure_times, measure_traffic
from .train import RankContext, local_gradient, train

# Longer than any step here takes, with room for a first import of torch from a cold disk by the last rank.
TIMEOUT_SECONDS = 180.0


def run_rank(rank: int, job: Job, say: Callable[[str], None]) -> Result:
    """Joins the group, trains, measures; every rank returns the same."""
    # Threads of one rank would compete with the other ranks for the cores.
    torch.set_num_threads(max(1, job.cores // job.world))
    # A host name that resolves to nothing, as in some containers, would keep Gloo from starting.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store_path}",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    try:
        with rr.Ring.from_group(timeout=TIMEOUT_SECONDS) as ring:
            return _run(RankContext(ring, job.digits, say), job.epochs)
    finally:
        dist.destroy_process_group()


def _run(context: RankContext, epochs: int) -> Result:
    ring, say = context.ring, context.say
    say(f"{ring.world} rank{'s' * (ring.world > 1)} joined, ring over {ring.transport}")
    training, model = train(context, epochs)

    say("measuring the gradient of each loss with each normalization, equal local batches")
    equal = measure_equal(context)
    say("the same with unequal local batches")
    unequal = measure_unequal(context)

    say("counting bytes, timing the ring beside Gloo and MEAN beside SUM")
    gradient = local_gradient(context, model)
    traffic = measure_traffic(ring, gradient)
    timings = measure_times(ring, gradient)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Result(ring.transport, parameters, training, equal, unequal, traffic, timings)
