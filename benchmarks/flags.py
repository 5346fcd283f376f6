"""The options of ``ring-reduce bench``, which are nccl-tests' where it has them. Free of torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ring_reduce.options import whole_number, writable_file

from .peers import PEERS, Op, UnknownPeer, peer_class
from .plan import INTEGERS, ITEM_BYTES, NCCL_NAMES
from .table import UNITS

MB = 1 << 20
MOST_RANKS = 64
MOST_CALLS = 100_000
DEFAULT_LEAST, DEFAULT_MOST, DEFAULT_FACTOR = 1 << 10, 64 * MB, 4
ALL = "all"
DTYPE_NAMES = {
    **{name: name for name in NCCL_NAMES},
    **{nccl_name: name for name, nccl_name in NCCL_NAMES.items()},
}
OP_NAMES = {op.value: op.name for op in Op}
EPILOG = """\
Sizes may end in K, M or G. Lists are separated by commas. What is printed is nccl-tests' table for each backend
(algbw = bytes / time, busbw = algbw * 2(n-1)/n), then all backends beside the ring. Under torchrun, and under mpirun
with RING_REDUCE_BENCH_STORE=HOST:PORT, every process is a rank and rank 0 prints.

exit status: 0, 1 if any result was wrong, 2 if it could not be measured

ring-reduce bench ddp measures training steps, ring-reduce bench scale what dividing costs.
"""

T = TypeVar("T")


class UsageError(ValueError):
    """Options that contradict each other or this machine; the text says which."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All of them; ``size_range`` and the rest of this file read what comes of it."""
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("-b", "--minbytes", type=size, metavar="SIZE", help="smallest size (default: 1K)")
    sizes.add_argument("-e", "--maxbytes", type=size, metavar="SIZE", help="largest size (default: 64M)")
    step = sizes.add_mutually_exclusive_group()
    step.add_argument(
        "-f",
        "--stepfactor",
        type=whole_number(2, 1 << 30),
        metavar="N",
        help="from size to size (default: 4)",
    )
    step.add_argument("-i", "--stepbytes", type=size, metavar="SIZE", help="from size to size, added")
    _add_what(parser.add_argument_group("what is measured"))
    _add_how(parser.add_argument_group("how it is measured"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=writable_file, metavar="FILE", help="write rows and ratios")
    output.add_argument("--plot", type=writable_file, metavar="FILE", help="draw bandwidth and time, a PNG")
    output.add_argument("--baseline", type=Path, metavar="FILE", help="compare with an earlier run's --json")


def _add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-d",
        "--datatype",
        type=_choice(DTYPE_NAMES, list(NCCL_NAMES)),
        default=("float32",),
        metavar="TYPES",
        help=f"of {', '.join(NCCL_NAMES.values())}, or torch's names, or all (default: float)",
    )
    group.add_argument(
        "-o",
        "--op",
        type=_choice(OP_NAMES, list(OP_NAMES.values())),
        default=(Op.SUM.name,),
        metavar="OPS",
        help="of sum, avg, or all; integers are summed only (default: sum)",
    )
    group.add_argument(
        "--backend",
        type=backends,
        metavar="NAMES",
        help=f"of {', '.join(PEERS)}, or module:Class of your own, see ring_reduce.benchmarks.peers.base "
        f"(default: those of ring, gloo, mpi, deepspeed that are installed; on cuda ring, nccl, symm_mem)",
    )
    group.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors lie (default: cpu)"
    )


def _add_how(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--world", type=whole_number(1, MOST_RANKS), metavar="N", help="ranks (default: 2, or the launcher's)"
    )
    group.add_argument(
        "-n",
        "--iters",
        type=whole_number(1, MOST_CALLS),
        metavar="N",
        help="timed calls of each backend at each size, rounded up to whole rounds (default: by size, 40 to 1600)",
    )
    group.add_argument(
        "-w",
        "--warmup_iters",
        type=whole_number(0, MOST_CALLS),
        metavar="N",
        help="calls before them, rounded up to whole rounds (default: one round)",
    )
    group.add_argument(
        "--rotate",
        type=size,
        metavar="SIZE",
        help="rotate buffers of together so many bytes a rank (default: twice the last-level cache, at most 256M)",
    )
    group.add_argument(
        "--together",
        action="store_true",
        help="measure all types and sizes in the same rounds, and compare their time a byte; memory must hold them all",
    )
    group.add_argument(
        "--no-spread", action="store_true", help="leave it to the system which cores the ranks start on"
    )
    group.add_argument(
        "--timeout",
        type=whole_number(1, 86_400),
        default=300,
        metavar="S",
        help="seconds that a rank may hang before it ends the run (default: 300)",
    )


def size(text: str) -> int:
    """Bytes of ``16K``, ``4M``, ``1G`` or a plain number."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or unit not in UNITS or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"size {text!r}: give positive bytes such as 4096, 16K or 64M")
    return int(digits) * UNITS[unit]


def _choice(names: dict[str, str], everything: list[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that lists some of ``names``, or all."""

    def parse(text: str) -> tuple[str, ...]:
        if text == ALL:
            return tuple(everything)
        for word in text.split(","):
            if word not in names:
                raise argparse.ArgumentTypeError(f"{word!r} is unknown; there are {', '.join(names)}, {ALL}")
        return tuple(dict.fromkeys(names[word] for word in text.split(",")))

    return parse


def backends(text: str) -> tuple[str, ...]:
    """Names of peers, each known; a class of the user's own is imported, so that a wrong name is told at once."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in (name for name in names if name not in PEERS):
        try:
            peer_class(name)
        except UnknownPeer as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def size_range(args: argparse.Namespace) -> tuple[int, ...]:
    """The sizes in bytes, as nccl-tests steps through them. Raises ``UsageError``."""
    least: int = args.minbytes or min(DEFAULT_LEAST, args.maxbytes or DEFAULT_LEAST)
    most: int = args.maxbytes or max(DEFAULT_MOST, least)
    if least > most:
        raise UsageError(f"-b {least} is more than -e {most}")
    check_least_size("-b", least, args.datatype)
    return tuple(_steps(least, most, args.stepfactor or DEFAULT_FACTOR, args.stepbytes))


def check_least_size(option: str, least: int, dtypes: Iterable[str]) -> None:
    """Raises ``UsageError`` where the smallest size has no element of one of the types."""
    largest_item = max(ITEM_BYTES[dtype] for dtype in dtypes)
    if least < largest_item:
        raise UsageError(f"{option} {least} is less than one element of {largest_item} bytes")


def _steps(least: int, most: int, factor: int, added: int | None) -> Iterable[int]:
    nbytes = least
    while nbytes <= most:
        yield nbytes
        nbytes = nbytes + added if added is not None else nbytes * factor


def check_ops(args: argparse.Namespace) -> None:
    """Raises ``UsageError`` where nothing is left to measure: integers are not divided."""
    if args.op == (Op.MEAN.name,) and set(args.datatype) <= set(INTEGERS):
        raise UsageError(
            f"-o avg: {', '.join(args.datatype)} can't be divided; use -o sum, or a floating type"
        )
