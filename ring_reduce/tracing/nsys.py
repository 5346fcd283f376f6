"""``ring-reduce trace nsys``: sums an export of nsys into time waiting, moving and reducing, by call. Free of torch."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ring_reduce.options import readable_file, writable_file

if TYPE_CHECKING:
    from .nsys_export import DeviceWork, RingRange

NO_EXPORT = 2
DESCRIPTION = "sum an nsys report into time waiting, moving and reducing, by call"
EPILOG = """\
FILE.sqlite comes from

  RING_REDUCE_NVTX=1 nsys profile --trace=cuda,nvtx,osrt --output=ddp torchrun ... train.py
  nsys export --type sqlite ddp.nsys-rep

docs/profiling.md tells what the columns mean.
"""
HEADS = (
    "calls",
    "host ms",
    "median us",
    "device ms",
    "ring kernel",
    "reducing",
    "moving",
    "other",
    "waiting",
)


@dataclass(frozen=True)
class DeviceTime:
    """Of the device work of some calls, added up. Categories may overlap; ``waiting_ns`` overlaps none."""

    span_ns: int  # from the first start of each call to its last end
    ring_kernel_ns: int  # waits, moves and reduces in one: it can't be split from outside
    reducing_ns: int
    moving_ns: int
    other_ns: int
    waiting_ns: int  # of the span, when nothing of the call ran


@dataclass(frozen=True)
class CallSummary:
    """All ranges of one name in one process."""

    pid: int
    name: str
    calls: int
    host_ns: int  # in the ranges
    host_ns_median: float
    device: DeviceTime | None  # None where nothing was launched in them, or it can't be told


def summarize_ranges(ranges: Iterable[RingRange]) -> list[CallSummary]:
    """One for each process and name, in the order of their first start; ranges that never ended are left out."""
    groups: dict[tuple[int, str], list[RingRange]] = defaultdict(list)
    for each in ranges:
        if each.end_ns is not None:
            groups[each.process, each.name].append(each)
    # By process; stable, so that its ranges stay in their order.
    return [_summary(groups[key]) for key in sorted(groups, key=lambda key: key[0])]


def _summary(group: Sequence[RingRange]) -> CallSummary:
    host_ns = [each.end_ns - each.start_ns for each in group if each.end_ns is not None]
    return CallSummary(
        pid=group[0].pid,
        name=group[0].name,
        calls=len(group),
        host_ns=sum(host_ns),
        host_ns_median=statistics.median(host_ns),
        device=_device_time([each.work for each in group if each.work]),
    )


def _device_time(calls: Sequence[Sequence[DeviceWork]]) -> DeviceTime | None:
    if not calls:
        return None
    span_ns = busy_ns = 0
    by_category: dict[str, int] = defaultdict(int)
    for work in calls:
        span_ns += max(each.end_ns for each in work) - min(each.start_ns for each in work)
        busy_ns += _union_ns(work)
        for category in {each.category for each in work}:
            by_category[category] += _union_ns(each for each in work if each.category == category)
    return DeviceTime(
        span_ns=span_ns,
        ring_kernel_ns=by_category["ring_kernel"],
        reducing_ns=by_category["reducing"],
        moving_ns=by_category["moving"],
        other_ns=by_category["other"],
        waiting_ns=span_ns - busy_ns,
    )


def _union_ns(work: Iterable[DeviceWork]) -> int:
    """How long at least one of them ran."""
    total_ns, covered_until_ns = 0, None
    for each in sorted(work, key=lambda each: each.start_ns):
        if covered_until_ns is None or each.start_ns > covered_until_ns:
            covered_until_ns = each.start_ns
        total_ns += max(0, each.end_ns - covered_until_ns)
        covered_until_ns = max(covered_until_ns, each.end_ns)
    return total_ns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce trace nsys``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("file", type=readable_file, metavar="FILE.sqlite", help="what nsys export wrote")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write the sums, in nanoseconds")


def run(args: argparse.Namespace) -> int:
    """Reads, sums and prints: 0, or 2 if the file is no export with ranges of a ring."""
    from .nsys_export import ExportError, read_ranges

    path: Path = args.file
    try:
        ranges = read_ranges(path)
    except ExportError as error:
        print(f"ring-reduce trace nsys: {error}", file=sys.stderr)
        return NO_EXPORT
    summaries = summarize_ranges(ranges)
    unfinished = sum(each.end_ns is None for each in ranges)
    if args.json is not None:
        content = {"calls": [asdict(each) for each in summaries], "unfinished": unfinished}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print("\n".join([*format_table(summaries), *_notes(summaries, unfinished)]))
    return 0


def format_table(summaries: Sequence[CallSummary]) -> list[str]:
    """The lines of a table for each process. All times but the median are totals in milliseconds."""
    width = max((len(each.name) for each in summaries), default=0)
    lines: list[str] = []
    pid: int | None = None
    for each in summaries:
        if each.pid != pid:
            pid = each.pid
            lines.append("  ".join([f"process {pid}".ljust(width), *HEADS]))
        cells = [str(each.calls), f"{each.host_ns / 1e6:.3f}", f"{each.host_ns_median / 1e3:.1f}"]
        times = asdict(each.device).values() if each.device is not None else ()
        cells += [f"{time_ns / 1e6:.3f}" for time_ns in times] or ["-"] * 6
        aligned = [cell.rjust(len(head)) for cell, head in zip(cells, HEADS, strict=True)]
        lines.append("  ".join([each.name.ljust(width), *aligned]))
    return lines


def _notes(summaries: Sequence[CallSummary], unfinished: int) -> list[str]:
    """What the reader of this table has to know."""
    notes = []
    if any(each.device is not None and each.device.ring_kernel_ns for each in summaries):
        notes.append("A ring kernel waits, moves and reduces in one: nsys can't tell how long for each.")
    if any(each.device is None and not each.name.startswith("ring_reduce bucket ") for each in summaries):
        notes.append(
            "Of a call that launched nothing on a device nsys sees no more than this: ring-reduce trace splits those "
            "over shared memory."
        )
    if unfinished:
        notes.append(f"Not in the sums: {unfinished} that had not ended when the profile did.")
    return notes
