"""``ring-reduce verify``: checks the divisor of a user's file in processes of its own. Free of torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ring_reduce.options import add_world, readable_file, terminate_as_exit, whole_number, writable_file

if TYPE_CHECKING:
    from .report import Report

RIGHT, WRONG, COULD_NOT_TELL = 0, 1, 2
MOST_RANKS = 64
EPILOG = """\
FILE defines four functions:
  model()                               the torch.nn.Module, the same on every rank (the seed is 0)
  batches(rank, world, micro_batches)   the list of this rank's micro-batches: tensors, or tuples, lists, dicts of
                                        them; dim 0 is the sample (the seed is another on each rank)
  losses(model, batch)                  a 1-D tensor, one loss for each sample or token that counts
  step(model, batches, job)             forward, backward and reduction; leaves the gradients it would step with in
                                        the model, returns the loss it logs or None; job.rank, job.world,
                                        job.micro_batches (planned)
A Gloo process group is there already. Sizes without a common divisor, such as 2 ranks, 3 micro-batches and 5 samples,
leave each factor of a full group one explanation.

exit status: 0 the gradient is right, 1 it is wrong, 2 could not tell
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce verify``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("file", type=readable_file, metavar="FILE", help="a Python file, see below")
    add_world(parser, MOST_RANKS)
    parser.add_argument(
        "--micro-batches",
        type=whole_number(1, 10_000),
        default=3,
        metavar="N",
        help="of a group, on each rank (default: %(default)s)",
    )
    parser.add_argument(
        "--short",
        type=whole_number(0, 10_000),
        metavar="K",
        help="check a short group of the first K micro-batches too; 0: don't (default: one less than planned, or "
        "two less where one less is the number of ranks and more than 2)",
    )
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write the reports, as JSON")
    _add_limits(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """How much is compared, how closely, and for how long."""
    parser.add_argument(
        "--sample",
        type=whole_number(1, 10**9),
        metavar="N",
        help="elements of each parameter to compare (default: all)",
    )
    parser.add_argument(
        "--tolerance",
        type=_fraction,
        metavar="X",
        help="relative difference that counts as right (default: the root of the type's epsilon)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="seconds for everything (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Checks and prints. 0: right, 1: wrong, 2: could not tell."""
    from ring_reduce.processes import RanksFailed

    lengths = _lengths(args)
    if not lengths:
        return COULD_NOT_TELL
    try:
        with terminate_as_exit(), _progress() as show:
            reports = _run_ranks(args, lengths, show)
    except RanksFailed as error:
        print(f"ring-reduce verify: {error}", file=sys.stderr)
        failed: dict[str, Any] = {
            "exit_status": COULD_NOT_TELL,
            "right": None,
            "error": str(error),
            "groups": [],
        }
        _write_json(args.json, {"file": str(args.file), **failed})
        return COULD_NOT_TELL
    status = _worst([report.exit_status for report in reports])
    for length, report in zip(lengths, reports, strict=True):
        print(f"{_heading(args, length)}\n\n{report}\n", flush=True)
    groups = [
        {"micro_batches": length, **report.to_dict()} for length, report in zip(lengths, reports, strict=True)
    ]
    right = {RIGHT: True, WRONG: False, COULD_NOT_TELL: None}[status]
    _write_json(args.json, {"file": str(args.file), "exit_status": status, "right": right, "groups": groups})
    return status


def _lengths(args: argparse.Namespace) -> tuple[int, ...]:
    """How many micro-batches each check has: the planned, and a short group's. Empty, and says why, if none."""
    planned: int = args.micro_batches
    short: int = args.short if args.short is not None else _short_by_default(planned, args.world)
    if short < planned:
        return (planned, short) if short else (planned,)
    print(
        f"ring-reduce verify: --short is {short} and --micro-batches {planned}; a short group has fewer",
        file=sys.stderr,
    )
    return ()


def _short_by_default(planned: int, world: int) -> int:
    """One less than planned; two less where that is the world and more than one is left: k would look like n."""
    short = planned - 1
    return short - 1 if short == world and short > 2 else short


def _run_ranks(
    args: argparse.Namespace, lengths: tuple[int, ...], show: Callable[[str], None]
) -> list[Report]:
    from ring_reduce.processes import run_ranks

    from .file import Orders

    show(f"starting {args.world} rank{'s' * (args.world > 1)}")
    # A file store waits forever for a file that is missing, as one with a name may be.
    with os.fdopen(os.memfd_create("ring-reduce-verify"), "wb") as store:
        orders = Orders(
            file=str(args.file.absolute()),
            world=args.world,
            micro_batches=args.micro_batches,
            lengths=lengths,
            sample=args.sample,
            tolerance=args.tolerance,
            timeout=args.timeout,
            store_path=f"/proc/self/fd/{store.fileno()}",
        )
        main = f"{__package__}.rank:run_rank"
        reports: list[Report] = run_ranks(
            args.world, main, orders, None, timeout=args.timeout, show=show, inherited=(store.fileno(),)
        )
    return reports


def _heading(args: argparse.Namespace, length: int) -> str:
    group = f"{length} micro-batch{'es' * (length != 1)} on each of {args.world} rank{'s' * (args.world > 1)}"
    if length == args.micro_batches:
        return f"{args.file}: {group}"
    return f"{args.file}: a short group, {group} where {args.micro_batches} are planned"


def _worst(statuses: Sequence[int]) -> int:
    """Wrong is worse than untold."""
    return max(statuses, key=(RIGHT, COULD_NOT_TELL, WRONG).index)


def _write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: one line that changes on a terminal, else lines."""
    started = time.perf_counter()
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(text: str) -> None:
        line = f"[{time.perf_counter() - started:5.1f} s] {text}"
        print(
            f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True
        )

    try:
        yield show
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value
