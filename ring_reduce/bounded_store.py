"""A Store that answers, or is an error: nobody waits for it without end.

A question to torch's TCPStore has no limit of time. While the process that hosts it is stopped, or out of reach, it
waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer  # another class before Python 3.11
from typing import Any, TypeVar

from .bootstrap import GRACE_S, Store
from .errors import RingError, RingTimeout, text_of
from .work import CommunicationThread

T = TypeVar("T")


class BoundedStore:
    """``store``, asked in a thread that is left behind where no answer comes; all further questions then fail at once.

    An answer is waited for until ``timeout_s`` after this object was made, and later still for up to ``GRACE_S``: a
    Store that is well takes far less. From any thread. Errors begin with ``who``: a ring and a rank.
    """

    def __init__(self, who: str, store: Store, timeout_s: float) -> None:
        self._who = who
        self._store: Any = store
        self._deadline = time.monotonic() + timeout_s
        self._least_s = min(timeout_s, GRACE_S)
        self._thread = CommunicationThread(f"{who}: Store")
        self._unanswered: Future[Any] | None = None
        self.problem: RingError | None = None  # the last one

    def set(self, key: str, value: Any, /) -> None:
        self._ask(f"set({key!r})", lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        return self._ask(f"get({key!r})", lambda: bytes(self._store.get(key)))

    def check(self, keys: list[str], /) -> bool:
        return self._ask(f"check({keys!r})", lambda: bool(self._store.check(keys)))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Of torch's Stores alone."""
        return self._ask(
            f"compare_set({key!r})", lambda: bytes(self._store.compare_set(key, expected, desired))
        )

    def close(self) -> None:
        """Lets the thread end: at Python's exit it must not be on its way back from the Store."""
        self._thread.stop(0.0 if self._is_stuck() else GRACE_S)

    def _ask(self, what: str, question: Callable[[], T]) -> T:
        if self._is_stuck() and self.problem is not None:
            raise type(self.problem)(str(self.problem))
        limit = max(self._least_s, self._deadline - time.monotonic())
        asked = self._thread.submit(question)
        try:
            error = asked.exception(limit)
        except BaseException as interruption:  # no answer, or Ctrl-C
            self._unanswered = asked
            self.problem = self._no_answer(what, limit)
            if isinstance(interruption, NoAnswer):
                raise self.problem from None
            raise
        if isinstance(error, Exception):
            self.problem = self._failed(what, error)
            raise self.problem from error
        answer: T = asked.result()
        return answer

    def _is_stuck(self) -> bool:
        return self._unanswered is not None and not self._unanswered.done()

    def _no_answer(self, what: str, waited_s: float) -> RingTimeout:
        return RingTimeout(
            f"{self._who}: the Store did not answer {what} in {waited_s:.1f} s; is the process that hosts it (of a "
            f"TCPStore, mostly rank 0) alive and not stopped, and can this host reach it?"
        )

    def _failed(self, what: str, error: Exception) -> RingError:
        first = text_of(error).splitlines()[0]  # behind it torch has a trace of C++
        return RingError(
            f"{self._who}: the Store failed at {what}: {first}; is the process that hosts it (of a TCPStore, mostly "
            f"rank 0) alive?"
        )
