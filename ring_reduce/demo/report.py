"""The summary for a terminal, the JSON, and what came out otherwise than it must."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .factors import Case
from .results import Duel, Result

LEAST_ACCURACY = 0.95
# Rounding leaves about 1e-6 (the order of a float32 sum differs); the smallest wrong divisor here leaves 1e-2.
LARGEST_GRADIENT_ERROR = 1e-4

GREEN, RED, BOLD = "32", "31", "1"


class Style:
    """Terminal colours, or none of them when the output is piped."""

    def __init__(self, *, coloured: bool) -> None:
        self._coloured = coloured

    def __call__(self, text: str, code: str) -> str:
        """`text` in the colour or weight of an ANSI code."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._coloured else text


def find_failures(result: Result, *, accuracy_counts: bool) -> list[str]:
    """What came out otherwise than it must; `accuracy_counts` is false when too few epochs were asked for."""
    failures = []
    accuracy = result.training.accuracies[-1]
    if accuracy_counts and accuracy < LEAST_ACCURACY:
        failures.append(f"test accuracy is {accuracy:.2%}, below {LEAST_ACCURACY:.0%}")
    error = max(result.training.gradient_errors)
    if not error <= LARGEST_GRADIENT_ERROR:
        failures.append(
            f"a gradient differs by {error:.1e} from one process, more than {LARGEST_GRADIENT_ERROR:.0e}"
        )
    for case in (*result.equal_cases, *result.unequal_cases):
        if not case.as_predicted:
            predicted = "no clean factor" if case.predicted is None else f"factor {case.predicted:.6g}"
            failures.append(
                f"loss {case.loss.value} with {case.normalization} on local batches {_counts(case.counts)}: "
                f"measured factor {case.factor:.6g} with a residual of {case.residual:.1e}, predicted {predicted}"
            )
    if result.traffic.worst_difference > result.traffic.tolerance:
        failures.append(
            f"ranks sent {result.traffic.sent_by_rank} bytes, by the formula {result.traffic.formula:,.0f} "
            f"(within {result.traffic.tolerance})"
        )
    return failures


def as_json(result: Result, failures: Sequence[str], *, seconds: float) -> dict[str, Any]:
    """Everything measured; the first eleven keys are the report's stable part. NaN and infinity become null."""
    timings = result.timings
    ring_gloo, sum_mean = timings.of_gradients(timings.ring_gloo), timings.of_gradients(timings.sum_mean)
    everything = {
        "world": len(result.traffic.sent_by_rank),
        "device": "cpu",
        "test_accuracy": result.training.accuracies[-1],
        "max_relative_gradient_error": max(result.training.gradient_errors),
        "cases": [_case_as_json(case) for case in result.equal_cases],
        "bytes_sent": max(result.traffic.sent_by_rank),
        "bytes_formula": result.traffic.formula,
        "ring_us": ring_gloo.left_us,
        "gloo_us": ring_gloo.right_us,
        "sum_us": sum_mean.left_us,
        "mean_us": sum_mean.right_us,
        "ok": not failures,
        "failures": list(failures),
        "seconds": seconds,
        "transport": result.transport,
        "parameters": result.parameters,
        "unequal_cases": [_case_as_json(case) for case in result.unequal_cases],
        "bytes_sent_by_rank": result.traffic.sent_by_rank,
        "gradient_bytes": result.traffic.tensor_bytes,
        "losses": result.training.losses,
        "accuracies": result.training.accuracies,
        "gradient_errors": result.training.gradient_errors,
        "ring_and_gloo": [_duel_as_json(duel, "ring", "gloo") for duel in timings.ring_gloo],
        "sum_and_mean": [_duel_as_json(duel, "sum", "mean") for duel in timings.sum_mean],
    }
    return {key: _without_nan(value) for key, value in everything.items()}


