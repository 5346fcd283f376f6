"""Ranks of ``ring_reduce.processes`` as forks of a process that has imported torch, which costs seconds.

All else is as it starts them: what a rank is told, what it says, how it ends and what is seen of that. That a new
interpreter does the same is for the tests of each command that start one.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import Any

from launch import forkserver
from ring_reduce import processes

_HIGH = 200  # no process here has so many files open by itself


class Descriptor:
    """A file descriptor that has the same number in the process that it is passed to."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _take, (self.number, reduction.DupFd(self.number))


def _take(number: int, passed: Any) -> Descriptor:
    descriptor = passed.detach()
    os.dup2(descriptor, number)
    os.close(descriptor)
    return Descriptor(number)


def high_memfd(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """In place of ``os.memfd_create``: a number that is free in the ranks as well."""
    low = _memfd_create(name, flags)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(low)
    return high


_memfd_create = os.memfd_create


class Forked:
    """What ``processes`` uses of a ``subprocess.Popen``."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0)
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def start(rank: int, *inherited: int) -> processes._Rank:
    """In place of ``processes._start``."""
    ours, theirs = Pipe()
    with theirs:
        passed = [Descriptor(number) for number in (2, *inherited)]
        process = forkserver().Process(
            target=_run, args=(theirs, passed, sys.path, dict(os.environ), os.getcwd())
        )
        process.start()
    forked: Any = Forked(process)
    return processes._Rank(rank, forked, ours)


def _run(
    messages: Connection[Any, Any],
    passed: Sequence[Descriptor],
    path: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    os.dup2(2, 1)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # of that environment
    processes.rank_main(os.dup(messages.fileno()))
