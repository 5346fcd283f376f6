"""How a ring ends: its calls finished or aborted, and the other ranks told why."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .bootstrap import Member
from .errors import text_of
from .work import CommunicationThread

if TYPE_CHECKING:
    from .engine import Engine
    from .ring import Ring

CLOSE_TIMEOUT_S = 5.0


def finish_calls(engine: Engine, thread: CommunicationThread, timeout: float) -> bool:
    """Waits for calls that are queued, or run on any thread; whether none is left."""
    deadline = time.monotonic() + timeout
    stopped = thread.stop(timeout)
    while engine.busy() and time.monotonic() < deadline:
        time.sleep(0.001)
    return stopped and not engine.busy()


def shut_down(engine: Engine, thread: CommunicationThread, member: Member, process: int) -> None:
    """Ends a ring that nobody closed. In a fork it is the parent's."""
    if os.getpid() != process:
        return
    if not thread.idle or engine.busy():
        engine.abort(f"rank {member.rank} exited, or dropped the ring, with calls in flight")
    if finish_calls(engine, thread, CLOSE_TIMEOUT_S):
        engine.close()


@contextlib.contextmanager
def abort_on_error(ring: Ring | None) -> Iterator[None]:
    """An error of one rank in the middle of a step ends the ring: the others would wait for it."""
    try:
        yield
    except BaseException as error:
        abort(ring, error)
        raise


def abort(ring: Ring | None, error: BaseException) -> None:
    """Ends the ring with the text of ``error``, unless it has failed already."""
    if ring is not None and ring.failure is None:
        ring.abort(text_of(error))
