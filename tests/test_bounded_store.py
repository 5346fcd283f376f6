"""A Store that does not answer, or fails: an error with a limit of time, whatever the ring was doing with it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import ring_reduce as rr
from launch import Seat, Team, caught, forkserver, run_script
from ring_reduce import group_start
from ring_reduce.bounded_store import BoundedStore
from ring_reduce.group_links import GlooLinks
from stores import DictStore

TIMEOUT_S = 1.5
ENDED_S = 40.0  # a bound on a hang, far above the timeout and what is added to it


class StoppedStore(DictStore):
    """Of a process that is stopped: it answers when it goes on."""

    def __init__(self) -> None:
        super().__init__(key=b"value")
        self.goes_on = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.goes_on.wait(ENDED_S)
        return super().check(keys)


def test_a_store_that_is_stopped_is_asked_once() -> None:
    store, before = StoppedStore(), threading.active_count()
    bounded = BoundedStore("ring 'x', rank 2", store, 0.05)
    for _ in range(3):
        with pytest.raises(
            rr.RingTimeout, match=r"ring 'x', rank 2: the Store did not answer check\(\['key'\]\) in"
        ):
            bounded.check(["key"])
    with pytest.raises(rr.RingTimeout, match=r"check.* is the process that hosts it .* not stopped"):
        bounded.get("key")  # and says what had no answer
    assert (store.asked, threading.active_count()) == (1, before + 1)
    store.goes_on.set()
    bounded.close()


def test_a_store_that_goes_on_again_answers() -> None:
    store = StoppedStore()
    bounded = BoundedStore("ring 'x', rank 2", store, 0.05)
    assert type(caught(lambda: bounded.check(["key"]))) is rr.RingTimeout
    store.goes_on.set()
    deadline = time.monotonic() + ENDED_S
    while caught(lambda: bounded.check(["key"])) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bounded.get("key") == b"value"
    bounded.close()


def test_what_a_store_raises_is_told_with_the_question() -> None:
    """Also where it is a time-out: it is not this one's."""
    for error in (KeyError("gone"), TimeoutError("no key"), rr.RingError("odd")):
        store = mock.Mock(get=mock.Mock(side_effect=error))
        bounded = BoundedStore("ring 'x', rank 2", store, 30.0)
        raised = caught(lambda bounded=bounded: bounded.get("key"))  # type: ignore[misc]
        assert type(raised) is rr.RingError
        assert f"ring 'x', rank 2: the Store failed at get('key'): {type(error).__name__}" in str(raised)
        bounded.close()


@pytest.mark.parametrize("kind", ["HashStore", "PrefixStore", "FileStore", "three methods"])
def test_stores_of_all_kinds_can_be_bounded(kind: str, tmp_path: Path) -> None:
    stores: dict[str, Any] = {
        "HashStore": dist.HashStore,
        "PrefixStore": lambda: dist.PrefixStore("a/b", dist.HashStore()),
        "FileStore": lambda: dist.FileStore(str(tmp_path / "file"), 1),
        "three methods": DictStore,
    }
    bounded = BoundedStore("ring 'x', rank 2", stores[kind](), 30.0)
    assert not bounded.check(["key"])
    bounded.set("key", b"value")
    assert bounded.check(["key"])
    assert bounded.get("key") == b"value"
    bounded.close()


# ---- the process that hosts a TCPStore is stopped


def host(messages: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    messages.send(store.port)
    messages.recv()


@contextlib.contextmanager
def hosted_store() -> Iterator[tuple[int, int]]:
    """A TCPStore in a process of its own: its port, and the process."""
    ours, theirs = forkserver().Pipe()
    process = forkserver().Process(target=host, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv(), process.pid
    finally:
        process.kill()
        process.join()


def stop(process: int) -> None:
    """And returns once it has stopped, all its threads with it."""
    os.kill(process, signal.SIGSTOP)
    while any(") T " not in stat.read_text() for stat in Path(f"/proc/{process}/task").glob("*/stat")):
        time.sleep(0.001)


def tcp_store(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))


class HaltedStore(dist.Store):
    """``store``, for a rank that says that it is here with its first question, and asks no more until ``store`` is
    stopped once it would wait for another rank: whatever the clock says, it is in the middle of its start then."""

    def __init__(self, seat: Seat, store: Any, halts: bool) -> None:
        super().__init__()
        self._seat = seat
        self._store = store
        self.halts = halts

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        found = bool(self._store.check(keys))
        if self.halts:
            self._seat.store.set(f"here {self._seat.rank}", b"")
        if found or not self.halts:
            return found
        self._seat.store.get("stopped")
        return bool(self._store.check(keys))


def make(seat: Seat, port: int, transport: str, stage: str) -> Exception | None:
    """The last rank comes late, or is late to connect, until the Store is stopped."""
    late = seat.rank == seat.world - 1
    store = HaltedStore(seat, tcp_store(port), halts=stage == "meeting")
    seat.meet("start")  # from here the time counts
    if stage == "before" or (stage == "meeting" and late):
        seat.store.set(f"here {seat.rank}", b"")
        seat.store.get("stopped")

    def connect(*arguments: Any) -> Any:
        store.halts = True
        if late:
            seat.store.get("stopped")
        return GlooLinks(*arguments)

    options: dict[str, Any] = {"transport": transport, "_has_group": transport == "process_group"}
    patch = mock.patch.object(group_start, "GlooLinks", connect)
    with patch if stage == "connecting" else contextlib.nullcontext():
        return caught(
            lambda: rr.Ring(store, rank=seat.rank, world=seat.world, timeout=TIMEOUT_S, name="x", **options)
        )


@pytest.mark.parametrize(
    ("transport", "stage"),
    [
        ("shm", "before"),
        ("shm", "meeting"),
        ("process_group", "before"),
        ("process_group", "meeting"),
        ("process_group", "connecting"),
    ],
)
def test_a_store_whose_process_is_stopped_ends_the_start(transport: str, stage: str) -> None:
    with hosted_store() as (port, process), Team(3) as team:
        team.begin(make, port, transport, stage)
        for rank in range(3):
            team.wait_for(f"here {rank}")
        stop(process)
        team.store.set("stopped", b"")
        errors = team.finish(timeout=ENDED_S)
    for error in errors:
        assert type(error) is rr.RingTimeout
        assert "ring 'x', rank " in str(error)
        assert ": the Store did not answer " in str(error)
        assert "not stopped" in str(error)


EXIT = """
import os, signal, sys, pathlib, time
import ring_reduce as rr
from torch.distributed import TCPStore
child_says, say = os.pipe()
child = os.fork()
if child == 0:
    os.close(1)  # which are waited for
    os.close(2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(say, str(store.port).encode())
    time.sleep(100)
    os._exit(0)
store = TCPStore("127.0.0.1", int(os.read(child_says, 100)), is_master=False)
os.kill(child, signal.SIGSTOP)
try:
    rr.Ring(store, rank=1, world=2, timeout=0.5)
except rr.RingTimeout as error:
    print(error)
"""


def test_python_exits_while_a_store_does_not_answer(tmp_path: Path) -> None:
    ((status, output, errors),) = run_script(1, EXIT, tmp_path)
    assert (status, errors) == (0, "")
    assert "the Store did not answer" in output
