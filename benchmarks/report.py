"""From measurements to what is read: rows for JSON, ratios, the targets of the project, and a table."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .measure import Measurement, Plan
from .summary import Ratio, Summary, ratio_of_medians, summarize

KB, MB = 1 << 10, 1 << 20

# What is compared: name -> (label of the numerator, of the denominator).
RATIOS = {
    "gloo_over_ring": ("gloo SUM", "ring SUM"),
    "ring_over_copy": ("ring SUM", "copy SUM"),
    "mean_over_sum": ("ring MEAN", "ring SUM"),
}


@dataclass(frozen=True)
class Target:
    """A bound on a ratio. ``at_least`` False: at most. ``within_interval``: the interval may decide in its favour."""

    ratio: str
    bound: float
    at_least: bool
    within_interval: bool = False

    def is_met(self, ratio: Ratio) -> bool:
        """Whether the measured ratio keeps the bound."""
        if self.at_least:
            return self.bound <= (ratio.high if self.within_interval else ratio.value)
        return self.bound >= (ratio.low if self.within_interval else ratio.value)

    def __str__(self) -> str:
        return f"{self.ratio} {'>=' if self.at_least else '<='} {self.bound:g}"


def targets(world: int, nbytes: int) -> list[Target]:
    """What this project set out to reach, on two cores and in float32."""
    found = [Target("mean_over_sum", 1.03, at_least=False, within_interval=True)]
    if world == 2 and nbytes <= 256 * KB:
        found.append(Target("gloo_over_ring", 20, at_least=True))
    if world == 2 and nbytes >= MB:
        found.append(Target("gloo_over_ring", 5, at_least=True))
    if world == 2 and nbytes == 64 * MB:
        found.append(Target("ring_over_copy", 1.3, at_least=False))
    if world == 4 and nbytes == KB:
        found.append(Target("gloo_over_ring", 10, at_least=True))
    if world == 4 and nbytes == 64 * MB:
        found.append(Target("gloo_over_ring", 3, at_least=True))
    return found


@dataclass(frozen=True)
class Comparison:
    """One size: summaries by label, and those of the ratios whose two sides were measured."""

    nbytes: int
    summaries: dict[str, Summary]
    ratios: dict[str, Ratio]
    met: dict[str, bool]
    hop_ns: tuple[float, float, float]  # 10th percentile, median, 90th; NaN where ranks share cores


def compare(plan: Plan, measurement: Measurement) -> Comparison:
    """Ratios of medians of one size, judged by the targets."""
    times = measurement.times
    ratios = {
        name: ratio_of_medians(times[over], times[under])
        for name, (over, under) in RATIOS.items()
        if over in times and under in times
    }
    low, middle, high = (float(x) for x in np.percentile(measurement.hops_ns, [10, 50, 90]))
    judged = [target for target in targets(plan.world, measurement.nbytes) if target.ratio in ratios]
    return Comparison(
        measurement.nbytes,
        {label: summarize(values) for label, values in times.items()},
        ratios,
        {str(target): target.is_met(ratios[target.ratio]) for target in judged},
        (low, middle, high),
    )


def rows(plan: Plan, measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """A flat row for every size and contender. Bandwidths are nccl-tests' algbw and busbw."""
    found = []
    for measurement in measurements:
        copy = measurement.times.get("copy SUM")
        for label, times in measurement.times.items():
            backend, op = label.split()
            summary = summarize(times)
            algbw = measurement.nbytes / 1e3 / summary.median
            found.append(
                {
                    "backend": backend,
                    "world": plan.world,
                    "bytes": measurement.nbytes,
                    "dtype": plan.dtype,
                    "op": op,
                    "in_place": True,
                    "time_us": summary.median,
                    "time_us_min": summary.minimum,
                    "time_us_p99": summary.p99,
                    "algbw_GBps": algbw,
                    "busbw_GBps": algbw * 2 * (plan.world - 1) / plan.world,
                    "wrong": measurement.wrong[label],
                    "copy_us": None if copy is None else summarize(copy).median,
                    "calls": times.size,
                }
            )
    return found


def document(plan: Plan, measurements: list[Measurement], load_at_start: float) -> dict[str, Any]:
    """What the JSON file holds."""
    comparisons = [compare(plan, measurement) for measurement in measurements]
    return {
        "machine": machine() | {"load_at_start": load_at_start},
        "plan": dataclasses.asdict(plan),
        "rows": rows(plan, measurements),
        "comparisons": [
            {
                "bytes": comparison.nbytes,
                # NaN is no JSON.
                "hop_ns": None if math.isnan(comparison.hop_ns[1]) else comparison.hop_ns,
                "ratios": {name: dataclasses.asdict(ratio) for name, ratio in comparison.ratios.items()},
                "targets": comparison.met,
            }
            for comparison in comparisons
        ],
    }


def machine() -> dict[str, Any]:
    """The figures' machine: its processor and versions, not its name."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor_name() -> str:
    """The processor's model, or at least its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def last_level_cache_bytes(default: int = 32 * MB) -> int:
    """The size of core 0's largest cache, or ``default`` where the system doesn't tell (some containers)."""
    units = {"K": KB, "M": MB, "G": KB * MB}
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            found.append(int(text[:-1]) * units[text[-1]])
    return max(found, default=default)
