"""The ways in which ranks start: from here, by mpirun, or by a launcher that started this process as one of them."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ring_reduce.processes import END_SECONDS, run_ranks

from .measurement import Exchange, Report
from .plan import Plan

STORE_VARIABLE = "RING_REDUCE_BENCH_STORE"
# Of rank, world and rank on this host, as Open MPI and as MPICH (and Intel MPI) call them.
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
POLL_SECONDS = 0.5

Show = Callable[[str], None]


class LaunchError(RuntimeError):
    """The ranks could not be started, or one of them failed; the text says which and why."""


@dataclass(frozen=True)
class Seat:
    """This process is a rank: a launcher has started it."""

    rank: int
    world: int
    local_rank: int
    launcher: str  # torchrun or mpirun


def seat_of(environ: Mapping[str, str]) -> Seat | None:
    """Which rank the environment makes this process; None for a process that no launcher started."""
    if all(name in environ for name in TORCHRUN_VARIABLES):
        rank = int(environ["RANK"])
        return Seat(rank, int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", rank)), "torchrun")
    for rank_name, world_name, local_name in MPI_VARIABLES:
        if rank_name in environ and world_name in environ:
            rank = int(environ[rank_name])
            return Seat(rank, int(environ[world_name]), int(environ.get(local_name, rank)), "mpirun")
    return None


def refuse_launcher(environ: Mapping[str, str]) -> None:
    """For commands that start their ranks themselves; raises ``LaunchError`` in a process that a launcher started."""
    if (seat := seat_of(environ)) is not None:
        raise LaunchError(
            f"{seat.launcher} started this process as rank {seat.rank} of {seat.world}, and this command starts its "
            f"ranks itself: run it without {seat.launcher}, with --world {seat.world}"
        )


def run_seated(seat: Seat, make_plan: Callable[[], Plan], show: Show) -> tuple[Plan, Report | None]:
    """This process's part as a rank. The plan is made by rank 0 alone: what is installed may differ between hosts."""
    from torch.distributed import PrefixStore

    from .rank import run_rank

    store = _join(seat)
    plan = Exchange(PrefixStore("plan", store), rank=seat.rank, world=seat.world).agree(make_plan)
    with _failing_at_once():
        return plan, run_rank(seat.rank, seat.world, seat.local_rank, store, plan, show)


def _join(seat: Seat) -> Any:
    from torch.distributed import TCPStore, rendezvous

    if seat.launcher == "torchrun":
        return next(iter(rendezvous("env://", seat.rank, seat.world)))[0]
    host, _, port = os.environ.get(STORE_VARIABLE, "").rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(
            f"rank {seat.rank}: mpirun started this process, and its ranks have nowhere to meet: set "
            f"{STORE_VARIABLE}=HOST:PORT for all, a free port of rank 0's host; or leave mpirun to ring-reduce bench"
        )
    return TCPStore(host, int(port), seat.world, is_master=seat.rank == 0)


def start(plan: Plan, show: Show) -> Report:
    """Starts the plan's ranks and waits for them. Raises ``LaunchError`` or ``RanksFailed`` if one fails or hangs."""
    store = new_store(plan)
    if "mpi" in plan.backends:
        return start_under_mpirun(plan, store.port, show)
    report: Report = run_ranks(
        plan.world, f"{__name__}:run_started", (plan, store.port), None, timeout=None, show=show
    )
    return report


def new_store(plan: Plan) -> Any:
    """Where ranks that were started from here meet; it ends with this process."""
    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=plan.timeout)
    )


def run_started(rank: int, argument: tuple[Plan, int], show: Show) -> Report | None:
    """The main function of a rank that was started from here."""
    from .rank import run_rank

    plan, port = argument
    return run_rank(rank, plan.world, rank, _local_store(port, plan), plan, show)


def _local_store(port: int, plan: Plan) -> Any:
    from torch.distributed import TCPStore

    # A host name that resolves to nothing, as in some containers, would keep Gloo from starting.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=plan.timeout))


def start_under_mpirun(plan: Plan, port: int, show: Show) -> Report:
    """As ``start``, by mpirun: MPI's ranks can't be started otherwise."""
    from . import mpirun

    with tempfile.TemporaryDirectory(prefix="ring-reduce-bench-") as name:
        folder = Path(name)
        (folder / "plan").write_bytes(pickle.dumps(plan))
        # The same path as here: -m would put the current folder first, where another ring_reduce may lie.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run_under_mpirun as run; run({name!r})"
        try:
            command = [*mpirun.command(plan.world), sys.executable, "-c", code]
        except mpirun.NoMpirun as error:
            raise LaunchError(str(error)) from error
        environment = os.environ | {STORE_VARIABLE: f"127.0.0.1:{port}"}
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2) as process:
            try:
                _follow(process, folder / "doing", show)
            finally:
                _end(process)
        if process.returncode != 0:
            raise LaunchError(
                f"mpirun ended with exit status {process.returncode}; rank 0 was at: {_read(folder / 'doing')}"
            )
        report: Report = pickle.loads((folder / "report").read_bytes())
        return report


def _end(process: subprocess.Popen[bytes]) -> None:
    """mpirun passes a SIGTERM on to its ranks."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _follow(process: subprocess.Popen[bytes], doing: Path, show: Show) -> None:
    """Until mpirun ends; it passes on no progress, so rank 0 writes that to a file."""
    shown = ""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return
        if (text := _read(doing)) not in ("", shown):
            shown = text
            show(text)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def run_under_mpirun(name: str) -> None:
    """The main function of a rank that mpirun has started from here; ``name`` is of the folder with the plan."""
    from .rank import run_rank

    folder = Path(name)
    with _failing_at_once():
        plan: Plan = pickle.loads((folder / "plan").read_bytes())
        seat = seat_of(os.environ)
        if seat is None or seat.world != plan.world:
            raise LaunchError(
                f"mpirun started {1 if seat is None else seat.world} ranks together, not {plan.world}"
            )

        def show(text: str) -> None:
            if seat is not None and seat.rank == 0:
                (folder / "doing").write_text(text)

        store = _local_store(int(os.environ[STORE_VARIABLE].rpartition(":")[2]), plan)
        report = run_rank(seat.rank, seat.world, seat.local_rank, store, plan, show)
        if report is not None:
            (folder / "report").write_bytes(pickle.dumps(report))


@contextlib.contextmanager
def _failing_at_once() -> Iterator[None]:
    """An error is told and ends the process there and then, so that the launcher sees it and ends the other ranks.

    Destructors, MPI's foremost, would wait for ranks that wait for this one.
    """
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)
