"""``ring-reduce bench``: measures all-reduces side by side, and prints, writes and draws what it found."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ring_reduce.options import terminate_as_exit

from . import flags
from .flags import UsageError
from .host import MB, last_level_cache_bytes, machine
from .peers import missing
from .plan import Plan
from .progress import progress

if TYPE_CHECKING:
    from .launch import Seat
    from .measurement import Report

WRONG, COULD_NOT_MEASURE = 1, 2
DEFAULT_WORLD = 2
DEFAULT_BACKENDS = {"cpu": ("ring", "gloo", "mpi", "deepspeed"), "cuda": ("ring", "nccl", "symm_mem")}
MOST_ROTATED_BYTES = 256 * MB
COMMANDS = {
    "ddp": "whole training steps, with the ring's hook and with DDP's own reducer",
    "scale": "what dividing the sum costs, by every normalization and by a second pass",
}


class _CommandParser(argparse.ArgumentParser):
    """Of ``bench ddp`` and the like: imports its module when it is used, since that needs torch."""

    def __init__(self, *, module: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._module = module

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As its base, once it has the module's options."""
        if self._module:
            module, self._module = importlib.import_module(self._module), ""
            module.add_arguments(self)
            self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce bench``, and the commands below it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = flags.EPILOG
    flags.add_flags(parser)
    commands = parser.add_subparsers(
        title="other benchmarks, with options of their own", metavar="", parser_class=_CommandParser
    )
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, description=text, module=f"{__package__}.{name}")


def run(args: argparse.Namespace) -> int:
    """Measures and reports. 0, or 1 if any result was wrong, or 2 if it could not be measured."""
    from ring_reduce.processes import RanksFailed

    from .baseline import BadBaseline
    from .launch import LaunchError

    try:
        return _run(args)
    except (UsageError, BadBaseline, LaunchError, RanksFailed) as error:
        print(f"ring-reduce bench: {error}", file=sys.stderr)
        return COULD_NOT_MEASURE


def _run(args: argparse.Namespace) -> int:
    from .baseline import read_baseline
    from .launch import run_seated, seat_of, start

    if args.plot is not None:
        import_plot()  # a package that is missing is said before any work
    seat = seat_of(os.environ)
    baseline = None if args.baseline is None else read_baseline(args.baseline)
    load_at_start = os.getloadavg()[0]
    notes: list[str] = []

    def make_plan() -> Plan:
        return plan_of(args, seat, notes)

    with terminate_as_exit(), progress() as show:
        if seat is None:
            plan = make_plan()
            report: Report | None = start(plan, show)
        else:
            plan, report = run_seated(seat, make_plan, show if seat.rank == 0 else lambda _: None)
    return 0 if report is None else _tell(args, plan, report, baseline, load_at_start, notes)


def import_plot() -> Any:
    """The module that draws; matplotlib is optional."""
    from . import plot

    return plot


def plan_of(args: argparse.Namespace, seat: Seat | None, notes: list[str]) -> Plan:
    """What the options ask for on this machine. Adds to ``notes`` what is left out. Raises ``UsageError``."""
    if seat is not None and args.world not in (None, seat.world):
        raise UsageError(f"--world {args.world}, but {seat.launcher} started {seat.world} ranks")
    flags.check_ops(args)
    if args.device == "cuda":
        _check_cuda()
    names = chosen_backends(args, seat, notes)
    return Plan(
        world=seat.world if seat is not None else args.world or DEFAULT_WORLD,
        sizes=flags.size_range(args),
        dtypes=args.datatype,
        ops=args.op,
        backends=(*(name for name in names if name != "copy"), "copy"),
        device=args.device,
        calls=args.iters,
        warm_up_calls=args.warmup_iters,
        rotate_bytes=args.rotate or min(MOST_ROTATED_BYTES, 2 * last_level_cache_bytes()),
        spread=not args.no_spread,
        timeout=float(args.timeout),
        together=args.together,
    )


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; ring-reduce doctor says more")


def chosen_backends(args: argparse.Namespace, seat: Seat | None, notes: list[str]) -> Sequence[str]:
    """Those asked for, all of which must be there, or else those of the defaults that are."""
    found = []
    for name in args.backend or DEFAULT_BACKENDS[args.device]:
        reason = missing(name, args.device)
        if name == "mpi" and seat is not None and seat.launcher != "mpirun":
            reason = f"{seat.launcher} started the ranks, and MPI's must be started by mpirun"
        if reason is None:
            found.append(name)
        elif args.backend:
            raise UsageError(f"--backend {name}: {reason}")
        else:
            notes.append(f"# not measured: {name}: {reason}")
    return found


def _tell(
    args: argparse.Namespace,
    plan: Plan,
    report: Report,
    baseline: dict[str, Any] | None,
    load_at_start: float,
    notes: list[str],
) -> int:
    """Writes and prints all that was asked for, the file first: what was measured outlives whatever fails then."""
    from .baseline import compare_with
    from .report import document, figures_of
    from .table import LEGEND, heading, table

    host, figures = machine(), figures_of(plan, report)
    written = document(plan, report, figures, load_at_start)
    if args.json is not None:
        args.json.write_text(json.dumps(written, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    lines = [*heading(plan, report, host, load_at_start), *notes, *LEGEND, *table(plan, figures)]
    if baseline is not None:
        lines += compare_with(baseline, written, figures.rows)
    print("\n".join(lines), flush=True)
    if args.plot is not None:
        where = f"{host['processor']}, {host['cores']} cores"
        title = f"all-reduce, {plan.world} ranks on {plan.device}, in place ({where})"
        import_plot().write_plot(args.plot, figures.rows, title)
    return WRONG if any(row.wrong for row in figures.rows) else 0
