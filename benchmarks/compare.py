"""The ring beside Gloo and beside a plain copy, in one interleaved run.

    python -m ring_reduce.benchmarks.compare --world 2 --sizes 1K,16K,256K,1M,4M,64M --dtype float32 --json FILE

Ratios are ratios of medians with their bootstrap 95 % interval. "hop" is what a word takes from core to core
(10th to 90th percentile). The last column holds the project's own targets, which a loaded machine misses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .measure import Measurement, Plan, measure
from .peers import PEERS
from .report import (
    KB,
    MB,
    RATIOS,
    Comparison,
    compare,
    document,
    last_level_cache_bytes,
    machine,
)
from .summary import Ratio

UNITS = {"": 1, "K": KB, "M": MB, "G": KB * MB}
DTYPES = ("float64", "float32", "float16", "bfloat16")
MOST_ROTATED_BYTES = 256 * MB
COLUMNS = [
    "size",
    "hop ns",
    "ring us",
    "p99",
    "gloo us",
    "p99",
    "copy us",
    "gloo/ring",
    "ring/copy",
    "MEAN/SUM",
    "targets",
]
WIDTHS = (6, 9, 10, 10, 10, 10, 10, 22, 22, 22, 0)


def parse_size(text: str) -> int:
    """Bytes of ``16K``, ``4M``, ``1G`` or a plain number."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdigit() or unit not in UNITS or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"size {text!r}: give positive bytes such as 4096, 16K or 64M")
    return int(digits) * UNITS[unit]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of a comma-separated list; each size once."""
    sizes = tuple(parse_size(part) for part in text.split(","))
    if len(set(sizes)) != len(sizes):
        raise argparse.ArgumentTypeError(f"sizes {text!r}: one of them is there twice")
    return sizes


def parse_peers(text: str) -> tuple[str, ...]:
    """Names of peers, each known."""
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"peer {unknown[0]!r} is unknown; there are {', '.join(PEERS)}")
    return names


def parser() -> argparse.ArgumentParser:
    """The command line."""
    prog = "python -m ring_reduce.benchmarks.compare"
    result = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").partition("\n")[0])
    result.add_argument("--world", type=int, default=2, help="number of ranks (default 2)")
    result.add_argument(
        "--sizes", type=parse_sizes, default="1K,16K,256K,1M,4M,64M", help="bytes, as in 16K,4M"
    )
    result.add_argument("--dtype", choices=DTYPES, default="float32")
    result.add_argument(
        "--peers", type=parse_peers, default="ring,gloo,copy", help="which ones, of " + ", ".join(PEERS)
    )
    result.add_argument("--calls", type=int, help="timed calls of each (default: by size, 40 to 1600)")
    result.add_argument(
        "--rotate",
        type=parse_size,
        help="rotate buffers of together so many bytes a rank (default: twice the last-level cache, at most 256M)",
    )
    result.add_argument(
        "--no-spread", action="store_true", help="leave it to the system which cores the ranks start on"
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write rows and ratios to FILE")
    return result


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the command line asks for. Raises ``ValueError`` for one that can't be measured."""
    if options.world < 1:
        raise ValueError(f"--world {options.world}: at least one rank is needed")
    if options.calls is not None and options.calls < 1:
        raise ValueError(f"--calls {options.calls}: at least one call is needed")
    rotate = options.rotate or min(MOST_ROTATED_BYTES, 2 * last_level_cache_bytes())
    spread = not options.no_spread
    return Plan(options.world, options.sizes, options.dtype, options.peers, options.calls, rotate, spread)


def size_text(nbytes: int) -> str:
    """``16K`` for 16384."""
    for unit, factor in reversed(UNITS.items()):
        if nbytes % factor == 0 and nbytes >= factor:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def ratio_text(ratio: Ratio | None) -> str:
    """Value and interval; ``?`` marks a spread that leaves nothing to compare."""
    if ratio is None:
        return "-"
    mark = "?" if ratio.is_meaningless else ""
    return f"{ratio.value:.3g}{mark} [{ratio.low:.3g}, {ratio.high:.3g}]"


def line_of(comparison: Comparison) -> list[str]:
    """The cells of one size."""
    low, _, high = comparison.hop_ns
    cells = [size_text(comparison.nbytes), "-" if math.isnan(low) else f"{low:.0f}-{high:.0f}"]
    for label in ("ring SUM", "gloo SUM", "copy SUM"):
        summary = comparison.summaries.get(label)
        cells.append("-" if summary is None else f"{summary.median:.1f}")
        if label != "copy SUM":
            cells.append("-" if summary is None else f"{summary.p99:.1f}")
    cells += [ratio_text(comparison.ratios.get(name)) for name in RATIOS]
    return [*cells, verdict(comparison)]


def verdict(comparison: Comparison) -> str:
    """The targets that were missed, by name, or that none was."""
    if not comparison.met:
        return "-"
    missed = [target for target, met in comparison.met.items() if not met]
    return "MISSED " + ", ".join(missed) if missed else f"all {len(comparison.met)} met"


def table(plan: Plan, measurements: Sequence[Measurement]) -> str:
    """All sizes, a line each, under a heading that says what was measured where."""
    host = machine()
    heading = (
        f"world {plan.world}, {plan.dtype}, in place, on {host['cores']} cores ({host['processor']}), "
        f"torch {host['torch']}; buffers rotated over {size_text(plan.rotate_bytes)} a rank; "
        f"ranks {'spread over cores' if plan.spread and plan.world <= host['cores'] else 'not spread'}"
    )
    lines = [COLUMNS, *(line_of(compare(plan, measurement)) for measurement in measurements)]
    body = ["  ".join(cell.rjust(width) for cell, width in zip(line, WIDTHS, strict=True)) for line in lines]
    wrong = [
        f"WRONG RESULTS: {label} at {size_text(measurement.nbytes)}: {number} elements"
        for measurement in measurements
        for label, number in measurement.wrong.items()
        if number
    ]
    return "\n".join([heading, *body, *wrong])


def print_progress(text: str) -> None:
    """A line on stderr, so that piped tables stay clean."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes. The exit status tells wrong results, not missed targets."""
    command = parser()
    options = command.parse_args(arguments)
    try:
        plan = plan_of(options)
    except ValueError as error:
        command.error(str(error))
    load = os.getloadavg()[0]
    measurements = measure(plan, print_progress if sys.stderr.isatty() else None)
    print(table(plan, measurements))
    if options.json is not None:
        options.json.write_text(json.dumps(document(plan, measurements, load), indent=1) + "\n")
    return int(any(number for measurement in measurements for number in measurement.wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
