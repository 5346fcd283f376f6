"""The table of ``bench scale`` for people, and its JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .as_json import as_json
from .measurement import Measurement
from .peers import Op, peer_class
from .plan import Contender, Plan
from .report import Row, rows
from .scale_peers import DivideByCount, Mean, Sum
from .summary import Ratio, ratio_of_medians
from .table import figure, size_text

MOST_OVER_SUM = 1.02
TARGETED = (Mean.name, DivideByCount.name)
COLUMNS = {
    "size": 6,
    "contender": 22,
    "place": 8,
    "us": 10,
    "p99": 10,
    "over ring SUM": 28,
    "at most +2 %": 14,
}


@dataclass(frozen=True)
class Line:
    """One contender at one size and place."""

    label: str
    row: Row
    over_sum: Ratio | None  # None for the sum itself

    @property
    def target_met(self) -> bool | None:
        """None where this project promises nothing."""
        if self.label not in TARGETED or self.over_sum is None:
            return None
        return self.over_sum.value <= MOST_OVER_SUM or self.over_sum.low <= MOST_OVER_SUM


def label_of(contender: Contender) -> str:
    """What the contender is called here. Gloo's mean is a division behind its sum."""
    if contender.backend == "gloo":
        return "gloo SUM" if contender.op is Op.SUM else "gloo SUM, then div_"
    return peer_class(contender.backend).name


def lines_of(plan: Plan, measurements: Iterable[Measurement]) -> list[Line]:
    """A line for every size, place and contender, the ring's sum first."""
    found = []
    for measurement in measurements:
        by_contender = dict(zip(measurement.found, rows(plan, [measurement]), strict=True))
        for in_place in (True, False):
            placed = {label_of(each): each for each in measurement.found if each.in_place is in_place}
            base = measurement.found[placed[Sum.name]].times
            for label, contender in placed.items():
                times = measurement.found[contender].times
                ratio = None if label == Sum.name else ratio_of_medians(times, base)
                found.append(Line(label, by_contender[contender], ratio))
    return found


def wrong_results(plan: Plan, measurements: Iterable[Measurement]) -> list[str]:
    """Who is wrong where, in words."""
    return [
        f"{line.label} {place(line.row)} place at {line.row.bytes} bytes: {line.row.wrong:,} elements"
        for line in lines_of(plan, measurements)
        if line.row.wrong
    ]


def place(row: Row) -> str:
    """Where the result goes."""
    return "in" if row.in_place else "out of"


def table(host: dict[str, Any], plan: Plan, measurements: Sequence[Measurement]) -> str:
    """All sizes under a heading that says what was measured where."""
    heading = (
        f"world {plan.world}, {plan.dtypes[0]}, on {host['cores']} cores ({host['processor']}), "
        f"torch {host['torch']}, 1 torch thread a rank"
    )
    cells = [tuple(COLUMNS), *(_cells(line) for line in lines_of(plan, measurements))]
    body = [
        "".join(text.rjust(width) for text, width in zip(line, COLUMNS.values(), strict=True)).rstrip()
        for line in cells
    ]
    wrong = [f"WRONG RESULTS: {text}" for text in wrong_results(plan, measurements)]
    return "\n".join([heading, *body, *wrong])


def _cells(line: Line) -> tuple[str, ...]:
    row = line.row
    return (
        size_text(row.bytes),
        line.label,
        place(row),
        figure(row.time_us),
        figure(row.time_us_p99),
        "" if line.over_sum is None else _percent(line.over_sum),
        {None: "", True: "met", False: "MISSED"}[line.target_met],
    )


def _percent(ratio: Ratio) -> str:
    """``+1.3 % [-0.2, +2.9]``; ``?`` marks a spread that leaves nothing to compare, or that isn't known."""
    percents = (100 * (x - 1) for x in (ratio.value, ratio.low, ratio.high))
    value, low, high = ("-" if math.isnan(x) else f"{x:+.{1 if x < 100 else 0}f}" for x in percents)
    return f"{value} %{'?' if ratio.is_meaningless else ''} [{low}, {high}]"


def document(host: dict[str, Any], plan: Plan, measurements: Sequence[Measurement]) -> Any:
    """What the JSON file holds: the benchmark's rows, each with its ratio to the ring's sum."""
    return as_json(
        {
            "machine": host,
            "plan": plan,
            "rows": [
                {
                    **dataclasses.asdict(line.row),
                    "contender": line.label,
                    "over_sum": line.over_sum,
                    "target_met": line.target_met,
                }
                for line in lines_of(plan, measurements)
            ],
        }
    )
