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
        self.problem: RingError | None = None  # why there was no answer; None again after the next

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
        problem = self.problem
        if problem is not None and self._is_stuck():
            raise type(problem)(str(problem))
        limit = max(self._least_s, self._deadline - time.monotonic())
        asked: Future[T] | None = None
        try:
            asked = self._submit(what, question)
            error = asked.exception(limit)
        except NoAnswer:
            self._unanswered = asked
            raise self._kept(self._no_answer(what, limit)) from None
        except RingError:  # not asked
            raise
        except BaseException:  # Ctrl-C: what is asked behind it, to tell the others, must not wait for long
            self._unanswered = asked
            self._deadline = 0.0
            raise
        if isinstance(error, Exception):
            raise self._kept(self._failed(what, error)) from error
        answer: T = asked.result()
        if not self._is_stuck():
            self.problem = None
        return answer

    def _submit(self, what: str, question: Callable[[], T]) -> Future[T]:
        try:
            return self._thread.submit(question)
        except RingError:  # closed
            raise
        except (RuntimeError, MemoryError) as error:  # "can't start new thread"
            raise self._kept(self._no_thread(what, error)) from error

    def _kept(self, problem: RingError) -> RingError:
        self.problem = problem
        return type(problem)(str(problem))  # what is raised has frames in its traceback

    def _is_stuck(self) -> bool:
        return self._unanswered is not None and not self._unanswered.done()

    def _no_answer(self, what: str, waited_s: float) -> RingTimeout:
        return RingTimeout(
            f"{self._who}: the Store did not answer {what} in {waited_s:.1f} s; is the process that hosts it (of a "
            f"TCPStore, mostly rank 0) alive and not stopped, and can this host reach it?"
        )

    def _no_thread(self, what: str, error: Exception) -> RingError:
        return RingError(
            f"{self._who}: no thread to ask the Store {what} in: {text_of(error)}; raise the limit of threads "
            f"(ulimit -u, or pids.max of a cgroup), or free memory"
        )

    def _failed(self, what: str, error: Exception) -> RingError:
        first = text_of(error).splitlines()[0]  # behind it torch has a trace of C++
        return RingError(
            f"{self._who}: the Store failed at {what}: {first}; is the process that hosts it (of a TCPStore, mostly "
            f"rank 0) alive?"
        )
