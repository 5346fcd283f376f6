"""``ring-reduce bench ddp``: whole training steps with the ring's hook, and with DDP's own reducer on Gloo or NCCL.

The method:

- A step is what users time: gradients dropped, forward, mean cross-entropy, backward with the reduction in it, SGD.
- All contenders run in the same processes, each with a model of its own and the same parameters and batches. Their
  steps are interleaved, in an order drawn anew for every round (interleave.py), the same number on all ranks; the ranks
  are aligned before each step (barrier.py), and a step takes what its slowest rank takes.
- One contender, ``none``, is the bare module: it reduces nothing. Communication that backward did not hide is a
  contender's median step less that one's, in the same rounds. It holds what DDP does around the reduction too, and what
  the ranks' steps differ in, since whoever reduces waits for the slowest rank.
- torch has cores / ranks threads a rank, at least one: more would compete with the other ranks for the cores.
- In the end all gradients are checked (ddp_check.py). A wrong one is said, and sets the exit status to 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch
from torch.distributed import TCPStore

from ring_reduce.demo.data import Digits, load_digits
from ring_reduce.machine import granted_cores
from ring_reduce.options import add_world, terminate_as_exit, whole_number, writable_file
from ring_reduce.processes import RanksFailed, run_ranks

from .command import COULD_NOT_MEASURE, DEFAULT_WORLD, WRONG
from .ddp_rank import Job
from .ddp_report import document, report
from .ddp_result import Trained
from .ddp_workloads import WORKLOADS
from .flags import MOST_RANKS, UsageError
from .host import machine
from .launch import LaunchError, refuse_launcher
from .progress import progress

RANK_MAIN = f"{__package__}.ddp_rank:run_rank"
MOST_STEPS = 1_000_000
MOST_EXAMPLES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce bench ddp``."""
    add_world(parser, MOST_RANKS, default=DEFAULT_WORLD)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank (default: cpu)"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=[*WORKLOADS],
        default=["mlp", "digits"],
        help="networks to train, " + "; ".join(f"{each.name}: {each.text}" for each in WORKLOADS.values()),
    )
    parser.add_argument(
        "--batch",
        type=whole_number(1, MOST_EXAMPLES),
        metavar="N",
        help=f"examples a rank (default: {_defaults('batch')})",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1, MOST_STEPS),
        metavar="N",
        help=f"timed steps of each contender (default: {_defaults('steps')})",
    )
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write all that was measured")


def _defaults(field: str) -> str:
    return ", ".join(f"{each.name} {getattr(each, field)}" for each in WORKLOADS.values())


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes: 0, or 1 when gradients are wrong, or 2 when they could not be measured."""
    load = os.getloadavg()[0]
    try:
        refuse_launcher(os.environ)
        trained = _measure(args)
    except (UsageError, LaunchError, RanksFailed) as error:
        print(f"ring-reduce bench ddp: {error}", file=sys.stderr)
        return COULD_NOT_MEASURE
    host = machine() | {"load_at_start": load}
    print(report(host, args.device, trained))
    if args.json is not None:
        text = json.dumps(document(host, args.device, trained), indent=1, allow_nan=False)
        args.json.write_text(text + "\n", encoding="utf-8")
    return WRONG if any(each.problems() for each in trained) else 0


def _measure(args: argparse.Namespace) -> list[Trained]:
    if args.device == "cuda" and torch.cuda.device_count() < args.world:
        raise UsageError(
            f"{args.world} ranks need a GPU each, and torch sees {torch.cuda.device_count()} here: lower --world, or "
            f"use --device cpu"
        )
    digits = _digits() if "digits" in args.model else None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(
        world=args.world,
        port=store.port,
        device=args.device,
        threads=max(1, int(granted_cores() / args.world)),
        workloads=tuple(dict.fromkeys(args.model)),
        batch=args.batch,
        steps=args.steps,
        digits=digits,
    )
    with terminate_as_exit(), progress() as show:
        found: list[Trained] = run_ranks(args.world, RANK_MAIN, job, None, timeout=None, show=show)
    return found


def _digits() -> Digits:
    try:
        return load_digits()
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--model digits: the module {error.name} is missing: pip install '.[demo]' in ring_reduce's source, "
            f"or give --model mlp"
        ) from error
