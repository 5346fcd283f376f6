"""How a ring over process groups is connected: on all ranks, or on none, and then all say who was missing.

Gloo connects in a constructor that nothing interrupts, that may take five times its timeout, and that names no rank. So
it runs in a thread, and meanwhile this rank looks into the ring's store, whether another has failed. The first that is
in trouble calls the roll there: who does not answer is named.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist

from .bootstrap import GRACE_S, Member
from .bounded_store import BoundedStore
from .chunk_passes import prepare_device
from .errors import RingAborted, RingError, RingTimeout, text_of
from .group_failure import FirstFailure, again
from .group_links import GlooLinks, Links, NcclLinks, first_line, others
from .work import CommunicationThread

_LOOK_EVERY_S = 0.25
_POLL_S = 0.002
# Of torch, CUDA, Python and the system, where memory or threads are lacking.
_SCARCE = ("allocate memory", "out of memory", "start new thread", "Resource temporarily unavailable")


class Connections:
    """What a rank has of the others: links, and ``places`` of staging for what comes and goes."""

    def __init__(self, member: Member, timeout_s: float, device: torch.device | None, places: int) -> None:
        self.talk: GlooLinks | None = None  # for the records by which ranks agree
        self.links: Links | None = None
        self.staging = [torch.empty(0, dtype=torch.uint8)] * places
        self._member = member
        self._timeout_s = timeout_s
        self._device = device
        self._given_up = threading.Event()
        self._lock = threading.Lock()

    def connect(self, store: dist.Store, place_bytes: int) -> None:
        """Makes them together with all ranks. An error of one is an error on all."""
        member = self._member
        bounded = BoundedStore(member.who, store, self._timeout_s)
        failures, roll = FirstFailure(bounded), _Roll(member, bounded)
        thread = CommunicationThread(f"{member.who}: connecting")
        making: list[Future[None]] = []
        try:
            with _told_apart():
                making.append(thread.submit(lambda: self._make(store, bounded, place_bytes)))
            _await(making[0], failures, roll, self._timeout_s)
            roll.answer()
        except BaseException as error:
            first = failures.report(_cause(member, error, bounded, failures, roll))
            self._give_up()
            wait(making, 1.0)
            if isinstance(error, (RingError, _NotConnected)):
                raise again(first) from None
            raise
        finally:
            thread.stop(0.0)
            bounded.close()

    def _make(self, store: dist.Store, bounded: BoundedStore, place_bytes: int) -> None:
        """In the thread. Returns once all ranks have theirs: whoever left a ring that it has just made would close
        connections that others are still making."""
        self.talk = GlooLinks(self._member, _AskedStore(bounded, self._given_up), self._timeout_s)
        self.links = self.talk
        self._check_wanted()
        if self._device is not None:
            self.links = NcclLinks(self._member, store, self._timeout_s, self._device)
        memory = torch.empty(len(self.staging) * place_bytes, dtype=torch.uint8, device=self._device or "cpu")
        self.staging = list(memory.split(place_bytes))
        self._check_wanted()
        if self._device is not None:
            prepare_device(self._device, self._member.who)
        self.talk.exchange(b"ready").wait()

    def _give_up(self) -> None:
        """Ends what can be ended of :meth:`_make`; a constructor of Gloo ends by itself, and then what it made."""
        with self._lock:
            self._given_up.set()
            self._abort()

    def _check_wanted(self) -> None:
        with self._lock:
            if self._given_up.is_set():
                self._abort()
                raise RuntimeError("the ring was given up")

    def _abort(self) -> None:
        for links in (self.talk, self.links):
            if links is not None:
                links.abort()


def _await(making: Future[None], failures: FirstFailure, roll: _Roll, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not wait([making], _LOOK_EVERY_S).done:
        failure = failures.look()
        if failure is not None:
            raise failure
        roll.answer_if_called()
        if time.monotonic() > deadline:
            raise _NotConnected from TimeoutError(f"not all ranks were connected in {timeout_s:.1f} s")
    with _told_apart():
        making.result()


class _NotConnected(Exception):
    """Its cause is an error of Gloo, NCCL or memory. Any other that comes up here is the user's, of a signal's handler
    say, and stays what it is."""


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except RingError:
        raise
    except Exception as error:
        raise _NotConnected from error


def _cause(
    member: Member, error: BaseException, bounded: BoundedStore, failures: FirstFailure, roll: _Roll
) -> RingError:
    """What all ranks hear of an error of this one."""
    if isinstance(error, RingError):  # another rank's, or the store's
        return error
    if not isinstance(error, _NotConnected):
        return RingAborted(f"rank {member.rank} aborted the ring: {text_of(error)}")
    error = error.__cause__ or error
    silent = roll.call(failures) if bounded.problem is None else []
    if bounded.problem is not None:
        return bounded.problem
    kind = RingTimeout if isinstance(error, TimeoutError) else RingError
    if silent:
        return kind(
            f"{member.who}: no sign of rank {', '.join(map(str, silent))} of {member.world} while the ring was "
            f"connected ({first_line(error)}); has it ended, or is it stopped? Look at its output, then start the job "
            f"again"
        )
    return kind(
        f"{member.who}: no process group of the ring's own could be made: {first_line(error)}; all ranks are alive; "
        f"{_advice(error)}"
    )


def _advice(error: BaseException) -> str:
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _SCARCE):
        return "is memory short, or the limit of it or of threads too low (ulimit -v, ulimit -u, a cgroup's)?"
    return "can their hosts reach each other (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)?"


class _Roll:
    """Which ranks are there: by a word of each in the ring's store, once one has asked for it."""

    def __init__(self, member: Member, store: BoundedStore) -> None:
        self._member = member
        self._store = store
        self._answered = False

    def answer(self) -> None:
        """This rank is there. Who has made its connections, and looks no more, says so unasked."""
        self._store.set(f"here/{self._member.rank}", b"")
        self._answered = True

    def answer_if_called(self) -> None:
        if not self._answered and self._store.check(["roll"]):
            self.answer()

    def call(self, failures: FirstFailure) -> list[int]:
        """The ranks that do not answer for ``GRACE_S``; none once another rank has named the failure."""
        silent = others(self._member)
        try:
            self.answer()
            self._store.set("roll", b"")
            deadline = time.monotonic() + GRACE_S
            while silent and time.monotonic() < deadline and failures.look() is None:
                silent = [rank for rank in silent if not self._store.check([f"here/{rank}"])]
                time.sleep(_POLL_S)
        except RingError:  # of the store, which keeps it
            pass
        return silent


class _AskedStore(dist.Store):
    """What Gloo asks of a store, put to a bounded one. With torch's it would hold the lock of a TCPStore's connection
    as long as it waits for a key, and whoever looks for failures meanwhile would wait with it."""

    def __init__(self, store: BoundedStore, given_up: threading.Event) -> None:
        super().__init__()
        self._store = store
        self._given_up = given_up

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Until the ring is given up: :meth:`Connections.connect` has the deadline."""
        while not self._store.check(keys):
            if self._given_up.wait(_POLL_S):
                raise RuntimeError("the ring was given up")
