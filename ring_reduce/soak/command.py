"""``ring-reduce soak``: random calls and faults, every result checked. Free of torch."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import threading
from pathlib import Path

from ring_reduce.options import add_world, terminate_as_exit, whole_number, writable_file

from .plan import FAULT_WEIGHTS, Orders

GOOD, BAD, COULD_NOT_RUN = 0, 1, 2
MOST_RANKS = 16
MOST_FAULTS = 1_000_000
MOST = 100_000.0
DETECTION_S = 1.0
NO_FAULTS = "none"
EPILOG = f"""\
faults: {", ".join(FAULT_WEIGHTS)}

exit status: 0, 1 if a result was wrong or a fault was not survived, 2 if it could not run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce soak``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "--minutes", type=positive, default=1.0, metavar="M", help="how long (default: %(default)s)"
    )
    add_world(parser, MOST_RANKS, least=2, default=4)
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**32),
        metavar="S",
        help="of all that is random; the same makes the same calls and faults again (default: a new one)",
    )
    parser.add_argument(
        "--faults",
        type=faults,
        default=tuple(FAULT_WEIGHTS),
        metavar="NAMES",
        help=f"which, separated by commas, or {NO_FAULTS} (default: all)",
    )
    parser.add_argument(
        "--injections",
        type=whole_number(1, MOST_FAULTS),
        metavar="N",
        help="a fault in every episode, and the end after so many, if the time is not over before",
    )
    parser.add_argument(
        "--first",
        type=whole_number(0, 2**32),
        default=0,
        metavar="E",
        help="begin with this episode, to see one again (default: %(default)s)",
    )
    parser.add_argument(
        "--detection",
        type=positive,
        default=DETECTION_S,
        metavar="SECONDS",
        help="in which every rank has to know of a fault, or after the deadline (default: %(default)s)",
    )
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write all figures")


def positive(text: str) -> float:
    """A positive number, not too large."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number up to {MOST:g}")
    return value


def faults(text: str) -> tuple[str, ...]:
    """Names of faults, in an order of their own: the plan depends on it."""
    if text == NO_FAULTS:
        return ()
    names = set(text.split(","))
    if unknown := sorted(names - set(FAULT_WEIGHTS)):
        raise argparse.ArgumentTypeError(
            f"no fault is called {unknown[0]!r}; there are {', '.join(FAULT_WEIGHTS)}"
        )
    return tuple(name for name in FAULT_WEIGHTS if name in names)


def run(args: argparse.Namespace) -> int:
    """Soaks and prints what came of it: 0 good, 1 bad, 2 if it could not run."""
    from ring_reduce.processes import RanksFailed

    if args.injections is not None and not args.faults:
        print("ring-reduce soak: --injections needs faults, and --faults is none", file=sys.stderr)
        return COULD_NOT_RUN
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    print(f"soaking {args.world} ranks for {args.minutes:g} min, seed {seed}", flush=True)
    try:
        with terminate_as_exit(), tempfile.TemporaryDirectory(prefix="ring-reduce-soak-") as folder:
            return _soak(args, seed, folder)
    except RanksFailed as error:
        print(f"ring-reduce soak: {error}", file=sys.stderr)
        return COULD_NOT_RUN


def _soak(args: argparse.Namespace, seed: int, folder: str) -> int:
    """The ranks' processes are watched here, and what they tell is judged in a thread."""
    from ring_reduce.processes import run_ranks

    from .judge import Judge

    orders = Orders(
        world=args.world,
        seed=seed,
        faults=args.faults,
        always=args.injections is not None,
        folder=folder,
        first=args.first,
    )
    (Path(folder) / str(args.first)).mkdir()
    judge = Judge(orders, minutes=args.minutes, injections=args.injections, detection_s=args.detection)
    thread = threading.Thread(target=judge.run, args=(lambda report: print(report.line(), flush=True),))
    thread.start()
    try:
        run_ranks(
            args.world, f"{__package__}.seat:run_seat", orders, folder, timeout=None, show=lambda _: None
        )
    finally:
        judge.stop()
        thread.join()
    report = judge.report
    print(report.line())
    print(report.table())
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    for problem in report.problems:
        print(problem)
    if report.problems:
        print(f"again: ring-reduce soak {_again(args, seed, report.failed_episode)}")
    return BAD if report.problems else GOOD


def _again(args: argparse.Namespace, seed: int, episode: int | None) -> str:
    options = (
        f"--world {args.world} --seed {seed} --first {episode} --faults {','.join(args.faults) or NO_FAULTS}"
    )
    return f"{options} --injections 1" if args.injections is not None else options
