"""Calls that Ctrl-C ends although they wait inside a library that does not look for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from .ending import CLOSE_TIMEOUT_S
from .errors import RingClosed

_Outcomes: TypeAlias = "queue.SimpleQueue[float | BaseException]"


class CallThread:
    """Runs calls of the main thread on one of its own: Python's wait for that ends with a signal, Gloo's does not.

    The hand-over costs some 0.1 ms a call, where one between two ranks of a host takes 0.5 ms.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], float], _Outcomes] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        # Reentrant, and the thread never takes it, as it would a Future's: a signal handler may call while it is held.
        self._lock = threading.RLock()

    def run(self, call: Callable[[], float], end: Callable[[BaseException], object]) -> float:
        """What ``call`` returns or raises; ``RingClosed`` after :meth:`close`. ``end`` has to end it, for good: it gets
        what interrupts the wait."""
        outcomes: _Outcomes = queue.SimpleQueue()  # of this call alone
        try:
            self._hand_over(call, outcomes)
            outcome = outcomes.get()
        except BaseException as interruption:
            end(interruption)
            self._await_end(outcomes)
            raise
        if not isinstance(outcome, BaseException):
            return outcome
        try:
            raise outcome
        finally:
            del outcome  # its traceback has this frame, and would keep the call's tensors

    def close(self) -> None:
        """Lets the thread end."""
        with self._lock:
            self._closed = True
            self._calls.put(None)

    def _hand_over(self, call: Callable[[], float], outcomes: _Outcomes) -> None:
        with self._lock:  # after a close nobody would read it
            if self._closed:
                outcomes.put(
                    RingClosed(f"{self._name}: the ring is closed; make a new one for further calls")
                )
                return
            if self._thread is None:
                # A daemon: a call that waits for another rank must not keep the interpreter from exiting.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._calls.put((call, outcomes))

    def _await_end(self, outcomes: _Outcomes) -> None:
        """Of a call that was ended: it must not write its tensor some time later."""
        if self._thread is None:
            return
        self._calls.put((lambda: 0.0, outcomes))  # its outcome is the first if the call was not handed over
        with contextlib.suppress(queue.Empty):
            outcomes.get(timeout=CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, outcomes = entry
            del entry
            outcome = _outcome(call)
            del call  # or its tensors would live until the next
            outcomes.put(outcome)
            del outcome, outcomes


def _outcome(call: Callable[[], float]) -> float | BaseException:
    try:
        return call()
    except BaseException as error:
        return error
