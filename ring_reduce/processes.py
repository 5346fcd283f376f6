"""Starts ranks as processes, passes on what they say, and leaves nothing running whatever happens. Free of torch.

Not multiprocessing: a Ctrl-C that hits one of its children before that has read its arguments leaves the parent writing
them for ever. Here the parent holds one end of a socket to each rank, so that the death of either side ends the other's
wait.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import math
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
from typing import Any

from ring_reduce.errors import VerifyError, is_echo, text_of

GRACE_SECONDS = 5.0  # after the first failure: for other ranks to say theirs, which may be the cause
END_SECONDS = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Start:
    """What a rank is to do. ``main`` is ``module:function``, called with the rank, the argument and a way to report."""

    rank: int
    main: str
    argument: Any
    folder: str | None  # where the ranks meet, if anywhere; removed by a rank whose parent was killed


@dataclass(frozen=True)
class Doing:
    """What a rank is at."""

    text: str


class Severity(enum.IntEnum):
    """Of several failures the least is the likely cause."""

    SILENT = 0  # ended without a word
    ERROR = 1
    TOLD = 2  # the same text on every rank, without a traceback
    ECHO = 3  # says what happened to another rank


@dataclass(frozen=True)
class Failure:
    """How a rank ended."""

    rank: int
    text: str  # begins with who failed
    details: str = ""  # the traceback of code that is not ours
    severity: Severity = Severity.ERROR


class RanksFailed(RuntimeError):
    """A rank failed; the text starts with the likely cause and its traceback, and names what the others said."""

    def __init__(self, failures: list[Failure]) -> None:
        cause = min(failures, key=lambda failure: failure.severity)
        others = dict.fromkeys(each.text.splitlines()[0] for each in failures if each.text != cause.text)
        lines = [cause.text, cause.details.rstrip(), *(f"then {other}" for other in others)]
        super().__init__("\n".join(line for line in lines if line))


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    messages: Connection[Any, Any]
    doing: str = "starting"


def run_ranks(
    world: int,
    main: str,
    argument: Any,
    folder: str | None,
    *,
    timeout: float | None,
    show: Callable[[str], None],
    inherited: tuple[int, ...] = (),
) -> Any:
    """Runs ``main`` on every rank and returns what rank 0's returned. Raises RanksFailed if any fails or is late.

    ``show`` is told what rank 0 is at. The file descriptors ``inherited`` are the ranks' as well.
    """
    ranks: list[_Rank] = []
    try:
        with _signals_held_back():
            for rank in range(world):
                ranks.append(_start(rank, *inherited))
        for each in ranks:
            # A rank that is dead already is found, with its exit status, by the watch.
            with contextlib.suppress(ConnectionError):
                each.messages.send(Start(each.rank, main, argument, folder))
        return _watch(ranks, timeout, show)
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


def _start(rank: int, *inherited: int) -> _Rank:
    ours, theirs = Pipe()
    # The same path as here: -c would put the current folder first, where another ring_reduce may lie.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import rank_main; rank_main({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a rank prints is no part of the report
            pass_fds=[theirs.fileno(), *inherited],
        )
    return _Rank(rank, process, ours)


def rank_main(descriptor: int) -> None:
    """The main function of a rank's process; `descriptor` is its end of the socket."""
    messages: Connection[Any, Any] = Connection(descriptor)
    try:
        start: Start = messages.recv()
    except (EOFError, ConnectionError):
        raise SystemExit(1) from None  # the parent ended first
    threading.Thread(target=_end_with_parent, args=(messages, start.folder), daemon=True).start()
    module, _, function = start.main.partition(":")
    try:
        main = getattr(importlib.import_module(module), function)
        messages.send(main(start.rank, start.argument, lambda text: messages.send(Doing(text))))
        status = 0
    except BaseException as error:
        messages.send(_failure_of(start.rank, error))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through destructors, which may wait for a rank that has failed, and for torch's take seconds.
    os._exit(status)


def _failure_of(rank: int, error: BaseException) -> Failure:
    """An error of verify says all there is; of any other, and of the one behind it, the traceback is wanted."""
    if not isinstance(error, VerifyError):
        severity = Severity.ECHO if is_echo(error) else Severity.ERROR
        return Failure(rank, f"rank {rank} failed: {text_of(error)}", traceback.format_exc(), severity)
    cause = error.__cause__
    if cause is None or isinstance(cause, VerifyError):
        return Failure(rank, str(error), severity=Severity.TOLD)
    return Failure(rank, str(error), "".join(traceback.format_exception(cause)))


def _end_with_parent(messages: Connection[Any, Any], folder: str | None) -> None:
    """Nobody else would end a rank whose parent was killed, nor remove the folder."""
    # The parent sends nothing more: what there is to read is the end of the file.
    wait([messages])
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _watch(ranks: list[_Rank], timeout: float | None, show: Callable[[str], None]) -> Any:
    """Takes messages until every rank has ended, or a failure is explained."""
    running = list(ranks)
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while any(each.rank not in failures for each in running):
        patience = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = wait([each.messages for each in running], patience)
        if not ready:
            if not failures:
                late = "; ".join(f"rank {each.rank} is at: {each.doing}" for each in running)
                raise RanksFailed([Failure(running[0].rank, f"not done in {timeout:g} s ({late})")])
            break
        for each in [each for each in running if each.messages in ready]:
            _take(each, running, results, failures, show)
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        raise RanksFailed(list(failures.values()))
    return results[0]


def _take(
    each: _Rank,
    running: list[_Rank],
    results: dict[int, Any],
    failures: dict[int, Failure],
    show: Callable[[str], None],
) -> None:
    """One message of a rank, or its end."""
    try:
        message = each.messages.recv()
    except (EOFError, ConnectionError):
        running.remove(each)
        if each.process.wait() != 0 or each.rank not in results:
            failures.setdefault(each.rank, _silent_failure(each))
        return
    if isinstance(message, Failure):
        failures[each.rank] = message
    elif isinstance(message, Doing):
        each.doing = message.text
        if each.rank == 0:
            show(message.text)
    else:
        results[each.rank] = message


def _silent_failure(each: _Rank) -> Failure:
    status = each.process.returncode
    reason = f"ended with exit status {status} and without a word"
    if status < 0:
        reason = f"ended by signal {-status} ({signal.Signals(-status).name})"
        reason += "; out of memory?" if status == -signal.SIGKILL else ""
    text = f"rank {each.rank} failed: {reason}, at: {each.doing}"
    return Failure(each.rank, text, severity=Severity.SILENT)


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
