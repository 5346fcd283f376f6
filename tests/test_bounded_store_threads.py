"""A bounded Store where no thread can be had, and after Ctrl-C: what is told, and for how long it is believed."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import ring_reduce as rr
from launch import caught
from ring_reduce import bounded_store
from ring_reduce.bootstrap import Member
from ring_reduce.bounded_store import BoundedStore
from ring_reduce.group_failure import FirstFailure
from ring_reduce.group_links import own_connection
from ring_reduce.group_start import Connections, _cause, _NotConnected, _Roll, _told_apart
from stores import DictStore

LONG_S = 30.0
WHO = "ring 'x', rank 0"
GLOO_HINT = "GLOO_SOCKET_IFNAME"


@contextmanager
def no_threads(of: str) -> Iterator[None]:
    """Threads whose names end so can't be had."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.endswith(of):
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", fail):
        yield


def test_no_thread_to_ask_in_is_an_error_with_advice() -> None:
    bounded = BoundedStore(WHO, DictStore(key=b"value"), LONG_S)
    with no_threads(": Store"):
        error = caught(lambda: bounded.get("key"))
    assert type(error) is rr.RingError
    assert str(error).startswith(
        f"{WHO}: no thread to ask the Store get('key') in: RuntimeError: can't start"
    )
    assert "ulimit -u" in str(error)
    assert bounded.get("key") == b"value"  # once there is one
    assert bounded.problem is None
    bounded.close()


@pytest.mark.parametrize("of", [": Store", ": connecting"])
def test_a_rank_that_gets_no_thread_gives_up_the_start(of: str) -> None:
    """It tells the others where it can, and gives no advice on networks."""
    store = dist.HashStore()
    connections = Connections(Member(0, 2, "x"), 1.0, None, 4)
    with no_threads(of), mock.patch("ring_reduce.group_start.GRACE_S", 0.1):
        error = caught(lambda: connections.connect(store, 64))
    assert type(error) is rr.RingError
    assert "can't start new thread" in str(error)
    assert GLOO_HINT not in str(error)
    assert connections._given_up.is_set()
    if of == ": connecting":
        assert str(FirstFailure(BoundedStore(WHO, store, LONG_S)).look()) == str(error)


class SlowStore(DictStore):
    """It answers when it goes on."""

    def __init__(self) -> None:
        super().__init__(key=b"value")
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes:
        self.asked.set()
        self.goes_on.wait(LONG_S)
        return super().get(key)


@contextmanager
def ctrl_c_once_asked(store: SlowStore) -> Iterator[None]:
    struck = threading.Event()

    def handle(number: int, frame: types.FrameType | None) -> None:
        if not struck.is_set():
            struck.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        store.asked.wait(LONG_S)
        while not struck.wait(0.02):  # again, where it came just before the main thread slept
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_no_silence_of_the_store() -> None:
    store = SlowStore()
    bounded = BoundedStore(WHO, store, LONG_S)
    with pytest.raises(KeyboardInterrupt), ctrl_c_once_asked(store):
        bounded.get("key")
    assert bounded.problem is None
    store.goes_on.set()
    assert bounded.get("key") == b"value"  # also while the question before may still be on its way
    bounded.close()


def test_after_ctrl_c_a_store_is_waited_for_shortly() -> None:
    store = SlowStore()
    with mock.patch.object(bounded_store, "GRACE_S", 0.05):
        bounded = BoundedStore(WHO, store, LONG_S)
        with pytest.raises(KeyboardInterrupt), ctrl_c_once_asked(store):
            bounded.get("key")
        with pytest.raises(rr.RingTimeout, match=r"did not answer check\(.* in 0\.1 s"):
            bounded.check(["key"])
        bounded.close()
    store.goes_on.set()


def test_a_problem_is_over_with_the_next_answer() -> None:
    store = mock.Mock(get=mock.Mock(side_effect=[KeyError("once"), b"value"]))
    bounded = BoundedStore(WHO, store, LONG_S)
    assert "the Store failed at get('key')" in str(caught(lambda: bounded.get("key")))
    assert "the Store failed at get('key')" in str(bounded.problem)
    assert bounded.get("key") == b"value"
    assert bounded.problem is None
    bounded.close()


# ---- what all ranks hear of an error while they connect


def not_connected(error: Exception) -> Exception:
    """As an error of Gloo comes up."""
    with pytest.raises(_NotConnected) as raised, _told_apart():
        raise error
    return raised.value


def cause(error: Exception, problem: rr.RingError | None = None) -> rr.RingError:
    """Of rank 0 of 1, for which there is nobody to wait."""
    member, bounded = Member(0, 1, "x"), BoundedStore(WHO, dist.HashStore(), LONG_S)
    bounded.problem = problem
    try:
        if not isinstance(error, rr.RingError):
            error = not_connected(error)
        return _cause(member, error, bounded, FirstFailure(bounded), _Roll(member, bounded))
    finally:
        bounded.close()


def test_what_another_rank_reported_comes_before_a_silent_store() -> None:
    failure, silence = rr.PeerLost("another's"), rr.RingTimeout("silence")
    assert cause(failure, silence) is failure
    assert cause(TimeoutError("late"), silence) is silence


@pytest.mark.parametrize(
    ("error", "of_networks"),
    [
        (RuntimeError("Gloo connectFullMesh failed with Connection refused"), True),
        (TimeoutError("not all ranks were connected in 1.0 s"), True),
        (RuntimeError("can't start new thread"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (MemoryError("std::bad_alloc"), False),
    ],
)
def test_only_who_can_not_connect_is_told_of_networks(error: Exception, of_networks: bool) -> None:
    said = str(cause(error))
    assert (GLOO_HINT in said, "ulimit -u" in said) == (of_networks, not of_networks)


def test_a_store_is_asked_over_a_connection_of_its_own_where_there_can_be_one() -> None:
    class Written(dist.Store):
        """In Python: torch can't make another."""

    for store in (Written(), types.SimpleNamespace()):
        without: Any = store
        assert own_connection(without) is store
    if hasattr(dist.HashStore, "clone"):
        first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        second = own_connection(first)
        first.set("key", "value")
        assert second is not first
        assert second.get("key") == b"value"
