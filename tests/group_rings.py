"""Rings over process groups of their own, for tests. Their ranks meet in a file; torch.distributed is not started."""

from __future__ import annotations

from typing import Any

import ring_reduce as rr
from cases import SMALL
from launch import RING_TIMEOUT_S, Seat

# What a ring over process groups has of them.
SMALL_GROUP: dict[str, Any] = {key: SMALL[key] for key in ("segment_bytes", "window")}


def group_ring(
    seat: Seat,
    *,
    name: str = "group",
    timeout: float = RING_TIMEOUT_S,
    transport: str = "process_group",
    algorithm: str = "auto",
    **tuning: Any,
) -> rr.Ring:
    """A new ring as ``from_group`` makes it."""
    import torch.distributed as dist

    return rr.Ring(
        # Without the world: it would remove the file when the stores of one ring are gone, and the next may be there.
        dist.FileStore(str(seat.directory / f"store {seat.job}")),
        rank=seat.rank,
        world=seat.world,
        name=name,
        timeout=timeout,
        transport=transport,
        algorithm=algorithm,
        _tuning=tuning,
        _has_group=True,
    )


def kept_group_ring(seat: Seat) -> rr.Ring:
    """One of small segments that outlives the job."""
    if "group" not in seat._kept:
        seat._kept["group"] = group_ring(seat, **SMALL_GROUP)
    return seat._kept["group"]
