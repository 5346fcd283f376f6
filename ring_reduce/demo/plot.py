"""The picture: training, gradients, the divisor's cases, times and bytes in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .factors import Case
from .report import LEAST_ACCURACY, format_bytes, format_time
from .results import Result

RIGHT, WRONG, UNCLEAN = "#1b9e77", "#d95f02", "#9a9a9a"
RING, GLOO = "#2a6fbb", "#8c8c8c"
INK, MUTED = "#222222", "#666666"
FLOAT32_EPSILON = float(np.finfo(np.float32).eps)


def write_plot(path: Path, result: Result) -> None:
    """Writes the figure as a PNG."""
    figure = Figure(figsize=(16, 10), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    world = len(result.traffic.sent_by_rank)
    figure.suptitle(
        f"ring-reduce demo: {world} rank{'s' * (world > 1)} train on handwritten digits, "
        f"test accuracy {result.training.accuracies[-1]:.1%}",
        fontsize=16,
        fontweight="bold",
        color=INK,
    )
    grid = figure.add_gridspec(2, 12, height_ratios=(1, 1.35))
    _plot_loss(_panel(figure, grid[0, :4], "Loss of the whole batch"), result)
    _plot_accuracy(_panel(figure, grid[0, 4:8], "Test accuracy"), result)
    _plot_errors(_panel(figure, grid[0, 8:], "Gradient beside one process, first epoch"), result)
    _plot_cases(_panel(figure, grid[1, :6], "Gradient / gradient of one process: 1 is right"), result)
    _plot_times(_panel(figure, grid[1, 6:9], "Time of one all-reduce"), result)
    costs = grid[1, 9:].subgridspec(2, 1)
    _plot_mean(_panel(figure, costs[0], "Dividing is free: SUM and MEAN"), result)
    _plot_bytes(_panel(figure, costs[1], "Bytes each rank sends"), result)
    figure.savefig(path, dpi=110, format="png")


def _panel(figure: Figure, place: Any, title: str) -> Any:
    axes = figure.add_subplot(place)
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.grid(visible=True, axis="y", color="#ececec")
    axes.set_axisbelow(True)
    return axes


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
    axes.axhline(100 * LEAST_ACCURACY, color=MUTED, linewidth=1, linestyle="--")
    axes.text(0.99, 100 * LEAST_ACCURACY, f"{LEAST_ACCURACY:.0%}", color=MUTED, fontsize=9, ha="right", va="bottom",
              transform=axes.get_yaxis_transform())  # fmt: skip
    axes.annotate(
        f"{accuracies[-1]:.1%}",
        (len(accuracies), 100 * accuracies[-1]),
        xytext=(0, -14),
        textcoords="offset points",
        ha="center",
        color=RING,
        fontweight="bold",
    )
    axes.set_ylim(top=101)
    axes.set_xticks(list(epochs) if len(accuracies) <= 12 else axes.get_xticks())
    axes.set_xlim(0.7, len(accuracies) + 0.3)
    axes.set_xlabel("epoch", color=MUTED)
    axes.set_ylabel("%", color=MUTED)


def _plot_errors(axes: Any, result: Result) -> None:
    errors = result.training.gradient_errors
    # A world of one may agree to the bit, and a logarithm has no 0.
    shown = [max(error, FLOAT32_EPSILON / 100) for error in errors]
    axes.plot(range(1, len(errors) + 1), shown, color=RIGHT, marker="o", markersize=4, linewidth=1)
    axes.axhline(FLOAT32_EPSILON, color=MUTED, linewidth=1, linestyle="--")
    axes.text(0.99, FLOAT32_EPSILON * 0.92, "rounding of one float32 operation", color=MUTED, fontsize=9, ha="right",
              va="top", transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(min(FLOAT32_EPSILON / 8, min(shown) / 2), max(1e-5, 4 * max(shown)))
    axes.set_xlabel("step", color=MUTED)
    axes.set_ylabel("largest relative difference", color=MUTED)


def _plot_cases(axes: Any, result: Result) -> None:
    """One bar a case from 1 to its factor, on a log axis: no bar is right, and both ways to be wrong look alike."""
    rows: list[Case | None] = [*result.equal_cases, None, *result.unequal_cases]
    for place, case in enumerate(rows):
        if case is None:
            continue
        if not case.clean:
            axes.plot([1], [place], marker="x", color=UNCLEAN, markersize=8, markeredgewidth=2)
            text, colour = "no factor: ranks weighted wrongly", MUTED
        elif case.verdict.right:
            axes.plot([case.factor], [place], marker="o", color=RIGHT, markersize=9)
            text, colour = "right", RIGHT
        else:
            axes.plot([1, case.factor], [place, place], color=WRONG, linewidth=5, solid_capstyle="butt")
            axes.plot([case.factor], [place], marker="o", color=WRONG, markersize=7)
            text, colour = f"{case.factor:.4g} = {case.verdict.symbol}", WRONG
        left = case.clean and case.factor < 1 and not case.verdict.right
        axes.annotate(text, (case.factor if case.clean else 1, place), xytext=(-9 if left else 9, 0),
                      textcoords="offset points", ha="right" if left else "left", va="center", color=colour,
                      fontsize=9.5)  # fmt: skip
    axes.axvline(1, color=RIGHT, linewidth=1, zorder=0)
    axes.set_xscale("log")
    clean = [case.factor for case in rows if case is not None and case.clean]
    axes.set_xlim(min([*clean, 0.1]) / 12, max([*clean, 10]) * 12)
    axes.set_yticks(
        [place for place, case in enumerate(rows) if case is not None],
        [f"{case.loss.value}  ·  {case.normalization}" for case in rows if case is not None],
        color=INK,
    )
    axes.set_ylim(len(rows) - 0.3, -1.2)
    for place, kind, cases in ((-0.8, "equal", result.equal_cases), (4.2, "unequal", result.unequal_cases)):
        axes.text(0.995, place, f"{kind} local batches: {_batches(cases)}", ha="right", va="center", fontsize=9.5,
                  color=INK, fontweight="bold", transform=axes.get_yaxis_transform())  # fmt: skip
    axes.grid(visible=False)
    axes.set_xlabel("measured factor (log scale)", color=MUTED)


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
        axes.annotate(name, (sizes[0], values[0]), xytext=(0, 8), textcoords="offset points", color=colour,
                      fontweight="bold")  # fmt: skip
    ours = result.timings.of_gradients(duels)
    axes.axvline(ours.tensor_bytes, color="#d8d8d8", linewidth=1, zorder=0)
    axes.text(ours.tensor_bytes, 0.015, f"the gradients: Gloo\ntakes {ours.ratio.value:.1f} times as long ", ha="right",
              va="bottom", fontsize=9, color=INK, transform=axes.get_xaxis_transform())  # fmt: skip
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
        f"microseconds; MEAN / SUM {ratio.value:.3f} (95 %: {ratio.low:.3f} to {ratio.high:.3f})", color=MUTED, fontsize=9
    )
    axes.grid(visible=False)


def _plot_bytes(axes: Any, result: Result) -> None:
    traffic = result.traffic
    ranks = range(len(traffic.sent_by_rank))
    axes.bar(ranks, [sent / 1024 for sent in traffic.sent_by_rank], color=RING, width=0.6)
    axes.axhline(traffic.formula / 1024, color=WRONG, linewidth=1.6, linestyle="--")
    axes.text(0.99, traffic.formula / 1024, f"2(n-1)s/n = {traffic.formula:,.0f} bytes", color=WRONG, ha="right",
              va="bottom", fontsize=9, transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_ylim(0, max(1.0, 1.3 * traffic.formula / 1024))
    axes.set_xticks(list(ranks))
    axes.set_xlabel("rank", color=MUTED)
    axes.set_ylabel("KiB", color=MUTED)
