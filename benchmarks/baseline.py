"""A run beside an earlier one, row by row: what became slower or faster by more than the spread of both."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .peers import Op
from .plan import NCCL_NAMES
from .report import LIMIT, Row
from .table import figure

KEY = ("backend", "world", "dtype", "bytes", "op", "in_place")
TIMES = ("time_us_low", "time_us_high", "copy_us")  # null where they are not known
# Differ by what was asked for, and rows that don't match are left out anyway.
OF_NO_MATTER = {"load_at_start", "sizes", "dtypes", "dtype", "ops", "backends", "peers", "timeout", "world"}


class BadBaseline(ValueError):
    """The file isn't one that ``ring-reduce bench --json`` wrote; the text says what it lacks."""


def read_baseline(path: Path) -> dict[str, Any]:
    """An earlier run's document. Raises ``BadBaseline``."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadBaseline(f"{str(path)!r} can't be read: {error}") from error
    needed = {*KEY, "time_us"}
    try:
        right = all(needed <= set(row) for row in found["rows"]) and {"machine", "plan"} <= set(found)
    except (TypeError, KeyError):
        right = False
    if not right:
        raise BadBaseline(f"{str(path)!r} is no file of ring-reduce bench --json")
    for row in found["rows"]:
        for name in ("time_us", *(name for name in TIMES if row.get(name) is not None)):
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise BadBaseline(
                    f"{str(path)!r}: a row of {row['backend']} has the {name} {value!r}: no time"
                )
    return dict(found)


def verdict(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """``slower`` or ``faster`` where the 95 % intervals of the two medians don't meet; ``?`` where one isn't known."""
    bounds: list[Any] = [row.get(name) for row in (now, then) for name in ("time_us_low", "time_us_high")]
    if None in bounds:
        return "?"
    low, high, old_low, old_high = bounds
    return "slower" if low > old_high else "faster" if high < old_low else "same"


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """How the two machines and plans differ, a line each."""
    lines = []
    for part in ("machine", "plan"):
        for name in now[part].keys() & then[part].keys() - OF_NO_MATTER:
            if now[part][name] != then[part][name]:
                lines.append(f"# the {part} differs: {name} was {then[part][name]}, is {now[part][name]}")
    return sorted(lines)


def compare_with(then: Mapping[str, Any], now: Mapping[str, Any], ours: Sequence[Row]) -> list[str]:
    """The lines of a table with all rows that both runs have."""
    earlier = {tuple(row[name] for name in KEY): row for row in then["rows"]}
    lines = ["#", "# Beside the baseline: medians in us; slower, faster: the 95 % intervals don't meet"]
    lines += differences(now, then)
    lines.append(
        f"# {'backend':>10} {'size':>11} {'type':>9} {'redop':>6} {'place':>6} {'then':>9} {'now':>9} {'now/then':>9}"
        f" {'copy now/then':>14}"
    )
    verdicts = []
    for row in ours:
        values = dataclasses.asdict(row)
        old = earlier.get(tuple(values[name] for name in KEY))
        if old is None or row.backend == LIMIT:
            continue
        verdicts.append(verdict(values, old))
        copies = [row.copy_us, old.get("copy_us")]
        copy = "-" if None in copies else f"{copies[0] / copies[1]:.3f}"
        lines.append(
            f"  {row.backend:>10} {row.bytes:>11} {NCCL_NAMES[row.dtype]:>9} {Op[row.op].value:>6} "
            f"{'in' if row.in_place else 'out':>6} {figure(old['time_us']):>9} {figure(row.time_us):>9} "
            f"{row.time_us / old['time_us']:>9.3f} {copy:>14} {verdicts[-1]}"
        )
    told = {name: verdicts.count(name) for name in ("slower", "faster", "same", "?")}
    return [
        *lines,
        f"# {len(verdicts)} rows in both: " + ", ".join(f"{n} {name}" for name, n in told.items()),
    ]
