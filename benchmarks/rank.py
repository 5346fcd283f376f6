"""One rank of a benchmark, however it was started: connects all peers, measures every size, hands in what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore

from .alignment import StoreBarrier, aligned
from .measurement import Exchange, Measurement, Report
from .peers import Peer, Place, peer_class
from .plan import Case, Plan
from .timing import Timing
from .watch import Watch

GRACE_SECONDS = (
    2.0  # after those that wait for it have said so a rank that hangs ends; before others would end it
)


def run_rank(
    rank: int, world: int, local_rank: int, store: Any, plan: Plan, show: Callable[[str], None]
) -> Report | None:
    """All measurements on rank 0, None on the others. ``show`` is told what the rank is at.

    torch runs one thread a rank: its threads would compete with the other ranks for the cores. A rank that does not go
    on for the plan's time-out prints where it hangs and exits with status 1.
    """
    torch.set_num_threads(1)
    watch = Watch(plan.timeout + GRACE_SECONDS, show)
    exchange = Exchange(PrefixStore("exchange", store), rank=rank, world=world)
    places = {
        name: Place(
            rank,
            world,
            PrefixStore(name, store),
            plan.rotate_bytes,
            _device(plan, local_rank),
            local_rank,
            plan.timeout,
        )
        for name in plan.backends
    }
    watch("meeting the other ranks")
    alignment = aligned(PrefixStore("alignment", store), rank=rank, world=world, timeout=plan.timeout)
    peers: dict[str, Peer] = {}
    for name, place in places.items():
        watch(f"setting up {name}")
        peers[name] = peer_class(name)()
        peers[name].setup(place)
    # An error leaves the peers open: closing one may wait for a rank that has failed.
    timing = Timing(plan, places[plan.backends[0]], alignment, peers, watch)
    found = [each for cases in plan.groups() for each in _measure(timing, exchange, cases)]
    # A peer may end its process group without waiting for others that still use it.
    alignment.align()
    for name in reversed(peers):
        watch(f"closing {name}")
        peers[name].close()
    watch.end()
    return Report(found, one_host=not isinstance(alignment, StoreBarrier)) if rank == 0 else None


def _device(plan: Plan, local_rank: int) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _measure(timing: Timing, exchange: Exchange, cases: Sequence[Case]) -> list[Measurement]:
    """All ranks' figures of cases that are measured together on rank 0, none on the others."""
    ours, hops_ns = timing.measure(cases)
    measurements = []
    for case, by_contender in zip(cases, ours, strict=True):
        gathered = {contender: exchange.gather(found) for contender, found in by_contender.items()}
        found = {contender: each for contender, each in gathered.items() if each is not None}
        if found:
            measurements.append(Measurement(*case, found, np.array(hops_ns)))
    return measurements
