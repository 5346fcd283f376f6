"""Starts the ranks as processes, shows what rank 0 says, and leaves nothing running whatever happens. Free of torch.

Not multiprocessing: a Ctrl-C that hits one of its children before that has read its arguments leaves the parent writing
them for ever. Here the parent holds one end of a socket only, so that the death of either side ends the other's wait.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ring_reduce.errors import RingError

from .data import Digits
from .results import Result

GRACE_SECONDS = 3.0  # after the first failure: for other ranks to say theirs, which may be the cause
END_SECONDS = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Job:
    """What every rank is given."""

    world: int
    epochs: int
    cores: int
    store_path: str  # in a folder of the job's own
    digits: Digits


@dataclass(frozen=True)
class Failure:
    """How a rank ended."""

    rank: int
    summary: str
    details: str  # the traceback; empty when the process ended without a word
    severity: int  # of several failures the least is the likely cause


class RanksFailed(RuntimeError):
    """A rank failed; the text starts with the likely cause, and names what the others said."""

    def __init__(self, failures: list[Failure]) -> None:
        cause = min(failures, key=lambda failure: failure.severity)
        lines = [f"rank {cause.rank} failed: {cause.summary}", cause.details.rstrip()]
        lines += [
            f"then rank {each.rank}: {each.summary.splitlines()[0]}" for each in failures if each is not cause
        ]
        super().__init__("\n".join(line for line in lines if line))


@dataclass(frozen=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    messages: Connection[Any, Any]


def run_ranks(job: Job, show: Callable[[str], None]) -> Result:
    """Runs the job and returns rank 0's result; raises RanksFailed with the cause when a rank fails."""
    ranks: list[_Rank] = []
    try:
        with _signals_held_back():
            for rank in range(job.world):
                ranks.append(_start(rank))
        for each in ranks:
            # A rank that is dead already is found, with its exit status, by the watch.
            with contextlib.suppress(ConnectionError):
                each.messages.send((each.rank, job))
        return _watch(ranks, show)
    finally:
        _end(ranks)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """No signal raises between the start of a rank and its entry in the list of those to end.

    Ranks inherit the mask: Ctrl-C then reaches this process alone, which ends them without their tracebacks. A session
    of their own would do that too, but Linux schedules each session as a group, and a rank that yields while it waits
    would then yield to no other rank.
    """
    received: list[int] = []
    before = {}
    # Only the main thread may set handlers, and only there do they raise.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, _frame: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def _start(rank: int) -> _Rank:
    ours, theirs = Pipe()
    # The same path as here: -c would put the current folder first, where another ring_reduce may lie.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import rank_main; rank_main({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return _Rank(rank, process, ours)


def rank_main(descriptor: int) -> None:
    """The main function of a rank's process; `descriptor` is its end of the socket."""
    messages: Connection[Any, Any] = Connection(descriptor)
    try:
        rank, job = messages.recv()
    except (EOFError, ConnectionError):
        raise SystemExit(1) from None  # the parent ended first
    threading.Thread(target=_end_with_parent, args=(messages, job), daemon=True).start()

    def say(text: str) -> None:
        if rank == 0:
            messages.send(text)

    try:
        from .rank import run_rank

        messages.send(run_rank(rank, job, say))
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        messages.send(Failure(rank, summary, traceback.format_exc(), severity=2 if _is_echo(error) else 1))
        raise SystemExit(1) from None


def _end_with_parent(messages: Connection[Any, Any], job: Job) -> None:
    """Nobody else would end a rank whose parent was killed, nor remove the folder."""
    # The parent sends nothing more: what there is to read is the end of the file.
    wait([messages])
    shutil.rmtree(Path(job.store_path).parent, ignore_errors=True)
    os._exit(1)


def _is_echo(error: BaseException) -> bool:
    """Whether an error likely says what happened to another rank. Errors of a hook come wrapped by torch."""
    signs = ("PeerLost", "RingAborted", "RingClosed", "gloo/transport")
    return isinstance(error, RingError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def _watch(ranks: list[_Rank], show: Callable[[str], None]) -> Result:
    """Passes messages on until every rank has ended, or a failure is explained."""
    running = list(ranks)
    results: dict[int, Result] = {}
    failures: dict[int, Failure] = {}
    deadline: float | None = None
    while any(each.rank not in failures for each in running):
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([each.messages for each in running], patience)
        if not ready:
            break
        for each in [each for each in running if each.messages in ready]:
            try:
                message = each.messages.recv()
            except (EOFError, ConnectionError):
                running.remove(each)
                if each.process.wait() != 0:
                    failures.setdefault(each.rank, _silent_failure(each))
                continue
            if isinstance(message, Failure):
                failures[each.rank] = message
            elif isinstance(message, Result):
                results[each.rank] = message
            else:
                show(message)
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if failures:
        raise RanksFailed(list(failures.values()))
    return results[0]


def _silent_failure(each: _Rank) -> Failure:
    status = each.process.returncode
    if status < 0:
        reason = f"ended by signal {-status} ({signal.Signals(-status).name})"
        if status == -signal.SIGKILL:
            reason += "; out of memory?"
    else:
        reason = f"ended with exit status {status} and without a word"
    return Failure(each.rank, reason, "", severity=0)


def _end(ranks: list[_Rank]) -> None:
    for each in ranks:
        each.process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for each in ranks:
        try:
            each.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
        each.messages.close()
