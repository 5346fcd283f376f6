"""What the options of several sub-commands have in common, and how SIGTERM ends a command. Free of torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

TERMINATED = 128 + signal.SIGTERM


@contextlib.contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Lets SIGTERM end the ranks and remove their folder on its way."""

    def leave(_number: int, _frame: object) -> None:
        raise SystemExit(TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return parse


def add_world(parser: argparse.ArgumentParser, most: int, *, least: int = 1, default: int = 2) -> None:
    """``--world``, of the commands that start their ranks themselves."""
    parser.add_argument(
        "--world",
        type=whole_number(least, most),
        default=default,
        metavar="N",
        help="ranks, one process each (default: %(default)s)",
    )


def readable_file(text: str) -> Path:
    """The type of an option that is a path to read."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


def writable_file(text: str) -> Path:
    """The type of an option that is a path to write, known before any work rather than after it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, not a file")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path.absolute().parent)!r} does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return path
