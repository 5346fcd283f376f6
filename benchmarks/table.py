"""From measurements to what is read by people: a block for each backend as nccl-tests prints it, then all side by side.

Lines that are not figures begin with ``#``, as there. Each line of figures has columns that nccl-tests' has not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .cost import Cost
from .measurement import Report
from .peers import Op
from .plan import INTEGERS, NCCL_NAMES, Plan
from .report import LIMIT, Comparison, Figures, Row, base_of
from .summary import Ratio

Column = tuple[str, str, int]  # title, unit, width

SIZE_COLUMNS: list[Column] = [
    ("size", "(B)", 11),
    ("count", "(elements)", 11),
    ("type", "", 9),
    ("redop", "", 6),
]
PLACE_COLUMNS: list[Column] = [
    ("time", "(us)", 8),
    ("algbw", "(GB/s)", 7),
    ("busbw", "(GB/s)", 7),
    ("#wrong", "", 7),
    ("min", "(us)", 8),
    ("p99", "(us)", 8),
]
RANK_COLUMNS: list[Column] = [("error", "", 9), ("sent", "(B)", 11), ("2(n-1)s/n", "(B)", 11)]
COST_COLUMNS: list[Column] = [
    ("size", "(B)", 11),
    ("type", "", 9),
    ("redop", "", 6),
    ("place", "", 6),
]
COMPARED_COLUMNS: list[Column] = [
    *COST_COLUMNS,
    ("hop", "(ns)", 10),
    ("copy", "(us)", 9),
]
RATIO_WIDTH = 22
LEGEND = (
    "# time: median over all calls, each of which takes what its slowest rank takes; min, p99: of the same",
    "# error: largest |result - float64 sum| / sum of |inputs| of random data; sent: bytes of elements a rank and call",
)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_text(nbytes: int) -> str:
    """``16K`` for 16384."""
    for unit, factor in reversed(UNITS.items()):
        if nbytes % factor == 0 and nbytes >= factor:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def figure(value: float | None) -> str:
    """At most six characters for anything below a million, ``-`` for nothing."""
    if value is None:
        return "-"
    return f"{value:.{2 if value < 1000 else 1 if value < 10_000 else 0}f}"


def ratio_text(ratio: Ratio | None) -> str:
    """Value and interval; ``?`` marks a spread that leaves nothing to compare, or that isn't known."""
    if ratio is None:
        return "-"
    value, low, high = (
        "-" if math.isnan(x) else f"{x:.3g}" if x < 999.5 else f"{x:.0f}"
        for x in (ratio.value, ratio.low, ratio.high)
    )
    return f"{value}{'?' if ratio.is_meaningless else ''} [{low}, {high}]"


def heading(plan: Plan, report: Report, machine: dict[str, Any], load_at_start: float) -> list[str]:
    """What was measured, where, and how."""
    calls = sorted(math.prod(plan.repeats(nbytes)) for nbytes in plan.sizes)
    times = " to ".join(map(str, dict.fromkeys((calls[0], calls[-1]))))
    where = f"{machine['processor']}, {machine['cores']} cores" + (
        f", {machine['gpu']}" if plan.device == "cuda" else ""
    )
    lines = [
        f"# ring-reduce bench: {plan.world} rank{'s' * (plan.world > 1)} on {plan.device}: {where}, last-level cache "
        f"{size_text(machine['last_level_cache_bytes'])}, load {load_at_start:.2f}; torch {machine['torch']}",
        f"# {times} calls of each, interleaved; buffers rotated over {size_text(plan.rotate_bytes)} a rank",
    ]
    if not report.one_host:
        lines.append(
            "# the ranks don't share a host's memory: calls are started through the store, so small sizes read high"
        )
    return lines


def table(plan: Plan, figures: Figures) -> list[str]:
    """The lines of all blocks, each with nccl-tests' two last lines, and of the comparison."""
    lines = []
    for backend in plan.backends:
        ours = [row for row in figures.rows if row.backend == backend]
        if backend == LIMIT:
            continue
        lines += ["#", f"# {backend}", *(_block(ours) if ours else [])]
        asked = [dtype for dtype in plan.dtypes if dtype not in INTEGERS or Op.SUM.name in plan.ops]
        absent = [NCCL_NAMES[dtype] for dtype in asked if all(row.dtype != dtype for row in ours)]
        if absent:
            lines.append(f"# {backend} does not reduce {', '.join(absent)}")
    if figures.comparisons:
        lines += ["#", *_compared(plan, figures.comparisons)]
    if figures.costs:
        lines += ["#", *_time_a_byte(plan, figures.costs)]
    return lines


