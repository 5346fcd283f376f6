"""One rank of a benchmark, however it was started: connects all peers, measures every size, hands in what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore

from .alignment import StoreBarrier, aligned
from .measurement import Exchange, Measurement, Report
from .peers import Peer, Place, peer_class
from .plan import Plan
from .timing import Timing
from .watch import Watch

GRACE_SECONDS = 10.0  # for another rank to say whom it waits for, before one that hangs is ended


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
            rank, world, PrefixStore(name, store), plan.rotate_bytes, _device(plan, local_rank), local_rank
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
    measurements = [_measure(timing, exchange, dtype, nbytes) for dtype, nbytes in plan.cases()]
    # A peer may end its process group without waiting for others that still use it.
    alignment.align()
    for name in reversed(peers):
        watch(f"closing {name}")
        peers[name].close()
    watch.end()
    found = [each for each in measurements if each is not None]
    return Report(found, one_host=not isinstance(alignment, StoreBarrier)) if rank == 0 else None


def _device(plan: Plan, local_rank: int) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _measure(timing: Timing, exchange: Exchange, dtype: str, nbytes: int) -> Measurement | None:
    """All ranks' figures of one case on rank 0, None on the others."""
    ours, hops_ns = timing.measure(dtype, nbytes)
    gathered = {contender: exchange.gather(found) for contender, found in ours.items()}
    found = {contender: each for contender, each in gathered.items() if each is not None}
    return Measurement(dtype, nbytes, found, np.array(hops_ns)) if found else None
