"""Calls of the main thread that run on another: each has its own outcome, whatever comes in between."""

from __future__ import annotations

import contextlib
import functools
import gc
import queue
import signal
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ring_reduce as rr
from launch import caught
from ring_reduce import interruptible
from ring_reduce.interruptible import CallThread

LONG_S = 30.0


@pytest.fixture
def calls() -> Iterator[CallThread]:
    thread = CallThread("ring 'x', rank 0: calls")
    yield thread
    thread.close()


def not_ended(interruption: BaseException) -> None:
    raise AssertionError(f"nothing interrupted the call: {interruption!r}")


def in_time(call: Any) -> list[Any]:
    """What ``call`` returns, or raises, in a thread; nothing if it does not end."""
    found: list[Any] = []

    def keep() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(5.0)
    return found


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_call_after_close_is_an_error(calls: CallThread, calls_before: int) -> None:
    for _ in range(calls_before):
        calls.run(lambda: 1.0, not_ended)
    calls.close()
    (error,) = in_time(lambda: calls.run(lambda: 2.0, not_ended))
    assert type(error) is rr.RingClosed
    assert str(error) == "ring 'x', rank 0: calls: the ring is closed; make a new one for further calls"


def test_a_call_in_a_signal_handler_gets_its_own_outcome(calls: CallThread) -> None:
    inner: list[float] = []
    struck = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if struck.is_set():
            return
        struck.set()
        inner.append(calls.run(lambda: 2.0, not_ended))

    def outer() -> float:
        while not struck.wait(0.02):  # again, where it came just before the main thread slept
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]
        return 1.0

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert calls.run(outer, not_ended) == 1.0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert inner == [2.0]


class InterruptedQueue:
    """Ctrl-C comes with the first call that is put, just before or after it."""

    def __init__(self, put_first: bool) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._put_first = put_first
        self._left = 1

    def put(self, entry: Any) -> None:
        strikes, self._left = self._left > 0, 0
        if not strikes or self._put_first:
            self._queue.put(entry)
        if strikes:
            raise KeyboardInterrupt

    def get(self) -> Any:
        return self._queue.get()


@pytest.mark.parametrize("put_first", [False, True])
def test_ctrl_c_while_a_call_is_handed_over_ends_it(calls: CallThread, put_first: bool) -> None:
    """And returns once the call has ended; the next has its own outcome."""
    calls._calls = InterruptedQueue(put_first)  # type: ignore[assignment]
    ended = threading.Event()
    heard: list[BaseException] = []
    done: list[float] = []

    def end(interruption: BaseException) -> None:
        heard.append(interruption)
        ended.set()

    def call() -> float:
        ended.wait(LONG_S)
        done.append(1.0)
        return 1.0

    with mock.patch.object(interruptible, "CLOSE_TIMEOUT_S", LONG_S), pytest.raises(KeyboardInterrupt):
        calls.run(call, end)
    assert [type(error) for error in heard] == [KeyboardInterrupt]
    assert done == [1.0] * put_first
    assert calls.run(lambda: 2.0, not_ended) == 2.0


def test_a_thread_that_can_not_start_ends_the_call(calls: CallThread) -> None:
    heard: list[BaseException] = []
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        error = caught(lambda: calls.run(lambda: 1.0, heard.append))
    assert heard == [error]
    assert str(error) == "can't start new thread"


def test_nothing_of_a_call_is_kept(calls: CallThread) -> None:
    """Without a garbage collection, and also where it raised."""

    def use(x: Any, fails: bool) -> float:
        if fails:
            raise ValueError(str(x[0]))
        return 1.0

    gc.disable()
    try:
        for fails in (False, True):
            x = np.ones(3)
            kept = weakref.ref(x)
            with pytest.raises(ValueError, match=r"1\.0") if fails else contextlib.nullcontext() as error:
                calls.run(functools.partial(use, x, fails), not_ended)
            del x, error
            if fails:
                calls.run(lambda: 1.0, not_ended)  # the thread has let go of the error
            assert kept() is None
    finally:
        gc.enable()
