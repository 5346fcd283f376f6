"""Ranks as processes: a team that runs one function after another, or one function once.

A function of a test module gets its rank's Seat, makes a ring there and returns what the test looks at::

    def sums(seat: Seat, size: int) -> np.ndarray:
        with seat.ring() as ring:
            return ring.all_reduce(np.ones(size))

    first, second = spawn(2, sums, 1000)
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import ring_reduce as rr
from ring_reduce.probe import DirectoryStore

JOB_TIMEOUT_S = 100.0  # a bound on a hang, far above what any job takes
RING_TIMEOUT_S = 60.0
_GRACE_S = 5.0  # for the other ranks, once one has failed

# A forked rank then has them; by import each would cost seconds.
_PRELOAD = ["numpy", "torch", "torch.distributed", "torch.nn.parallel", "pytest", "ring_reduce"]


def forkserver() -> Any:
    """The context of processes that start as forks of one that has imported what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


class RankError(AssertionError):
    """A rank raised, ended or did not answer. Carries the tracebacks, the first to fail first."""


@dataclass
class Seat:
    """One rank's place: who it is and where the ranks meet."""

    rank: int
    world: int
    directory: Path
    job: int = 0
    _rings: list[rr.Ring] = field(default_factory=list)
    _kept: dict[str, rr.Ring] = field(default_factory=dict)

    @property
    def store(self) -> DirectoryStore:
        """The job's own. Plain files: a ring needs no torch to meet."""
        return DirectoryStore(self.directory / str(self.job), timeout=RING_TIMEOUT_S)

    def ring(
        self,
        *,
        timeout: float = RING_TIMEOUT_S,
        lanes: int | None = None,
        name: str | None = None,
        algorithm: str = "auto",
        **tuning: Any,
    ) -> rr.Ring:
        """A new ring of all ranks. Each makes the same ones in the same order."""
        name = name if name is not None else f"ring {len(self._rings)}"
        ring = rr.Ring(
            self.store,
            rank=self.rank,
            world=self.world,
            name=name,
            timeout=timeout,
            lanes=lanes,
            algorithm=algorithm,
            _tuning=tuning,
        )
        self._rings.append(ring)
        return ring

    def kept_ring(self, *, lanes: int | None = None, **tuning: Any) -> rr.Ring:
        """A ring that outlives the job, made by the first job that asks for one like this."""
        key = f"{lanes} {sorted(tuning.items())}"
        if key not in self._kept:
            self._kept[key] = self.ring(lanes=lanes, **tuning)
            self._rings.pop()
        return self._kept[key]

    def meet(self, place: str) -> None:
        """Returns once every rank is here: a barrier that is not the ring's."""
        self.store.set(f"{place} {self.rank}", b"")
        for rank in range(self.world):
            self.store.get(f"{place} {rank}")

    def _end_job(self, error: BaseException | None) -> None:
        for ring in [*self._rings, *self._kept.values()] if error is not None else self._rings:
            if error is not None:
                ring.abort(f"{type(error).__name__}: {error}")
            ring.close()
        self._rings.clear()


def caught(call: Callable[[], Any]) -> Exception | None:
    """What ``call`` raises; None if it returns."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    return None


def _serve(seat: Seat, jobs: Connection) -> None:
    """Runs jobs until the test process closes the pipe."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # more ranks than cores as it is
    with contextlib.suppress(EOFError, ConnectionResetError):
        while (job := jobs.recv()) is not None:
            seat.job, function, arguments = job
            problem = result = None
            try:
                result = function(seat, *arguments)
                seat._end_job(None)
            except BaseException as error:
                problem = f"rank {seat.rank} of {seat.world}:\n{traceback.format_exc()}"
                with contextlib.suppress(Exception):
                    seat._end_job(error)
            jobs.send((problem, result))
    for ring in seat._kept.values():
        ring.close()


