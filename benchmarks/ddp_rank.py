"""What one rank of ``bench ddp`` does: all contenders side by side, their steps interleaved, then the checks."""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import ring_reduce as rr
from ring_reduce.demo.data import Digits

from .alignment import Alignment, aligned
from .ddp_check import check
from .ddp_result import Trained
from .ddp_trainer import CONTENDERS, REDUCERS, Groups, Reducer, Trainer, why_absent
from .ddp_workloads import WORKLOADS, Batch
from .interleave import TimedCall, run_rounds
from .summary import LEAST_ROUNDS, Times, slowest_rank

WARM_UP_ROUNDS = 3  # DDP lays out its buckets anew after the first step
TIMEOUT_SECONDS = 300.0  # longer than a rank lets the others wait, with room for imports from a cold disk


@dataclass(frozen=True)
class Job:
    """What every rank is given. ``batch`` and ``steps`` override what each network comes with."""

    world: int
    port: int  # of the store in which the ranks meet
    device: str  # cpu or cuda
    threads: int
    workloads: tuple[str, ...]
    batch: int | None
    steps: int | None
    digits: Digits | None


def run_rank(rank: int, job: Job, say: Callable[[str], None]) -> list[Trained]:
    """Joins the groups, trains and checks each network; every rank returns the same."""
    return run_rank_with(REDUCERS, rank, job, say)


def run_rank_with(
    reducers: Mapping[str, Reducer], rank: int, job: Job, say: Callable[[str], None]
) -> list[Trained]:
    """As ``run_rank``, with the reducers that these names stand for."""
    torch.set_num_threads(job.threads)
    store = _join(rank, job)
    nccl = None
    if job.device == "cuda":
        torch.cuda.set_device(rank)
        nccl = dist.new_group(backend="nccl")
    with rr.Ring.from_group(timeout=TIMEOUT_SECONDS) as ring:
        groups = Groups(ring, nccl)
        alignment = aligned(
            dist.PrefixStore("alignment", store), rank=rank, world=job.world, timeout=TIMEOUT_SECONDS
        )
        found = []
        for name in job.workloads:
            say(f"{name}: {', '.join(CONTENDERS[job.device])}")
            found.append(_train(name, reducers, rank, job, groups, alignment))
        return found


def _join(rank: int, job: Job) -> dist.Store:
    """Makes the rank a member of a Gloo group, torch's default one; returns the store of all ranks."""
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timeout)
    # A host name that resolves to nothing, as in some containers, would keep Gloo from starting.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    prefixed = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=job.world, timeout=timeout)
    return store


def _train(
    name: str, reducers: Mapping[str, Reducer], rank: int, job: Job, groups: Groups, alignment: Alignment
) -> Trained:
    workload = WORKLOADS[name]
    batch, steps = job.batch or workload.batch, job.steps or workload.steps
    absent = {each: why_absent(each, groups, job.device) for each in CONTENDERS[job.device]}
    start = workload.build().to(job.device)
    trainers = {
        each: Trainer(copy.deepcopy(start), reducers[each], groups) for each, why in absent.items() if not why
    }
    batches = workload.batches(rank, batch, job.device, job.digits)
    burst = max(1, min(workload.burst, steps // LEAST_ROUNDS))
    times = run_rounds(
        {each: _timed_step(trainer, batches, alignment) for each, trainer in trainers.items()},
        rounds=-(-steps // burst),
        burst=burst,
        seed=len(name),
        warm_up_rounds=WARM_UP_ROUNDS,
    )
    return Trained(
        workload=name,
        text=workload.text,
        parameters=sum(p.numel() for p in start.parameters()),
        gradient_bytes=sum(p.numel() * p.itemsize for p in start.parameters()),
        world=job.world,
        batch=batch,
        threads=job.threads,
        times={each: _of_slowest_rank(mine) for each, mine in times.items()},
        checks=check(trainers, start, batches[0]),
        absent={each: why for each, why in absent.items() if why},
    )


def _timed_step(trainer: Trainer, batches: list[Batch], alignment: Alignment) -> TimedCall:
    """One aligned step after another, each contender through the same batches in the same order."""
    turns = itertools.cycle(batches)
    synchronize: Callable[[], None] = torch.cuda.synchronize if batches[0][0].is_cuda else lambda: None

    def step() -> int:
        batch = next(turns)
        synchronize()
        alignment.align()
        start_ns = time.perf_counter_ns()
        trainer.step(batch)
        synchronize()
        return time.perf_counter_ns() - start_ns

    return step


def _of_slowest_rank(mine: Times) -> Times:
    ranks = [torch.empty(mine.shape, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.from_numpy(mine))
    return slowest_rank(np.stack([times.numpy() for times in ranks]))
