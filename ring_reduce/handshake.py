"""The three exchanges by which the ranks make a ring together, whatever the transport."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Generic, Protocol, TypeVar

from .bootstrap import Hub, Member, Store, connect, hear
from .channel import Channel
from .errors import RingError, RingMismatch, RingTimeout

_Opened = TypeVar("_Opened")


class Transport(Protocol[_Opened]):
    """What differs between transports: the sizes, and memory behind file descriptors."""

    def agree(self, mine: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> dict[str, Any]: ...
    def make_memory(self, agreed: dict[str, Any]) -> int: ...
    def map(self, agreed: dict[str, Any], memory: list[int], processes: list[int]) -> _Opened: ...
    def close(self, opened: _Opened) -> None: ...


def make_together(
    member: Member, store: Store | None, timeout: float, hello: dict[str, Any], transport: Transport[_Opened]
) -> _Opened:
    """What ``transport.map`` makes of the memory of all ranks, once every rank has mapped it."""
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


class _Handshake(Generic[_Opened]):
    """One rank's part. Owns all descriptors until the ring has copies of them."""

    def __init__(
        self, member: Member, store: Store | None, timeout: float, transport: Transport[_Opened]
    ) -> None:
        self._member = member
        self._store = store
        self._timeout = timeout
        self._transport = transport
        self._memory: dict[int, int] = {}  # by rank
        self._process: dict[int, int] = {}  # by rank; none where the kernel has no pidfds

    def alone(self, hello: dict[str, Any]) -> _Opened:
        agreed = self._transport.agree(hello, {})
        self._make_memory(agreed)
        return self._map(agreed)

    def as_hub(self, hub: Hub, hello: dict[str, Any]) -> _Opened:
        ring: _Opened | None = None
        try:
            agreed = self._transport.agree(hello, hub.gather_hellos())
            hub.tell_all({"agreed": agreed})
            self._make_memory(agreed)
            for rank, message, descriptors in hub.gather():
                self._take(rank, message, descriptors)
            for rank in range(self._member.world):
                hub.tell_all(*self._handed_on(rank))
            ring = self._map(agreed)
            for _ in hub.gather():  # all are ready
                pass
            hub.tell_all({"go": True})
            return ring
        except BaseException as error:
            hub.refuse(_refusal(self._member, error))
            if ring is not None:
                self._transport.close(ring)
            ring = None  # or the error's traceback would keep its descriptors open
            raise
        finally:
            hub.close()

    def as_member(self, hub: Channel, hello: dict[str, Any]) -> _Opened:
        rank = self._member.rank
        ring: _Opened | None = None
        try:
            self._tell(hub, hello)
            agreed = self._hear(hub)[0]["agreed"]
            self._make_memory(agreed)
            self._tell(hub, *self._handed_on(rank))
            for other in range(self._member.world):
                self._take(other, *self._hear(hub))
            ring = self._map(agreed)
            self._tell(hub, {"ready": True})
            self._hear(hub)
            return ring
        except BaseException as error:
            with contextlib.suppress(OSError):
                hub.send(_refusal(self._member, error))
            if ring is not None:
                self._transport.close(ring)
            ring = None  # or the error's traceback would keep its descriptors open
            raise
        finally:
            hub.close()

    def close_descriptors(self) -> None:
        _close_all([*self._memory.values(), *self._process.values()])

    def _tell(self, hub: Channel, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            hub.send(message, descriptors)
        except OSError:  # it is gone, but may have said why
            self._hear(hub)

    def _hear(self, hub: Channel) -> tuple[dict[str, Any], list[int]]:
        assert self._store is not None
        return hear(self._member, self._store, hub, self._timeout)

    def _make_memory(self, agreed: dict[str, Any]) -> None:
        self._memory[self._member.rank] = self._transport.make_memory(agreed)
        # An old kernel, or a sandbox: deaths are then seen by the deadline.
        with contextlib.suppress(OSError):
            self._process[self._member.rank] = os.pidfd_open(os.getpid())

    def _handed_on(self, rank: int) -> tuple[dict[str, Any], list[int]]:
        """A rank's descriptors and the message that goes with them."""
        descriptors = [table[rank] for table in (self._memory, self._process) if rank in table]
        return {"rank": rank, "descriptors": len(descriptors)}, descriptors

    def _take(self, rank: int, message: dict[str, Any], descriptors: list[int]) -> None:
        if rank in self._memory:  # its own, back from rank 0
            _close_all(descriptors)
            return
        if not 1 <= len(descriptors) <= 2 or len(descriptors) != message.get("descriptors"):
            _close_all(descriptors)
            raise RingError(
                f"{self._member.who}: got {len(descriptors)} file descriptors of rank {rank} where it sent "
                f"{message.get('descriptors')}; is the limit on open files (ulimit -n) reached?"
            )
        self._memory[rank] = descriptors[0]
        if len(descriptors) == 2:
            self._process[rank] = descriptors[1]

    def _map(self, agreed: dict[str, Any]) -> _Opened:
        ranks = range(self._member.world)
        processes = [-1 if rank == self._member.rank else self._process.get(rank, -1) for rank in ranks]
        return self._transport.map(agreed, [self._memory[rank] for rank in ranks], processes)


def _refusal(member: Member, error: BaseException) -> dict[str, Any]:
    kinds: dict[type[BaseException], str] = {RingTimeout: "timeout", RingMismatch: "mismatch"}
    text = str(error) if isinstance(error, RingError) else f"{member.who}: {type(error).__name__}: {error}"
    return {"error": text, "kind": kinds.get(type(error), "error")}


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
