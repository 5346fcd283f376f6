"""Bytes and times: the ring beside Gloo, and MEAN beside SUM, on the gradients of the trained network.

Both sides of a pair run in turn in the same processes, in an order that changes from round to round. All ranks start a
burst of calls together, and a burst takes what its slowest rank takes. Torch and Gloo add in place, so the tensor is
refilled before each burst; that is not timed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

import ring_reduce as rr
from ring_reduce.benchmarks.summary import ratio_of_medians

from .results import Duel, Timings, Traffic

OTHER_BYTES = (1 << 10, 16 << 10, 1 << 20, 4 << 20)
WARM_UP_ROUNDS = 2
BUDGET_SECONDS, LEAST_ROUNDS = 3.0, 5  # of one pair at one size


def measure_traffic(ring: rr.Ring, gradient: Tensor) -> Traffic:
    """The payload that the ring counted in one all-reduce, from every rank."""
    x = gradient.clone()
    before = ring.stats.bytes_sent
    ring.all_reduce(x)
    sent = torch.zeros(ring.world, dtype=torch.int64)
    sent[ring.rank] = ring.stats.bytes_sent - before
    dist.all_reduce(sent)
    return Traffic(x.numel() * x.element_size(), sent.tolist())


def measure_times(ring: rr.Ring, gradient: Tensor) -> Timings:
    """Ring against Gloo at several sizes, SUM against MEAN on the gradients and at the largest size."""
    size = gradient.numel() * gradient.element_size()
    tensors = [gradient, *(_repeat_to(gradient, other) for other in OTHER_BYTES if other != size)]
    tensors.sort(key=Tensor.numel)
    return Timings(
        size,
        ring_gloo=[_ring_beside_gloo(ring, x) for x in tensors],
        sum_mean=[_sum_beside_mean(ring, x) for x in (gradient, tensors[-1])],
    )


def _repeat_to(gradient: Tensor, tensor_bytes: int) -> Tensor:
    """Real gradient values at another size."""
    count = tensor_bytes // gradient.element_size()
    return gradient.repeat(-(-count // gradient.numel()))[:count].clone()


def _ring_beside_gloo(ring: rr.Ring, source: Tensor) -> Duel:
    return _duel(ring, source, lambda x: ring.all_reduce(x), lambda x: dist.all_reduce(x), most_rounds=21)


def _sum_beside_mean(ring: rr.Ring, source: Tensor) -> Duel:
    # Many rounds, since the question is of a few percent.
    return _duel(
        ring,
        source,
        lambda x: ring.all_reduce(x, rr.SUM),
        lambda x: ring.all_reduce(x, rr.MEAN),
        most_rounds=150,
    )


def _duel(
    ring: rr.Ring,
    source: Tensor,
    left: Callable[[Tensor], object],
    right: Callable[[Tensor], object],
    *,
    most_rounds: int,
) -> Duel:
    started = time.perf_counter()
    _run_rounds(ring, source, (left, right), WARM_UP_ROUNDS)
    rounds = _agree_on_rounds((time.perf_counter() - started) / WARM_UP_ROUNDS, most_rounds)
    seconds = _run_rounds(ring, source, (left, right), rounds)
    dist.all_reduce(torch.from_numpy(seconds), op=dist.ReduceOp.MAX)  # the slowest rank's, in place
    left_us, right_us = 1e6 * seconds
    return Duel(
        source.numel() * source.element_size(),
        float(np.median(left_us)),
        float(np.median(right_us)),
        ratio_of_medians(right_us, left_us),
    )


def _agree_on_rounds(seconds_a_round: float, most: int) -> int:
    """As many rounds as fit into the budget by rank 0's clock: every rank must make the same calls."""
    fitting = int(BUDGET_SECONDS / seconds_a_round)
    rounds = torch.tensor(max(LEAST_ROUNDS, min(most, fitting)))
    dist.broadcast(rounds, src=0)
    return int(rounds)


def _run_rounds(
    ring: rr.Ring, source: Tensor, sides: Sequence[Callable[[Tensor], object]], rounds: int
) -> npt.NDArray[np.float64]:
    """Seconds a call by (side, round, 0) on this rank."""
    # A burst of sums in place grows the values by n each time: 8 calls on 16 ranks stay far from overflow.
    burst = 8 if source.numel() <= 1 << 17 else 4
    seconds = np.zeros((len(sides), rounds, 1))
    x, token = torch.empty_like(source), torch.zeros(1)
    # The collector would run in the timed part of whichever side allocates more.
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for index in (0, 1) if turn % 2 else (1, 0):
                # One call that is not timed: it pays for what the other side left in the caches and the scheduler.
                sides[index](x.copy_(source))
                x.copy_(source)
                ring.all_reduce(token)  # aligns the ranks
                start = time.perf_counter()
                for _ in range(burst):
                    sides[index](x)
                seconds[index, turn] = (time.perf_counter() - start) / burst
    finally:
        gc.enable()
    return seconds
