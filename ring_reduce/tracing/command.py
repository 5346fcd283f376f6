"""``ring-reduce trace``: a few calls, or steps of DDP, of all ranks as a timeline. Free of torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ring_reduce.arrays import ELEMENT_TYPES, INTEGERS
from ring_reduce.benchmarks.flags import size
from ring_reduce.normalization import DIVIDE_BY_COUNT, MEAN, SUM, WEIGHTED_MEAN, Normalization
from ring_reduce.options import add_world, terminate_as_exit, whole_number, writable_file
from ring_reduce.shm import ALGORITHMS

from . import nsys
from .chrome import write
from .recorder import DEFAULT_LIMIT, MOST_EVENTS, RankTrace
from .summary import RankSummary, summarize

COULD_NOT_TRACE = 2
MOST_RANKS = 16
LOOK_NS = 1000  # so long a look takes at a counter that had arrived, which is no wait
DEFAULT_CALLS, DEFAULT_STEPS = 3, 1
FLOATS = [name for name in ELEMENT_TYPES if name not in INTEGERS]
NORMALIZATIONS = {repr(each): each for each in (SUM, MEAN, DIVIDE_BY_COUNT, WEIGHTED_MEAN)}
EPILOG = """\
Open FILE at https://ui.perfetto.dev or chrome://tracing: a process is a rank, a thread a lane. docs/profiling.md
tells how to read it.
"""


@dataclass(frozen=True)
class Orders:
    """What every rank is to do."""

    world: int
    nbytes: int  # of the tensor, or of the model's gradients
    dtype: str
    normalization: Normalization
    algorithm: str
    calls: int  # traced; with ddp, steps
    ddp: bool
    late: int | None  # the rank that starts every call late
    limit: int  # events a lane
    store_path: str  # of a file of the job's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce trace``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "--out", type=writable_file, metavar="FILE.json", help="the trace file to write (needed)"
    )
    add_world(parser, MOST_RANKS)
    parser.add_argument(
        "--size",
        type=size,
        default="4M",
        metavar="BYTES",
        help="of the tensor, such as 64K or 4M; with --ddp about those of all gradients (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=FLOATS, default="float32", help="(default: %(default)s)")
    parser.add_argument(
        "--normalization", choices=NORMALIZATIONS, default="MEAN", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default="auto", help="of the ring (default: %(default)s)"
    )
    _add_what(parser)
    # With options of its own, none of which are those above.
    commands = parser.add_subparsers(title="what nsys has recorded", metavar="")
    command = commands.add_parser("nsys", help=nsys.DESCRIPTION, description=nsys.DESCRIPTION)
    nsys.add_arguments(command)
    command.set_defaults(run=nsys.run)


def _add_what(parser: argparse.ArgumentParser) -> None:
    """What is traced, and how much of it."""
    parser.add_argument(
        "--ddp",
        action="store_true",
        help="trace training steps of a small DDP model with the ring's hook, not calls of all_reduce",
    )
    parser.add_argument(
        "--calls",
        type=whole_number(1, 1000),
        metavar="N",
        help=f"calls to trace, or steps with --ddp, after some to warm up (default: {DEFAULT_CALLS}, or "
        f"{DEFAULT_STEPS} step)",
    )
    parser.add_argument(
        "--late",
        type=whole_number(0, MOST_RANKS - 1),
        metavar="RANK",
        help="let this rank begin every call 20 ms late, to see what a straggler looks like",
    )
    parser.add_argument(
        "--limit",
        type=whole_number(1, MOST_EVENTS),
        default=DEFAULT_LIMIT,
        metavar="N",
        help="events of each lane to keep (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Traces, writes the file and prints a summary: 0, or 2 if it could not be traced."""
    from ring_reduce.processes import RanksFailed

    if args.out is None:
        print("ring-reduce trace: --out FILE.json is missing, the trace file to write", file=sys.stderr)
        return COULD_NOT_TRACE
    if args.late is not None and args.late >= args.world:
        print(
            f"ring-reduce trace: --late {args.late}: there is no such rank among {args.world}",
            file=sys.stderr,
        )
        return COULD_NOT_TRACE
    try:
        with terminate_as_exit():
            traces = _run_ranks(args)
    except RanksFailed as error:
        print(f"ring-reduce trace: {error}", file=sys.stderr)
        return COULD_NOT_TRACE
    write(args.out, traces)
    print(format_summary(traces))
    print(f"{args.out}: open it at ui.perfetto.dev")
    return 0


def _run_ranks(args: argparse.Namespace) -> list[RankTrace]:
    from ring_reduce.processes import run_ranks

    with os.fdopen(os.memfd_create("ring-reduce-trace"), "wb") as store:
        orders = Orders(
            world=args.world,
            nbytes=args.size,
            dtype=args.dtype,
            normalization=NORMALIZATIONS[args.normalization],
            algorithm=args.algorithm,
            calls=args.calls or (DEFAULT_STEPS if args.ddp else DEFAULT_CALLS),
            ddp=args.ddp,
            late=args.late,
            limit=args.limit,
            store_path=f"/proc/self/fd/{store.fileno()}",
        )
        traces: list[RankTrace] = run_ranks(
            args.world,
            f"{__package__}.rank:run_rank",
            orders,
            None,
            timeout=None,
            show=lambda _: None,
            inherited=(store.fileno(),),
        )
    return traces


def format_summary(traces: Sequence[RankTrace]) -> str:
    """A line for each rank, and one for each whose events did not all fit."""
    lines = ["rank   in calls  waiting  passes  pushing  longest wait"]
    lines += [_line(summary) for summary in summarize(traces)]
    for trace in traces:
        if trace.dropped:
            lines.append(f"rank {trace.rank}: {trace.dropped} later events did not fit; raise the limit")
    return "\n".join(lines)


def _line(summary: RankSummary) -> str:
    shares = "  ".join(
        f"{summary.percent(category):{width}.1f}%"
        for category, width in (("wait", 6), ("pass", 5), ("push", 6))
    )
    return f"{summary.rank:4}  {summary.calls_ns / 1e6:6.2f} ms  {shares}  {_longest(summary)}"


def _longest(summary: RankSummary) -> str:
    wait = summary.longest_wait
    if wait is None:
        return "-"
    where = f" (call {wait.call}, step {wait.step}, segment {wait.segment})" if wait.step >= 0 else ""
    cause = f", held up by rank {summary.held_up_by}"
    if wait.duration_ns <= LOOK_NS or summary.held_up_by == wait.peer:
        cause = ""
    elif summary.held_up_by == summary.rank:
        cause = ", which had long pushed: no core was free here"
    return f"{wait.duration_ns / 1e3:.1f} us for rank {wait.peer}{where}{cause}"
