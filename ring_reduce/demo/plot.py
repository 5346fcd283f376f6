"""The picture: training, gradients, the divisor's cases, times and bytes in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from .factors import Case
from .report import LEAST_ACCURACY, format_bytes, format_time
from .results import Result

RIGHT, WRONG, UNCLEAN = "#1b9e77", "#d95f02", "#9a9a9a"
RING, GLOO = "#2a6fbb", "#8c8c8c"
INK, MUTED = "#222222", "#666666"
FLOAT32_EPSILON = float(np.finfo(np.float32).eps)


def write_plot(path: Path, result: Result) -> None:
    """Writes the figure as a PNG."""
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    figure = Figure(figsize=(16, 10.5), layout=layout, facecolor="white")
    world = len(result.traffic.sent_by_rank)
    figure.suptitle(
        f"ring-reduce demo: {'1 rank trains' if world == 1 else f'{world} ranks train'} on handwritten digits, "
        f"test accuracy {result.training.accuracies[-1]:.1%}",
        fontsize=16,
        fontweight="bold",
        color=INK,
    )
    # Rows are figures of their own: the wide labels of the cases would otherwise narrow the panels above them.
    rows: Any = figure.subfigures(2, 1, height_ratios=(1, 1.5))
    upper, lower = rows
    top = upper.add_gridspec(1, 3)
    _plot_loss(_panel(upper, top[0], "Loss of the whole batch"), result)
    _plot_accuracy(_panel(upper, top[1], "Test accuracy"), result)
    _plot_errors(_panel(upper, top[2], "Gradient beside one process, first epoch"), result)
    bottom = lower.add_gridspec(2, 3, width_ratios=(2.1, 1.5, 1.3), height_ratios=(1, 1.4))
    _plot_cases(_panel(lower, bottom[:, 0], "Gradient over the ring / of one process: 1 is right"), result)
    _plot_times(_panel(lower, bottom[:, 1], "Time of one all-reduce"), result)
    _plot_mean(_panel(lower, bottom[0, 2], "Cost of dividing"), result)
    _plot_bytes(_panel(lower, bottom[1, 2], "Bytes each rank sends"), result)
    figure.savefig(path, dpi=110, format="png")


def _panel(figure: Any, place: Any, title: str) -> Any:
    axes = figure.add_subplot(place)
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.grid(visible=True, axis="y", color="#ececec")
    axes.set_axisbelow(True)
    return axes


def _mark_level(axes: Any, level: float, text: str, *, colour: str = MUTED) -> None:
    """A dashed line across the panel, with its meaning on it."""
    axes.axhline(level, color=colour, linewidth=1.2, linestyle="--")
    axes.annotate(
        text,
        (0.012, level),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        color=colour,
        fontsize=9,
    )


def _plot_loss(axes: Any, result: Result) -> None:
    losses = result.training.losses
    axes.plot(range(1, len(losses) + 1), losses, color=RING, linewidth=1.4)
    axes.set_yscale("log")
    axes.set_xlabel("step", color=MUTED)
    axes.set_ylabel("cross-entropy", color=MUTED)


def _plot_accuracy(axes: Any, result: Result) -> None:
    accuracies = result.training.accuracies
    epochs = range(1, len(accuracies) + 1)
    axes.plot(epochs, [100 * accuracy for accuracy in accuracies], color=RING, marker="o", markersize=5)
    _mark_level(axes, 100 * LEAST_ACCURACY, f"{LEAST_ACCURACY:.0%}")
    axes.annotate(
        f"{accuracies[-1]:.1%}",
        (len(accuracies), 100 * accuracies[-1]),
        xytext=(0, -20),
        textcoords="offset points",
        ha="center",
        fontsize=12,
        color=RING,
        fontweight="bold",
    )
    axes.set_ylim(top=101)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(0.5, len(accuracies) + 0.5)
    axes.set_xlabel("epoch", color=MUTED)
    axes.set_ylabel("%", color=MUTED)


def _plot_errors(axes: Any, result: Result) -> None:
    errors = result.training.gradient_errors
    # A world of one may agree to the bit, and a logarithm has no 0.
    shown = [max(error, FLOAT32_EPSILON / 100) for error in errors]
    axes.plot(range(1, len(errors) + 1), shown, color=RIGHT, marker="o", markersize=4, linewidth=1)
    _mark_level(axes, FLOAT32_EPSILON, "rounding of one float32 operation")
    axes.set_yscale("log")
    axes.set_ylim(min(FLOAT32_EPSILON / 8, min(shown) / 2), max(1e-5, 4 * max(shown)))
    axes.set_xlabel("step", color=MUTED)
    axes.set_ylabel("largest relative difference", color=MUTED)


def _plot_cases(axes: Any, result: Result) -> None:
    """One bar a case from 1 to its factor, on a log axis: no bar is right, and both ways to be wrong look alike."""
    groups = (("equal", result.equal_cases), ("unequal", result.unequal_cases))
    places, labels = [], []
    place = 0
    for kind, cases in groups:
        heading = f"{kind} local batches: {_batches(cases)}"
        across = axes.get_yaxis_transform()
        axes.text(
            0.012, place, heading, va="center", fontsize=9.5, fontweight="bold", color=INK, transform=across
        )
        for case in cases:
            place += 1
            _plot_case(axes, place, case)
            places.append(place)
            labels.append(f"{case.loss.value}  ·  {case.normalization}")
        place += 2
    axes.set_yticks(places, labels, color=INK)
    axes.set_ylim(place - 1.2, -0.6)
    axes.axvline(1, color=RIGHT, linewidth=1, zorder=0)
    axes.set_xscale("log")
    clean = [case.factor for _, cases in groups for case in cases if case.clean]
    least, most = min([*clean, 0.1]), max([*clean, 10])
    # Room for the texts beside the outermost bars.
    axes.set_xlim(least * (least / most) ** 0.55, most * (most / least) ** 0.35)
    axes.grid(visible=False)
    axes.set_xlabel("measured factor (log scale)", color=MUTED)


def _plot_case(axes: Any, place: int, case: Case) -> None:
    position, text, colour, marker = case.factor, "right", RIGHT, "o"
    if not case.clean:
        position, text, colour, marker = 1.0, "no factor: wrong weights", UNCLEAN, "x"
    elif not case.verdict.right:
        text, colour = f"{case.factor:.3g} = {case.verdict.symbol or '?'}", WRONG
        axes.plot([1, position], [place, place], color=colour, linewidth=5, solid_capstyle="butt")
    axes.plot([position], [place], marker=marker, color=colour, markersize=8, markeredgewidth=2)
    outward = -1 if colour == WRONG and position < 1 else 1
    axes.annotate(
        text,
        (position, place),
        xytext=(9 * outward, 0),
        textcoords="offset points",
        ha="left" if outward > 0 else "right",
        va="center",
        color=MUTED if colour == UNCLEAN else colour,
        fontsize=9.5,
    )


def _batches(cases: Sequence[Case]) -> str:
    counts = cases[0].counts
    return " ".join(map(str, counts)) if len(counts) <= 8 else f"{counts[0]} ... {counts[-1]}"


def _plot_times(axes: Any, result: Result) -> None:
    duels = result.timings.ring_gloo
    sizes = [duel.tensor_bytes for duel in duels]
    for values, colour, name in (
        ([duel.right_us for duel in duels], GLOO, "Gloo"),
        ([duel.left_us for duel in duels], RING, "ring"),
    ):
        axes.plot(sizes, values, color=colour, marker="o", markersize=5, linewidth=1.8)
        place = (sizes[0], values[0])
        axes.annotate(
            name, place, xytext=(2, -16), textcoords="offset points", color=colour, fontweight="bold"
        )
    ours = result.timings.of_gradients(duels)
    axes.axvline(ours.tensor_bytes, color="#d8d8d8", linewidth=1, zorder=0)
    axes.text(
        ours.tensor_bytes,
        0.015,
        f"the gradients: Gloo \ntakes {ours.ratio.value:.1f} times as long ",
        ha="right",
        va="bottom",
        fontsize=9,
        color=INK,
        transform=axes.get_xaxis_transform(),
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=axes.get_ylim()[0] / 4)
    axes.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=35, ha="right")
    axes.minorticks_off()
    axes.set_ylabel("microseconds, median (log scale)", color=MUTED)


def _plot_mean(axes: Any, result: Result) -> None:
    duel = result.timings.of_gradients(result.timings.sum_mean)
    values = (duel.left_us, duel.right_us)
    axes.barh((0, 1), values, color=(GLOO, RING), height=0.6)
    for place, value in enumerate(values):
        axes.text(value, place, f" {format_time(value)}", va="center", color=INK, fontsize=9.5)
    axes.set_yticks((0, 1), ("SUM", "MEAN"), color=INK)
    axes.set_xlim(0, 1.3 * max(values))
    axes.set_ylim(1.6, -0.6)
    ratio = duel.ratio
    axes.set_xlabel(
        f"microseconds, median\nMEAN / SUM = {ratio.value:.3f} (95 %: {ratio.low:.3f} to {ratio.high:.3f})",
        color=MUTED,
        fontsize=9.5,
    )
    axes.grid(visible=False)


def _plot_bytes(axes: Any, result: Result) -> None:
    traffic = result.traffic
    ranks = range(len(traffic.sent_by_rank))
    axes.bar(ranks, [sent / 1024 for sent in traffic.sent_by_rank], color=RING, width=0.6)
    _mark_level(axes, traffic.formula / 1024, f"2(n-1)s/n = {traffic.formula:,.0f} bytes", colour=WRONG)
    axes.set_ylim(0, max(1.0, 1.3 * traffic.formula / 1024))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("rank", color=MUTED)
    axes.set_ylabel("KiB", color=MUTED)
