"""What a soak has done so far, as a line and as JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ring_reduce.machine import usable_cores

from .outcome import Outcome
from .plan import Fault


@dataclass
class FaultTally:
    """Faults of a kind."""

    tried: int = 0
    survived: int = 0
    slowest_s: float | None = None  # None where nothing has to be noticed


@dataclass
class Report:
    """Adds up episodes."""

    world: int
    seed: int
    calls: int = 0  # each counted once, not on every rank; those of a rank that was killed are left out
    nbytes: int = 0  # of their tensors, likewise
    episodes: int = 0
    faults: dict[str, FaultTally] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    failed_episode: int | None = None
    started_at: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started_at

    @property
    def injected(self) -> int:
        """Faults so far."""
        return sum(tally.tried for tally in self.faults.values())

    @property
    def survived(self) -> int:
        """Those after which every rank had raised what it had to, in time, and gone on."""
        return sum(tally.survived for tally in self.faults.values())

    @property
    def slowest(self) -> tuple[float, str] | None:
        """The longest time until every rank knew, and of which fault."""
        times = [
            (tally.slowest_s, kind) for kind, tally in self.faults.items() if tally.slowest_s is not None
        ]
        return max(times, default=None)

    def add(
        self,
        episode: int,
        fault: Fault | None,
        outcomes: Sequence[Outcome],
        problems: Sequence[str],
        detection_s: float | None,
    ) -> None:
        """An episode that has been judged."""
        self.episodes += 1
        self.calls += sum(outcome.calls for outcome in outcomes)
        self.nbytes += sum(outcome.nbytes for outcome in outcomes)
        if problems:
            self.problems += problems
            self.failed_episode = episode
        if fault is None:
            return
        tally = self.faults.setdefault(fault.kind, FaultTally())
        tally.tried += 1
        tally.survived += not problems
        if detection_s is not None:
            tally.slowest_s = max(detection_s, tally.slowest_s or 0.0)

    def line(self) -> str:
        """For every minute."""
        slowest = (
            "" if self.slowest is None else f", slowest seen in {self.slowest[0]:.3f} s ({self.slowest[1]})"
        )
        return (
            f"{self.seconds / 60:5.1f} min: {self.calls} calls, {self.nbytes / 1e9:.2f} GB, {self.injected} faults, "
            f"{self.survived} survived{slowest}; seed {self.seed}"
        )

    def table(self) -> str:
        """A line for each kind of fault."""
        lines = [f"{'fault':9}  {'tried':>5}  {'survived':>8}  slowest"]
        for kind, tally in sorted(self.faults.items()):
            slowest = "-" if tally.slowest_s is None else f"{tally.slowest_s:.3f} s"
            lines.append(f"{kind:9}  {tally.tried:5}  {tally.survived:8}  {slowest}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "world": self.world,
            "seed": self.seed,
            "cores": usable_cores(),
            "load": round(os.getloadavg()[0], 1),  # of the last minute, this run's own included
            "seconds": round(self.seconds, 1),
            "episodes": self.episodes,
            "calls": self.calls,
            "bytes": self.nbytes,
            "faults": {
                kind: {
                    "tried": tally.tried,
                    "survived": tally.survived,
                    "slowest_s": None if tally.slowest_s is None else round(tally.slowest_s, 4),
                }
                for kind, tally in sorted(self.faults.items())
            },
            "problems": self.problems,
        }
