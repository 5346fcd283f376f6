"""The three exchanges by which the ranks make a ring together, whatever the transport."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from .bootstrap import GRACE_S, Hub, Member, Store, connect, hear, heard
from .channel import Channel, close_all, raise_refusal, refusal_of
from .errors import RingError, RingMismatch, RingTimeout

_Opened = TypeVar("_Opened")


@dataclass(frozen=True)
class Part:
    """What a rank makes and hands to all others: a JSON record, and open file descriptors, which the handshake owns."""

    record: dict[str, Any]
    descriptors: list[int]


class Transport(Protocol[_Opened]):
    """What differs between transports: the sizes, what each rank makes, and how that of all becomes one rank's end."""

    @property
    def steps(self) -> Sequence[Callable[[_Opened], None]]:
        """What a rank does with its end, each step once all ranks have done what comes before it."""

    def agree(self, mine: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: what all ranks use, of what each wants; raises what they can't agree on."""

    def make_part(self, agreed: dict[str, Any]) -> Part:
        """This rank's part."""

    def descriptors(self, rank: int) -> int:
        """How many go with the part of a rank."""

    def open(self, agreed: dict[str, Any], parts: list[Part], processes: list[int]) -> _Opened:
        """This rank's end, of the parts of all and their pidfds by rank (-1: none), borrowed."""

    def discard(self, opened: _Opened | None) -> None:
        """Takes back what was made, once the others know that there will be no ring. None: not opened yet."""


def make_together(
    member: Member, store: Store | None, timeout: float, hello: dict[str, Any], transport: Transport[_Opened]
) -> _Opened:
    """What ``transport.open`` makes of the parts of all ranks, once every rank has opened it and done the steps."""
    handshake = _Handshake(member, store, timeout, transport)
    try:
        if member.world == 1:
            return handshake.alone(hello)
        if store is None:
            raise ValueError(f"{member.who}: a ring of {member.world} ranks needs a store to meet in")
        if member.rank == 0:
            return handshake.as_hub(Hub(member, store, timeout), hello)
        return handshake.as_member(connect(member, store, timeout), hello)
    finally:
        handshake.close_descriptors()


def check_equal(
    member: Member, first: dict[str, Any], hellos: Mapping[int, dict[str, Any]], keys: Set[str]
) -> None:
    """``RingMismatch`` names a rank whose hello differs from rank 0's ``first`` in one of ``keys``, and both values."""
    for rank, hello in hellos.items():
        for key in first:
            if key in keys and hello.get(key) != first[key]:
                raise RingMismatch(
                    f"ring {member.name!r}: {key} is {first[key]!r} on rank 0 and {hello.get(key)!r} on rank {rank}; "
                    f"every rank has to run the same version of ring_reduce with the same settings"
                )


class _Handshake(Generic[_Opened]):
    """One rank's part. Owns all descriptors until the ring has copies of them, and the ring until all have it."""

    def __init__(
        self, member: Member, store: Store | None, timeout: float, transport: Transport[_Opened]
    ) -> None:
        self._member = member
        self._store = store
        self._timeout = timeout
        self._transport = transport
        self._ring: _Opened | None = None
        self._has_heard = False  # why there is no ring, from rank 0 or by its silence
        self._parts: dict[int, Part] = {}  # by rank
        self._process: dict[int, int] = {}  # by rank; none where the kernel has no pidfds

    def alone(self, hello: dict[str, Any]) -> _Opened:
        with self._taken_back_on_error(lambda error: None):
            agreed = self._transport.agree(hello, {})
            self._make_part(agreed)
            return self._open(agreed, lambda: None)

    def as_hub(self, hub: Hub, hello: dict[str, Any]) -> _Opened:
        def all_have() -> None:
            for _, _, descriptors in hub.gather():  # all are ready
                close_all(descriptors)
            hub.tell_all({"go": True})

        def refuse(error: BaseException) -> None:
            hub.refuse(_refusal(self._member, error))

        with contextlib.closing(hub), self._taken_back_on_error(refuse):
            agreed = self._transport.agree(hello, hub.gather_hellos())
            hub.tell_all({"agreed": agreed})
            self._make_part(agreed)
            for rank, message, descriptors in hub.gather():
                self._take(rank, message, descriptors)
            for rank in range(self._member.world):
                hub.tell_all(*self._handed_on(rank))
            return self._open(agreed, all_have)

    def as_member(self, hub: Channel, hello: dict[str, Any]) -> _Opened:
        def all_have() -> None:
            self._tell(hub, {"ready": True})
            self._hear_plain(hub)

        with contextlib.closing(hub), self._taken_back_on_error(partial(self._refuse, hub)):
            self._tell(hub, hello)
            agreed = self._hear_plain(hub).get("agreed")
            if not isinstance(agreed, dict):
                raise self._unknown(0, "agreed", agreed)
            self._make_part(agreed)
            self._tell(hub, *self._handed_on(self._member.rank))
            for other in range(self._member.world):
                self._take(other, *self._hear(hub))
            return self._open(agreed, all_have)

    @contextlib.contextmanager
    def _taken_back_on_error(self, refuse: Callable[[BaseException], None]) -> Iterator[None]:
        """Where the ring can't be made, the others hear why, and what was made of it goes."""
        try:
            yield
        except BaseException as error:
            try:
                refuse(error)
            finally:
                self._transport.discard(self._ring)
                self._ring = None  # or the error's traceback would keep its descriptors open
            raise

    def _refuse(self, hub: Channel, error: BaseException) -> None:
        """Stays until rank 0 has told all, and raises what it told if that is another rank's error.

        Others may be opening what this rank is about to take back: what they then say must not come first. Ctrl-C and
        ``SystemExit`` remain what they are, and do not wait.
        """
        heard.add((self._member.rank, hub.address))
        refusal = _refusal(self._member, error)
        with contextlib.suppress(OSError):  # rank 0 is gone, but may have said why
            hub.send(refusal)
        if not isinstance(error, Exception):
            return
        with contextlib.suppress(OSError, TimeoutError):
            until = time.monotonic() + min(self._timeout, GRACE_S)
            while not self._has_heard:
                message, descriptors = hub.receive(until)
                close_all(descriptors)
                self._has_heard = "error" in message
                if message.get("error", refusal["error"]) != refusal["error"]:
                    raise_refusal(message)

    def _open(self, agreed: dict[str, Any], all_have: Callable[[], None]) -> _Opened:
        """This rank's end, once all ranks have theirs and have done the steps."""
        ranks = range(self._member.world)
        processes = [-1 if rank == self._member.rank else self._process.get(rank, -1) for rank in ranks]
        self._ring = self._transport.open(agreed, [self._parts[rank] for rank in ranks], processes)
        all_have()
        for step in self._transport.steps:
            step(self._ring)
            all_have()
        return self._ring

    def close_descriptors(self) -> None:
        for part in self._parts.values():
            close_all(part.descriptors)
        close_all([*self._process.values()])

    def _tell(self, hub: Channel, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            hub.send(message, descriptors)
        except OSError:  # it is gone, but may have said why
            self._hear(hub)

    def _hear(self, hub: Channel) -> tuple[dict[str, Any], list[int]]:
        assert self._store is not None
        try:
            return hear(self._member, self._store, hub, self._timeout)
        except RingError:
            self._has_heard = True
            raise

    def _hear_plain(self, hub: Channel) -> dict[str, Any]:
        """A message with which no descriptors come."""
        message, descriptors = self._hear(hub)
        close_all(descriptors)
        return message

    def _unknown(self, rank: int, what: str, value: object) -> RingError:
        return RingError(
            f"{self._member.who}: rank {rank} sent {value!r:.80} for {what!r}, which no rank of this version sends"
        )

    def _make_part(self, agreed: dict[str, Any]) -> None:
        self._parts[self._member.rank] = self._transport.make_part(agreed)
        # An old kernel, or a sandbox: deaths are then seen by the deadline.
        with contextlib.suppress(OSError):
            self._process[self._member.rank] = os.pidfd_open(os.getpid())

    def _handed_on(self, rank: int) -> tuple[dict[str, Any], list[int]]:
        """A rank's part and pidfd: the message, and the descriptors that go with it."""
        part, process = self._parts[rank], [self._process[rank]] if rank in self._process else []
        descriptors = [*part.descriptors, *process]
        message = {"rank": rank, "descriptors": len(descriptors), "processes": len(process)}
        return {**message, "record": part.record}, descriptors

    def _take(self, rank: int, message: dict[str, Any], descriptors: list[int]) -> None:
        if rank in self._parts:  # its own, back from rank 0
            close_all(descriptors)
            return
        processes, record = message.get("processes"), message.get("record", {})
        if len(descriptors) != message.get("descriptors") or processes not in (0, 1):
            close_all(descriptors)
            raise RingError(
                f"{self._member.who}: got {len(descriptors)} file descriptors of rank {rank} where it sent "
                f"{message.get('descriptors')}; is the limit on open files (ulimit -n) reached?"
            )
        right = len(descriptors) == self._transport.descriptors(rank) + int(processes)
        if not right or not isinstance(record, dict):
            close_all(descriptors)
            raise self._unknown(rank, "descriptors and record", (message["descriptors"], record))
        if processes:
            self._process[rank] = descriptors.pop()
        self._parts[rank] = Part(record, descriptors)


def _refusal(member: Member, error: BaseException) -> dict[str, Any]:
    kinds: dict[type[BaseException], str] = {RingTimeout: "timeout", RingMismatch: "mismatch"}
    text = str(error) if isinstance(error, RingError) else f"{member.who}: {type(error).__name__}: {error}"
    return refusal_of(text, kinds.get(type(error), "error"))