class Team:
    """``world`` processes that run one job after another. A context manager; leaves no process behind."""

    def __init__(self, world: int, start: str = "forkserver") -> None:
        self.world = world
        self.directory = Path(tempfile.mkdtemp(prefix="ring_reduce-test-"))
        self._job = 0
        context: Any = forkserver() if start == "forkserver" else multiprocessing.get_context(start)
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(Seat(rank, world, self.directory), there))
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    @property
    def store(self) -> DirectoryStore:
        """What the seats see as theirs in this job."""
        return DirectoryStore(self.directory / str(self._job), timeout=JOB_TIMEOUT_S)

    def wait_for(self, key: str) -> None:
        """Until a rank has put ``key`` into its store."""
        self.store.get(key)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=error is not None)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        lost: Collection[int] = (),
        timeout: float = JOB_TIMEOUT_S,
    ) -> list[Any]:
        """``function(seat, *arguments)`` on every rank; their results by rank.

        Ranks in ``lost`` have to end without an answer, and give None. Raises ``RankError`` if any other does, raises
        or takes longer than ``timeout`` seconds.
        """
        self.begin(function, *arguments)
        return self.finish(lost=lost, timeout=timeout)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts a job."""
        self._job += 1
        (self.directory / str(self._job)).mkdir()
        for pipe in self._pipes:
            pipe.send((self._job, function, arguments))

    def finish(self, lost: Collection[int] = (), timeout: float = JOB_TIMEOUT_S) -> list[Any]:
        """The results of the job, see :meth:`run`."""
        results: list[Any] = [None] * self.world
        problems: list[str] = []
        for rank, problem, result in self._answers(timeout, problems):
            results[rank] = result
            if problem == "ended" and rank not in lost:
                problems.append(f"rank {rank} ended with exit code {self._exit_code(rank)}")
            elif problem != "ended" and rank in lost:
                problems.append(f"rank {rank} answered, though it should have ended")
            elif problem not in (None, "ended"):
                problems.append(problem)
        if problems:
            raise RankError("\n".join(problems))
        return results

    def answer(self, rank: int, timeout: float = JOB_TIMEOUT_S) -> Any:
        """The result of one rank, whatever the others do; None if it raised or did not answer."""
        return self._pipes[rank].recv()[1] if self._pipes[rank].poll(timeout) else None

    def _answers(self, timeout: float, problems: list[str]) -> Iterator[tuple[int, Any, Any]]:
        """Rank, problem and result of each, as they come in. A rank that does not answer in time is a problem."""
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while pending:
            if problems:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pending.values():
                    os.kill(self.processes[rank].pid, signal.SIGUSR1)  # prints its stacks
                time.sleep(0.2)
                problems.append(f"rank {sorted(pending.values())} did not answer in {timeout:.0f} s")
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    yield rank, *pipe.recv()
                except (EOFError, ConnectionResetError):
                    yield rank, "ended", None

    def _exit_code(self, rank: int) -> int | None:
        self.processes[rank].join(_GRACE_S)
        code: int | None = self.processes[rank].exitcode
        return code

    def close(self, at_once: bool = False) -> None:
        """Ends the processes: after their job, or at once."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)  # not by its end: forked ranks hold the pipes of those before them
            pipe.close()
        for process in self.processes:
            if at_once:
                process.kill()
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self.processes.clear()
        shutil.rmtree(self.directory, ignore_errors=True)


def spawn(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    start: str = "forkserver",
    lost: Collection[int] = (),
    timeout: float = JOB_TIMEOUT_S,
) -> list[Any]:
    """``function(seat, *arguments)`` in ``world`` new processes; their results by rank. See :meth:`Team.run`."""
    with Team(world, start) as team:
        return team.run(function, *arguments, lost=lost, timeout=timeout)


def run_script(world: int, code: str, directory: Path) -> list[tuple[int, str, str]]:
    """``code`` in ``world`` new interpreters, whose arguments are ``directory`` and a rank; status, output and errors.

    For what only an interpreter of its own does: Python's exit. Leaves no process, and no child of one.
    """
    script = directory / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(directory)]
    options: Any = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    ranks = [subprocess.Popen([*command, str(rank)], **options) for rank in range(world)]
    try:
        outputs = [process.communicate(timeout=JOB_TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [(process.returncode, *output) for process, output in zip(ranks, outputs, strict=True)]
