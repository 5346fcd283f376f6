"""``ring-reduce bench scale``: what dividing costs: each normalization beside SUM, and beside "SUM, then div_".

All run on one ring, and Gloo beside it, in one interleaved run of the benchmark (timing.py says how, scale_peers.py
who). Figures are how much longer a call takes than the ring's SUM in the same place: of medians, with their bootstrap
95 % interval. This project's target: MEAN and DIVIDE_BY_COUNT take at most 2 % longer, or the interval includes that. A
busy machine misses it; the exit status tells wrong results only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from ring_reduce.options import add_world, terminate_as_exit, whole_number, writable_file
from ring_reduce.processes import RanksFailed

from .command import COULD_NOT_MEASURE, DEFAULT_WORLD, MOST_ROTATED_BYTES, WRONG
from .flags import MOST_CALLS, MOST_RANKS, UsageError, check_least_size, size
from .host import KB, MB, last_level_cache_bytes, machine
from .launch import LaunchError, refuse_launcher, start
from .plan import INTEGERS, ITEM_BYTES, Plan
from .progress import progress
from .scale_peers import RING_PEERS
from .scale_report import document, table, wrong_results

DTYPES = tuple(name for name in ITEM_BYTES if name not in INTEGERS)  # which can't be divided
DEFAULT_SIZES = (KB, 16 * KB, 256 * KB, MB, 4 * MB, 64 * MB)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce bench scale``."""
    add_world(parser, MOST_RANKS, default=DEFAULT_WORLD)
    parser.add_argument(
        "--sizes", type=sizes, default=DEFAULT_SIZES, help="bytes (default: 1K,16K,256K,1M,4M,64M)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    parser.add_argument(
        "--calls",
        type=whole_number(1, MOST_CALLS),
        metavar="N",
        help="timed calls of each contender (default: by size, 40 to 1600)",
    )
    parser.add_argument(
        "--rotate",
        type=size,
        metavar="SIZE",
        help="rotate buffers of together so many bytes a rank (default: twice the last-level cache, at most 256M)",
    )
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write all that was measured")


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes: 0, or 1 when a result is wrong, or 2 when it could not be measured."""
    load = os.getloadavg()[0]
    try:
        refuse_launcher(os.environ)
        plan = plan_of(args)
        with terminate_as_exit(), progress() as show:
            report = start(plan, show)
    except (UsageError, LaunchError, RanksFailed) as error:
        print(f"ring-reduce bench scale: {error}", file=sys.stderr)
        return COULD_NOT_MEASURE
    host = machine() | {"load_at_start": load}
    print(table(host, plan, report.measurements))
    if args.json is not None:
        text = json.dumps(document(host, plan, report.measurements), indent=1, allow_nan=False)
        args.json.write_text(text + "\n", encoding="utf-8")
    return WRONG if wrong_results(plan, report.measurements) else 0


def plan_of(args: argparse.Namespace) -> Plan:
    """All normalizations on the ring, and Gloo, which has a mean only as a sum and then a division.

    Raises ``UsageError`` for a size below one element.
    """
    check_least_size("--sizes", min(args.sizes), (args.dtype,))
    ring = tuple(f"{peer.__module__}:{peer.__name__}" for peer in RING_PEERS)
    return Plan(
        world=args.world,
        sizes=args.sizes,
        dtypes=(args.dtype,),
        ops=("SUM", "MEAN"),
        backends=(*ring, "gloo"),
        calls=args.calls,
        rotate_bytes=args.rotate or min(MOST_ROTATED_BYTES, 2 * last_level_cache_bytes()),
    )


def sizes(text: str) -> tuple[int, ...]:
    """Bytes of a comma-separated list such as ``16K,4M``."""
    return tuple(size(part) for part in text.split(","))
