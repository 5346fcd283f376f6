"""``ring-reduce demo``: trains a small network on real images over the ring, and measures what the README claims.

The parent process (this module, report.py, plot.py) needs no torch; rank.py, and what only it imports, runs in the
ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ring_reduce.options import add_world, terminate_as_exit, whole_number, writable_file

if TYPE_CHECKING:
    from .data import Job
    from .results import Result

DEFAULT_WORLD = 4
DEFAULT_EPOCHS = 8
# The smallest batch of an epoch, 29 images, still has one for each rank.
MOST_RANKS = 16
MOST_EPOCHS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce demo``."""
    add_world(parser, MOST_RANKS, default=DEFAULT_WORLD)
    parser.add_argument(
        "--device",
        type=_device,
        default="auto",
        metavar="{auto,cpu,cuda}",
        help="where the tensors lie; the demo runs on CPUs, so auto is cpu (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=whole_number(1, MOST_EPOCHS),
        default=DEFAULT_EPOCHS,
        metavar="N",
        help="passes over the training images; with fewer than the default the accuracy isn't judged "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--plot", type=writable_file, metavar="FILE", help="write a picture of the results, a PNG"
    )
    parser.add_argument(
        "--json", type=writable_file, metavar="FILE", help="write all that was measured, as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo: 0 when everything came out as it must, else 1."""
    # Imported before any work, so that a package that is missing is said at once.
    from ring_reduce.processes import RanksFailed, run_ranks

    if args.plot is not None:
        from .plot import write_plot

    started = time.perf_counter()
    with terminate_as_exit(), _job(args) as (job, store):
        _show(
            f"ring-reduce demo: starting {job.world} rank{'s' * (job.world > 1)} on {job.cores} cores, "
            f"{len(job.digits.train_labels):,} training and {len(job.digits.test_labels)} test images"
        )
        try:
            result = run_ranks(
                job.world,
                f"{__package__}.rank:run_rank",
                job,
                None,
                timeout=None,
                show=lambda text: _show(f"[{time.perf_counter() - started:5.1f} s] {text}"),
                inherited=(store,),
            )
        except RanksFailed as error:
            print(f"ring-reduce demo: {error}", file=sys.stderr)
            return 1
    seconds = time.perf_counter() - started
    failures = _report(args, result, seconds=seconds)
    if args.plot is not None:
        write_plot(args.plot, result)
        _show(f"picture: {args.plot}")
    return 1 if failures else 0


def _report(args: argparse.Namespace, result: Result, *, seconds: float) -> list[str]:
    from .report import Style, as_json, find_failures, format_summary

    failures = find_failures(result, accuracy_counts=args.epochs >= DEFAULT_EPOCHS)
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    _show(format_summary(result, failures, seconds=seconds, style=Style(coloured=coloured)))
    if args.json is not None:
        text = json.dumps(as_json(result, failures, seconds=seconds), indent=2, allow_nan=False)
        args.json.write_text(text + "\n", encoding="utf-8")
        _show(f"JSON: {args.json}")
    return failures


@contextlib.contextmanager
def _job(args: argparse.Namespace) -> Iterator[tuple[Job, int]]:
    """The ranks' job, and the descriptor of the file in which they meet: it has no name that could be left, or go."""
    from .data import Job, load_digits

    digits = load_digits()
    with os.fdopen(os.memfd_create("ring-reduce-demo"), "wb") as store:
        cores = len(os.sched_getaffinity(0))
        yield Job(args.world, args.epochs, cores, f"/proc/self/fd/{store.fileno()}", digits), store.fileno()


def _show(text: str) -> None:
    print(text, flush=True)


def _device(text: str) -> str:
    if text == "cuda":
        raise argparse.ArgumentTypeError("this version's ring runs on CPU only: use --device cpu")
    if text not in ("auto", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, cpu, cuda")
    return "cpu"
