"""What a step is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Who takes the step, and how many micro-batches a rank's group is planned to have; a short one has fewer."""

    rank: int
    world: int
    micro_batches: int
