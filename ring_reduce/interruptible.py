"""Calls that Ctrl-C ends although they wait inside a library that does not look for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from .ending import CLOSE_TIMEOUT_S


class CallThread:
    """Runs calls of the main thread on one of its own: Python's wait for that ends with a signal, Gloo's does not.

    The hand-over costs some 0.1 ms a call, where one between two ranks of a host takes 0.5 ms.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], float] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._interrupted = False

    def run(self, call: Callable[[], float], end: Callable[[BaseException], object]) -> float:
        """What ``call`` returns or raises. ``end`` has to end it, for good: it gets what interrupts the wait."""
        if self._interrupted:  # what comes from the thread may be of the call before
            return call()
        if self._thread is None:
            # A daemon: a call that waits for another rank must not keep the interpreter from exiting.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._calls.put(call)
        try:
            outcome = self._outcomes.get()
        except BaseException as interruption:
            self._interrupted = True
            end(interruption)
            with contextlib.suppress(queue.Empty):  # the call must not write its tensor some time later
                self._outcomes.get(timeout=CLOSE_TIMEOUT_S)
            raise
        if not isinstance(outcome, BaseException):
            return outcome
        try:
            raise outcome
        finally:
            del outcome  # its traceback has this frame, and would keep the call's tensors

    def close(self) -> None:
        """Lets the thread end."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._outcomes.put(_outcome(call))
            del call  # or its tensors would live until the next


def _outcome(call: Callable[[], float]) -> float | BaseException:
    try:
        return call()
    except BaseException as error:
        return error