def _without_nan(value: Any) -> Any:
    """JSON has no NaN; a training that diverged must still be reported."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list():
            return [_without_nan(each) for each in value]
        case dict():
            return {key: _without_nan(each) for key, each in value.items()}
    return value


def _case_as_json(case: Case) -> dict[str, Any]:
    return {
        "loss": case.loss.value,
        "normalization": case.normalization,
        "factor": case.factor,
        "right": case.verdict.right,
        "meaning": str(case.verdict),
        "residual": case.residual,
        "predicted": case.predicted,
        "local_batches": list(case.counts),
    }


def _duel_as_json(duel: Duel, left: str, right: str) -> dict[str, Any]:
    return {
        "bytes": duel.tensor_bytes,
        f"{left}_us": duel.left_us,
        f"{right}_us": duel.right_us,
        f"{right}_over_{left}": duel.ratio.value,
        "interval_95": [duel.ratio.low, duel.ratio.high],
    }


def format_summary(result: Result, failures: Sequence[str], *, seconds: float, style: Style) -> str:
    """The report that a person reads."""
    training, world = result.training, len(result.traffic.sent_by_rank)
    ranks = f"{world} rank{'s' * (world > 1)}"
    lines = [
        "",
        style(
            f"ring-reduce demo: {ranks}, a network of {result.parameters:,} parameters, {seconds:.1f} s", BOLD
        ),
        "",
        style("Training with DDP over the ring", BOLD),
        _line("test accuracy", f"{training.accuracies[-1]:.2%}"),
        _line(
            "gradient beside one process", f"{max(training.gradient_errors):.1e} relative difference at most"
        ),
        _line("", f"({len(training.gradient_errors)} steps of the first epoch, every rank and parameter)"),
        "",
        style("Which normalization goes with which loss, measured", BOLD),
        "  factor = gradient over the ring / gradient of one process with the whole batch",
        "",
        *_case_table("equal", result.equal_cases, style),
        "",
        *_case_table("unequal", result.unequal_cases, style),
        "",
        style("What it costs", BOLD),
        *_traffic_lines(result),
        "",
        *_time_lines(result),
        "",
    ]
    if failures:
        lines += [style("FAILED", RED), *(f"  {failure}" for failure in failures)]
    else:
        lines.append(style("Everything came out as it must.", GREEN))
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"  {name:<30}{value}"


def _case_table(kind: str, cases: Sequence[Case], style: Style) -> list[str]:
    counts = cases[0].counts
    lines = [
        f"  {kind} local batches: {_counts(counts)}   (n = {len(counts)} ranks, B = {sum(counts)} examples)"
    ]
    lines.append(f"    {'loss':<29}{'normalization':<16}{'factor':>8}")
    previous = None
    for case in cases:
        loss = case.loss.value if case.loss is not previous else ""
        previous = case.loss
        factor = f"{case.factor:.6g}" if case.clean else "none"
        mark = style("right", GREEN) if case.verdict.right else style("WRONG", RED)
        meaning = "" if case.verdict.right else f"  {case.verdict}"
        lines.append(f"    {loss:<29}{case.normalization:<16}{factor:>8}  {mark}{meaning}")
    return lines


def _counts(counts: Sequence[int]) -> str:
    """``16 16 16 16``, shortened for many ranks."""
    shown = [str(count) for count in counts]
    return " ".join(shown if len(shown) <= 8 else [*shown[:4], "...", shown[-1]])


def _traffic_lines(result: Result) -> list[str]:
    traffic = result.traffic
    least, most = min(traffic.sent_by_rank), max(traffic.sent_by_rank)
    sent = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return [
        _line("gradients of the network", f"s = {traffic.tensor_bytes:,} bytes"),
        _line("a rank sends", f"{sent} bytes, by the formula 2(n-1)s/n = {traffic.formula:,.0f}"),
    ]


def _time_lines(result: Result) -> list[str]:
    timings = result.timings
    lines = [f"  {'one all-reduce, median time':<30}{'ring':>10}{'Gloo':>10}{'Gloo / ring':>14}"]
    for duel in timings.ring_gloo:
        lines.append(f"{_duel_columns(duel, timings.gradient_bytes)}{duel.ratio.value:>14.1f}")
    lines += ["", f"  {'':<30}{'SUM':>10}{'MEAN':>10}{'MEAN / SUM':>14}"]
    for duel in timings.sum_mean:
        interval = f"  (95 %: {duel.ratio.low:.3f} to {duel.ratio.high:.3f})"
        lines.append(f"{_duel_columns(duel, timings.gradient_bytes)}{duel.ratio.value:>14.3f}{interval}")
    return lines


def _duel_columns(duel: Duel, gradient_bytes: int) -> str:
    name = format_bytes(duel.tensor_bytes) + (
        " (the gradients)" if duel.tensor_bytes == gradient_bytes else ""
    )
    return f"    {name:<28}{format_time(duel.left_us):>10}{format_time(duel.right_us):>10}"


def format_bytes(count: int) -> str:
    """``149.5 KiB``."""
    if count < 1 << 20:
        return f"{count / 1024:.4g} KiB"
    return f"{count / (1 << 20):.4g} MiB"


def format_time(microseconds: float) -> str:
    """``83.1 us``, ``4.21 ms``."""
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"
