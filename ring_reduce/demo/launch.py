"""Starts the ranks as processes, shows what rank 0 says, and leaves nothing running whatever happens. Free of torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING

from ring_reduce.errors import RingError

from .data import Digits
from .results import Result

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

GRACE_SECONDS = 3.0  # after the first failure: for other ranks to say theirs, which may be the cause
END_SECONDS = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Job:
    """What every rank is given."""

    world: int
    epochs: int
    cores: int
    store_path: str
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
        lines += [f"then rank {each.rank}: {each.summary}" for each in failures if each is not cause]
        super().__init__("\n".join(line for line in lines if line))


@dataclass(frozen=True)
class _Rank:
    rank: int
    process: SpawnProcess
    messages: Connection


def run_ranks(job: Job, show: Callable[[str], None]) -> Result:
    """Runs the job and returns rank 0's result; raises RanksFailed with the cause when a rank fails."""
    ranks: list[_Rank] = []
    try:
        with _interrupts_held_back():
            for rank in range(job.world):
                ranks.append(_start(rank, job))
        return _watch(ranks, show)
    finally:
        _end(ranks)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ranks inherit the mask: Ctrl-C then reaches this process alone, which ends them without their tracebacks."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start(rank: int, job: Job) -> _Rank:
    # Spawn, not fork: a forked process would inherit locks and half of the threads.
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(rank, job, sending), name=f"rank {rank}", daemon=True)
    process.start()
    # The rank holds the only end to write to, so its death is the end of the file here.
    sending.close()
    return _Rank(rank, process, receiving)


def _rank_main(rank: int, job: Job, messages: Connection) -> None:
    """In the rank's process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        from .rank import run_rank

        def say(text: str) -> None:
            if rank == 0:
                messages.send(text)

        result = run_rank(rank, job, say)
        messages.send(result)
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        # An error of the ring is often the echo of what happened to another rank.
        severity = 2 if isinstance(error, RingError) else 1
        messages.send(Failure(rank, summary, traceback.format_exc(), severity))
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """Nobody would end a rank whose parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _watch(ranks: list[_Rank], show: Callable[[str], None]) -> Result:
    """Passes messages on until every rank has ended."""
    open_ranks = {each.messages: each for each in ranks}
    results: dict[int, Result] = {}
    failures: list[Failure] = []
    deadline: float | None = None
    while open_ranks:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(open_ranks), patience)
        if not ready:
            break
        for source in ready:
            each = open_ranks[source]  # type: ignore[index]
            try:
                message = each.messages.recv()
            except EOFError:
                del open_ranks[each.messages]
                each.process.join()
                if each.process.exitcode != 0 and each.rank not in [failure.rank for failure in failures]:
                    failures.append(_silent_failure(each))
            else:
                if isinstance(message, Failure):
                    failures.append(message)
                elif isinstance(message, Result):
                    results[each.rank] = message
                else:
                    show(message)
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if failures:
        raise RanksFailed(failures)
    return results[0]


def _silent_failure(each: _Rank) -> Failure:
    code = each.process.exitcode or 0
    if code < 0:
        reason = f"ended by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            reason += "; out of memory?"
        return Failure(each.rank, reason, "", severity=0)
    return Failure(each.rank, f"ended with exit status {code} and without a word", "", severity=0)


def _end(ranks: list[_Rank]) -> None:
    for each in ranks:
        if each.process.is_alive():
            each.process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for each in ranks:
        each.process.join(max(0.0, deadline - time.monotonic()))
        if each.process.is_alive():
            each.process.kill()
            each.process.join()
        each.messages.close()