def _block(ours: Sequence[Row]) -> list[str]:
    """One backend's figures, a line for a size and operation."""
    cases: dict[tuple[str, int, str], dict[bool, Row]] = {}
    for row in ours:
        cases.setdefault((row.dtype, row.bytes, row.op), {})[row.in_place] = row
    width = sum(width for _, _, width in PLACE_COLUMNS)
    columns = [*SIZE_COLUMNS, *PLACE_COLUMNS, *PLACE_COLUMNS, *RANK_COLUMNS]
    above = (
        " " * sum(width for _, _, width in SIZE_COLUMNS)
        + "out-of-place".center(width)
        + "in-place".center(width)
    )
    wrong = sum(row.wrong or 0 for row in ours)
    busbw = sum(row.busbw_GBps for row in ours) / len(ours)
    return [
        f"#{above[1:].rstrip()}",
        *_titles(columns),
        *(_line(columns, _cells(places)) for places in cases.values()),
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {busbw:g}",
    ]


def _cells(places: dict[bool, Row]) -> list[str]:
    first = next(iter(places.values()))
    errors = [row.max_relative_error for row in places.values() if row.max_relative_error is not None]
    sent = [row.bytes_sent for row in places.values() if row.bytes_sent is not None]
    cells = [str(first.bytes), str(first.count), NCCL_NAMES[first.dtype], Op[first.op].value]
    for row in (places.get(False), places.get(True)):
        if row is None:
            cells += ["-"] * len(PLACE_COLUMNS)
            continue
        cells += [figure(row.time_us), figure(row.algbw_GBps), figure(row.busbw_GBps)]
        cells += [
            "N/A" if row.wrong is None else str(row.wrong),
            figure(row.time_us_min),
            figure(row.time_us_p99),
        ]
    cells += [f"{max(errors):.1e}" if errors else "-", str(max(sent)) if sent else "-"]
    return [*cells, f"{first.formula_bytes:.0f}"]


def _compared(plan: Plan, compared: Sequence[Comparison]) -> list[str]:
    """All backends beside the ring, a line for a size, operation and place."""
    base = str(base_of(plan))
    names = dict.fromkeys(name for comparison in compared for name in comparison.ratios)
    order = [f"{base}_over_{LIMIT}", "mean_over_sum"]
    names = dict.fromkeys([*(name for name in order if name in names), *names])
    columns = [*COMPARED_COLUMNS, *((_title(name, base), "", RATIO_WIDTH) for name in names)]
    lines = [
        f"# Compared: ratios of medians with their 95 % interval; ? where the spread leaves nothing to compare. "
        f"Of {base}/{LIMIT} less is better, of X/{base} more.",
        *_titles(columns),
    ]
    for comparison in compared:
        hop = "-" if comparison.hop_ns is None else f"{comparison.hop_ns[0]:.0f}-{comparison.hop_ns[2]:.0f}"
        cells = [str(comparison.nbytes), NCCL_NAMES[comparison.dtype], comparison.op.value]
        cells += ["in" if comparison.in_place else "out", hop, figure(comparison.copy_us)]
        lines.append(_line(columns, [*cells, *(ratio_text(comparison.ratios.get(name)) for name in names)]))
    return lines


def _time_a_byte(plan: Plan, costs: Sequence[Cost]) -> list[str]:
    """Every type and size beside the first, a line for a contender of one."""
    first = plan.dtypes[0]
    columns = [("backend", "", 12), *COST_COLUMNS, (f"over {NCCL_NAMES[first]}", "", RATIO_WIDTH)]
    columns.append(("over least size", "", RATIO_WIDTH))
    lines = [
        "# Time a byte, all measured together: ratios of medians with their 95 % interval",
        *_titles(columns),
    ]
    for cost in costs:
        cells = [cost.backend, str(cost.bytes), NCCL_NAMES[cost.dtype], Op[cost.op].value]
        cells.append("in" if cost.in_place else "out")
        cells += [ratio_text(cost.over_first_type), ratio_text(cost.over_least_size)]
        lines.append(_line(columns, cells))
    return lines


def _title(name: str, base: str) -> str:
    """Of a ratio, by what report.py calls it; a backend's own name may hold ``_over_`` too."""
    if name == "mean_over_sum":
        return "avg/sum"
    if name == f"{base}_over_{LIMIT}":
        return f"{base}/{LIMIT}"
    return f"{name.removesuffix(f'_over_{base}')}/{base}"


def _titles(columns: Iterable[Column]) -> list[str]:
    """Two lines that begin with ``#``: titles and units."""
    columns = list(columns)
    titles = _line(columns, [title for title, _, _ in columns])
    units = _line(columns, [unit for _, unit, _ in columns])
    return [f"#{titles[1:]}".rstrip(), f"#{units[1:]}".rstrip()]


def _line(columns: Iterable[Column], cells: Iterable[str]) -> str:
    """Right-aligned; a cell that is too wide keeps a blank before it."""
    return "".join(f" {cell:>{width - 1}}" for (_, _, width), cell in zip(columns, cells, strict=True))
