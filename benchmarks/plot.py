"""The picture: bus bandwidth and time of every backend against size, on log axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from .peers import Op
from .plan import NCCL_NAMES
from .report import LIMIT, Row
from .table import size_text

# Okabe and Ito's colours, which the colour-blind tell apart, and a marker each for those who print in grey.
STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)
LIMIT_COLOUR = "#8c8c8c"
MOST_TICKS = 12


def write_plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Writes a PNG of what was measured in place."""
    make_figure(rows, title).savefig(path, dpi=120, format="png")


def make_figure(rows: Sequence[Row], title: str) -> Figure:
    """Two panels, bandwidth and time, in place. The copy is in both, as what memory allows."""
    figure = Figure(figsize=(14, 6.2), layout=ConstrainedLayoutEngine(w_pad=0.15), facecolor="white")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    bandwidth: Any = figure.add_subplot(1, 2, 1)
    latency: Any = figure.add_subplot(1, 2, 2)
    alone = all(row.world == 1 for row in rows)  # one rank has no bus, and a logarithm no 0
    for axes, name, label in (
        (bandwidth, "algbw_GBps" if alone else "busbw_GBps", f"{'' if alone else 'bus '}bandwidth, GB/s"),
        (latency, "time_us", "median time, µs"),
    ):
        _draw(axes, rows, name)
        _label(axes, sorted({row.bytes for row in rows}), label)
    # Beside the panels: lines may be anywhere in them.
    handles, labels = latency.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=10, frameon=False)
    return figure


def _draw(axes: Any, rows: Sequence[Row], name: str) -> None:
    """A line for each backend, type and operation; the copy's once, since it is alike for all types."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    pairs = list(dict.fromkeys((row.backend, row.dtype) for row in rows if row.backend != LIMIT))
    several_ops = len({row.op for row in rows if row.backend != LIMIT}) > 1
    lines: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.in_place or (row.backend == LIMIT and row.dtype == dtypes[0]):
            lines.setdefault((row.backend, row.dtype, row.op), []).append(row)
    for (backend, dtype, op), points in lines.items():
        if backend == LIMIT:
            style = {"color": LIMIT_COLOUR, "linestyle": ":", "linewidth": 2.0}
            words = [backend]
        else:
            colour, marker = STYLES[pairs.index((backend, dtype)) % len(STYLES)]
            style = {"color": colour, "marker": marker, "linestyle": "-" if op == Op.SUM.name else "--"}
            words = [backend, *([NCCL_NAMES[dtype]] * (len(dtypes) > 1)), *([Op[op].value] * several_ops)]
        values = [getattr(row, name) for row in points]
        axes.plot([row.bytes for row in points], values, label=" ".join(words), **style)


def _label(axes: Any, sizes: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = -(-len(sizes) // MOST_TICKS)
    axes.set_xticks(sizes[::every], [size_text(size) for size in sizes[::every]], rotation=35, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="major", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tensor size, bytes")
    axes.set_ylabel(label)
