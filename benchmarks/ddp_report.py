"""The table of ``bench ddp`` for people, and its JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .as_json import as_json
from .ddp_result import UNREDUCED, Row, Trained, ratios_to_ring, rows_of
from .table import ratio_text

HEADINGS = ("contender", "step ms", "min", "p99", "not hidden ms", "samples/s", f"step / {UNREDUCED}")
WIDTHS = (10, 10, 10, 10, 14, 11, 24)


def report(host: dict[str, Any], device: str, trained: Sequence[Trained]) -> str:
    """All networks, what each contender took, and what is wrong."""
    where = f"{host['cores']} cores ({host['processor']}), torch {host['torch']}"
    lines = [f"training steps on {device}, {trained[0].world} ranks, {where}"]
    for each in trained:
        lines += ["", *_lines(each)]
    lines += [f"WRONG RESULTS: {problem}" for each in trained for problem in each.problems()]
    return "\n".join(lines)


def _lines(trained: Trained) -> list[str]:
    threads = "1 torch thread" if trained.threads == 1 else f"{trained.threads} torch threads"
    lines = [
        f"{trained.workload}: {trained.text}, {trained.parameters:,} parameters, "
        f"{trained.gradient_bytes:,} bytes of gradients; batch {trained.batch} and {threads} a rank, "
        f"{trained.steps} steps of each",
        _line(HEADINGS),
        *(_line(_cells(row)) for row in rows_of(trained)),
    ]
    for name, ratio in ratios_to_ring(trained).items():
        lines.append(f"step of {name} / step of ring: {ratio_text(ratio)}")
    lines += [f"{name} is left out: {why}" for name, why in trained.absent.items()]
    return lines


def _cells(row: Row) -> list[str]:
    times = (row.step_us, row.step_us_min, row.step_us_p99, row.not_hidden_us)
    return [
        row.contender,
        *("-" if us is None else f"{us / 1e3:.3f}" for us in times),
        f"{row.samples_per_s:.1f}",
        ratio_text(row.over_unreduced),
    ]


def _line(cells: Sequence[str]) -> str:
    first, *others = cells
    return first.ljust(WIDTHS[0]) + "".join(
        cell.rjust(width) for cell, width in zip(others, WIDTHS[1:], strict=True)
    )


def document(host: dict[str, Any], device: str, trained: Sequence[Trained]) -> Any:
    """What the JSON file holds; times in microseconds."""
    return as_json(
        {
            "machine": host,
            "device": device,
            "world": trained[0].world,
            "models": [_model(each) for each in trained],
        }
    )


def _model(trained: Trained) -> dict[str, Any]:
    return {
        "model": trained.workload,
        "text": trained.text,
        "parameters": trained.parameters,
        "gradient_bytes": trained.gradient_bytes,
        "batch_a_rank": trained.batch,
        "threads_a_rank": trained.threads,
        "steps": trained.steps,
        "rows": [
            {**dataclasses.asdict(row), "check": trained.checks.get(row.contender)}
            for row in rows_of(trained)
        ],
        "over_ring": ratios_to_ring(trained),
        "absent": trained.absent,
    }
