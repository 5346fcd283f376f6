"""A rank's seat: the process that is started for it, which never makes a call itself.

The rank is a fork of it, so that one which was killed is replaced in milliseconds, with everything imported, while
the other ranks go on in the processes that they have. The seat also lets a stopped rank go on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import warnings
from collections.abc import Callable

from ring_reduce.bootstrap import GRACE_S

from .faults import EXPECTED
from .outcome import Outcome, has_ended, is_at, store_of, tell
from .plan import HURRIED_S, Episode, Orders, episode_of
from .rank import serve

POLL_S = 0.005
STOPPED_S = HURRIED_S + GRACE_S / 2  # all others have given up by then
PR_SET_PDEATHSIG = 1


def run_seat(rank: int, orders: Orders, say: Callable[[str], None]) -> None:
    """Keeps a rank running until the judge ends the run."""
    import torch

    torch.set_num_threads(1)  # the ranks share the cores; and a fork has no threads but one
    say("soaking")
    number: int | None = orders.first
    while number is not None:
        number = _watch(_fork(rank, orders, number), rank, orders, number)


def _fork(rank: int, orders: Orders, first: int) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python warns of threads that a fork does not have. The only one here waits for the end of a socket.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child != 0:
        return child
    status = 1
    try:
        # Nobody else would end it with its seat.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            serve(rank, orders, first)
            status = 0
    finally:
        os._exit(status)


def _watch(child: int, rank: int, orders: Orders, number: int) -> int | None:
    """Until the rank ends. The episode that its successor begins with; None if there is to be none."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        while is_at(orders.folder, number + 1, rank):
            number += 1
        if pid == 0:
            if has_ended(orders.folder):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            time.sleep(POLL_S)
        elif os.WIFSTOPPED(status):
            time.sleep(_stop_s(episode_of(orders, number)))
            os.kill(child, signal.SIGCONT)
        else:
            return _after_the_end(status, rank, orders, number)


def _stop_s(episode: Episode) -> float:
    fault = episode.fault
    return fault.pause_s if fault is not None and fault.kind == "pause" else STOPPED_S


def _after_the_end(status: int, rank: int, orders: Orders, number: int) -> int | None:
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return None
    fault = episode_of(orders, number).fault
    planned = fault is not None and fault.kind == "kill" and fault.victim == rank
    store = store_of(orders.folder, number)
    outcome = Outcome(rank)
    if planned and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        outcome.error = EXPECTED["kill"].error
        outcome.fault_at = float(store.get("struck"))
    else:
        outcome.problems.append(f"rank {rank} ended with wait status {status}, which no fault explains")
    tell(store, outcome)
    word = store.get("next")
    return number + 1 if word == b"go" else None
