"""The command line, ``ring-reduce``: each sub-command is a module with ``add_arguments(parser)`` and ``run(args)``.

Only the module of the sub-command that was asked for is imported, so that ``--help`` needs no optional package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

from ring_reduce.errors import RingError

# What a shell reports for a program that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED = 130
# A command that failed by itself. Never 1, which is the answer of a command that ran: verify's "wrong", say.
FAILED = 2


class Command(NamedTuple):
    """A sub-command, before its module is imported."""

    module: str
    summary: str
    extra: str | None  # of the package; holds what the module needs beyond ring_reduce itself


COMMANDS = {
    "bench": Command(
        "ring_reduce.benchmarks.command",
        "measure all-reduces side by side: the ring, Gloo, MPI and others, and a plain copy",
        "bench",
    ),
    "demo": Command(
        "ring_reduce.demo",
        "train a small network on real images over the ring, and check every gradient",
        "demo",
    ),
    "doctor": Command(
        "ring_reduce.doctor", "say what this machine can do, and why not where it cannot", None
    ),
    "soak": Command(
        "ring_reduce.soak.command",
        "make random calls and random faults for as long as you like, and check every result",
        None,
    ),
    "trace": Command(
        "ring_reduce.tracing.command",
        "show what every rank waits for and does, call by call, as a timeline for Perfetto",
        None,
    ),
    "verify": Command(
        "ring_reduce.verification.command",
        "check the divisor of a training step against one process with the whole batch",
        None,
    ),
}


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser; only the sub-command `chosen` has its options."""
    parser = argparse.ArgumentParser(
        prog="ring-reduce",
        description="A ring all-reduce over shared memory whose divisor is explicit.",
        epilog="ring-reduce COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"ring-reduce {version('ring-reduce')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, description=command.summary)
        if name == chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def run_command(argv: Sequence[str]) -> int:
    """Parses and runs; the options before a sub-command take no values, so the first other word is the command."""
    chosen = next((word for word in argv if not word.startswith("-")), None)
    try:
        args = build_parser(chosen).parse_args(argv)
        return int(args.run(args))
    except ModuleNotFoundError as error:
        command = COMMANDS.get(chosen or "")
        if command is None or command.extra is None or (error.name or "").startswith("ring_reduce"):
            raise
        print(
            f"ring-reduce {chosen}: the module {error.name} is missing: "
            f"pip install '.[{command.extra}]' in ring_reduce's source",
            file=sys.stderr,
        )
        return FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point: errors of a ring and of the system are one line, and Ctrl-C leaves no traceback."""
    try:
        status = run_command(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:  # closed, by >&-
            sys.stdout.flush()
    except RingError as error:
        return _say(str(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except OSError as error:  # a full disk, a reader that is gone, no more open files
        _drop_output()
        return _say(str(error), FAILED)
    except Exception:
        return _say(traceback.format_exc().rstrip(), FAILED, lines=True)
    return status


def _say(text: str, status: int, *, lines: bool = False) -> int:
    with contextlib.suppress(OSError):  # stderr may be what failed
        print(f"ring-reduce: {text if lines else ' '.join(text.split())}", file=sys.stderr)
    return status


def _drop_output() -> None:
    """What stdout could not take, it would try again at the end of the process, and end that with 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
