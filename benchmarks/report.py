"""From measurements to what is read by programs: a flat row for every size and contender, ratios, and the JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .as_json import as_json
from .cost import Cost, costs
from .host import machine
from .measurement import Measurement, Report
from .peers import Op
from .plan import ITEM_BYTES, Plan
from .summary import Ratio, median_interval, ratio_of_medians, summarize

LIMIT = "copy"  # the peer that only moves bytes


@dataclass(frozen=True)
class Row:
    """One contender at one size; its fields are the keys of the JSON file. Bandwidths are nccl-tests'."""

    backend: str
    world: int
    bytes: int
    dtype: str
    op: str
    in_place: bool
    time_us: float  # median over all calls
    time_us_min: float
    time_us_p99: float
    time_us_low: float | None  # 95 % interval of the median; None for too few rounds
    time_us_high: float | None
    algbw_GBps: float
    busbw_GBps: float
    wrong: int | None  # elements, over all ranks and checked calls
    max_relative_error: float | None  # of random data; infinity for a result that isn't finite
    bytes_sent: int | None  # a rank and call
    copy_us: float | None
    calls: int

    @property
    def count(self) -> int:
        """Elements."""
        return self.bytes // ITEM_BYTES[self.dtype]

    @property
    def formula_bytes(self) -> float:
        """What a rank of a ring has to send: 2(n-1)s/n."""
        return 2 * (self.world - 1) / self.world * self.bytes


@dataclass(frozen=True)
class Comparison:
    """One size, operation and place: ratios of medians. ``hop_ns``: 10th percentile, median, 90th of a hop."""

    dtype: str
    nbytes: int
    op: Op
    in_place: bool
    copy_us: float | None
    ratios: dict[str, Ratio]  # such as gloo_over_ring, ring_over_copy, mean_over_sum
    hop_ns: tuple[float, float, float] | None


def rows(plan: Plan, measurements: Iterable[Measurement]) -> list[Row]:
    """A row for every size and contender, in the order in which they were measured."""
    found = []
    for measurement in measurements:
        copy_us = _copy_us(measurement)
        for contender, each in measurement.found.items():
            summary = summarize(each.times)
            low, high = median_interval(each.times) or (None, None)
            algbw = measurement.nbytes / 1e3 / summary.median
            found.append(
                Row(
                    backend=contender.backend,
                    world=plan.world,
                    bytes=measurement.nbytes,
                    dtype=measurement.dtype,
                    op=contender.op.name,
                    in_place=contender.in_place,
                    time_us=summary.median,
                    time_us_min=summary.minimum,
                    time_us_p99=summary.p99,
                    time_us_low=low,
                    time_us_high=high,
                    algbw_GBps=algbw,
                    busbw_GBps=algbw * 2 * (plan.world - 1) / plan.world,
                    wrong=each.wrong,
                    max_relative_error=each.relative_error,
                    bytes_sent=each.bytes_sent,
                    copy_us=copy_us,
                    calls=each.times.size,
                )
            )
    return found


def _copy_us(measurement: Measurement) -> float | None:
    times = measurement.times(LIMIT, Op.SUM, False)
    return None if times is None else summarize(times).median


def base_of(plan: Plan) -> str | None:
    """Whom the others are compared with: the ring, or the first that was asked for; None if nobody reduces."""
    reducing = [name for name in plan.backends if name != LIMIT]
    return "ring" if "ring" in reducing else next(iter(reducing), None)


def comparisons(plan: Plan, measurements: Iterable[Measurement]) -> list[Comparison]:
    """The ratios of every size, operation and place whose two sides were measured."""
    found = []
    for measurement in measurements:
        hops = measurement.hops_ns[~np.isnan(measurement.hops_ns)]
        low, middle, high = np.percentile(hops, [10, 50, 90]) if len(hops) else (math.nan,) * 3
        for op in (Op[name] for name in plan.ops):
            for in_place in (False, True):
                found.append(
                    Comparison(
                        measurement.dtype,
                        measurement.nbytes,
                        op,
                        in_place,
                        _copy_us(measurement),
                        _ratios(plan, measurement, op, in_place),
                        (float(low), float(middle), float(high)) if len(hops) else None,
                    )
                )
    return [comparison for comparison in found if comparison.ratios]


def _ratios(plan: Plan, measurement: Measurement, op: Op, in_place: bool) -> dict[str, Ratio]:
    base = base_of(plan)
    ours = None if base is None else measurement.times(base, op, in_place)
    if ours is None:
        return {}
    under = {f"{base}_over_{LIMIT}": measurement.times(LIMIT, Op.SUM, False)}
    if op is Op.MEAN:
        under["mean_over_sum"] = measurement.times(str(base), Op.SUM, in_place)
    over = {
        f"{name}_over_{base}": measurement.times(name, op, in_place)
        for name in plan.backends
        if name not in (base, LIMIT)
    }
    return {
        **{name: ratio_of_medians(times, ours) for name, times in over.items() if times is not None},
        **{name: ratio_of_medians(ours, times) for name, times in under.items() if times is not None},
    }


@dataclass(frozen=True)
class Figures:
    """All that is said of a run."""

    rows: list[Row]
    comparisons: list[Comparison]
    costs: list[Cost]


def figures_of(plan: Plan, report: Report) -> Figures:
    """Its rows and ratios: seconds of work, for the intervals."""
    measured = report.measurements
    return Figures(rows(plan, measured), comparisons(plan, measured), costs(plan, measured))


def document(plan: Plan, report: Report, figures: Figures, load_at_start: float) -> dict[str, Any]:
    """What the JSON file holds; null for what is not known, or not finite."""
    machine_then = machine() | {"load_at_start": load_at_start, "one_host": report.one_host}
    found: dict[str, Any] = as_json(
        {
            "machine": machine_then,
            "plan": plan,
            "rows": figures.rows,
            "comparisons": [
                {
                    "dtype": comparison.dtype,
                    "bytes": comparison.nbytes,
                    "op": comparison.op.name,
                    "in_place": comparison.in_place,
                    "hop_ns": comparison.hop_ns,
                    "ratios": comparison.ratios,
                }
                for comparison in figures.comparisons
            ],
            "time_a_byte": figures.costs,
        }
    )
    return found
