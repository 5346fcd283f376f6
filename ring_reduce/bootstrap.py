"""How the ranks of a host find each other and share memory: a Store for one address, then a Unix socket.

Rank 0 listens on an abstract Unix socket, which has no file, and puts its address into the Store. The others connect
and three exchanges follow, each through rank 0, so that a failure of one rank is an error on all:

1. each says what it wants (hello), rank 0 answers what is agreed;
2. each makes its memory and sends it with its pidfd, rank 0 passes them all to all;
3. each maps them and says so (ready), rank 0 answers go.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .channel import Channel, close_all, dial, first_readable, json_object, raise_refusal, readable
from .errors import RingError, RingMismatch, RingTimeout

_POLL_S = 0.02
GRACE_S = 5.0  # that the others wait longer than rank 0, which knows who is missing


class Store(Protocol):
    """What a ring needs of a ``torch.distributed.Store``; anything with these three will do."""

    def set(self, key: str, value: Any, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Member:
    """Who a rank is in its ring."""

    rank: int
    world: int
    name: str

    @property
    def who(self) -> str:
        """For errors: the ring's name and the rank."""
        return f"ring {self.name!r}, rank {self.rank}"


def boot_id() -> str:
    """Tells hosts apart; containers of one host share it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


class Hub:
    """Rank 0: listens, gathers from all others and answers all of them the same."""

    def __init__(self, member: Member, store: Store, timeout: float) -> None:
        self._member = member
        self._store = store
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._channels: dict[int, Channel] = {}  # of the ranks, by rank
        # Of whoever else says that it is a rank: it is told of the error too.
        self._surplus: list[Channel] = []
        self._refusal: dict[str, Any] | None = None
        self._address = f"ring_reduce-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def gather_hellos(self, refusal: dict[str, Any] | None = None) -> dict[int, dict[str, Any]]:
        """The hello of every other rank, by rank. With a ``refusal``, of this rank or another, only to tell it to all:
        that is raised then."""
        self._refusal = refusal
        self._listener.bind("\0" + self._address)
        self._listener.listen(max(16, self._member.world))
        self._publish({})
        hellos: dict[int, dict[str, Any]] = {}
        while len(hellos) < self._member.world - 1:
            if readable(self._listener, 0.2):
                self._admit(Channel(self._listener.accept()[0], self._address), hellos)
            elif time.monotonic() > self._deadline:
                break
            self._check_refusals()
        # Before any rank can go on: the first thing that it may do is to make the next ring of this name, and this
        # address has to refuse it.
        self._listener.close()
        raise_refusal(self._refusal or {})
        missing = [rank for rank in range(1, self._member.world) if rank not in hellos]
        if missing:
            raise RingTimeout(
                f"{self._member.who}: no word from rank {_listed(missing)} of {self._member.world} in "
                f"{self._timeout:.1f} s; did every rank start, on this host, and make the ring?"
            )
        return hellos

    def _admit(self, channel: Channel, hellos: dict[int, dict[str, Any]]) -> None:
        """Takes a newcomer in. A stranger is turned away; a rank that disagrees is an error for all."""
        if channel.peer_uid() != os.geteuid():
            self._send(channel, {"error": f"{self._member.who} runs as another user"})
            channel.close()
            return
        try:
            hello, descriptors = channel.receive(min(self._deadline, time.monotonic() + GRACE_S))
            close_all(descriptors)  # nothing that a rank sends
            rank, world = int(hello["rank"]), int(hello["world"])
            hello["lanes"] = int(hello["lanes"])
            if hello["lanes"] < 1:
                raise ValueError
        except (
            OSError,
            TimeoutError,
            KeyError,
            ValueError,
            TypeError,
            OverflowError,
        ):  # no rank of this version
            channel.close()
            return
        surplus = rank not in range(1, self._member.world) or rank in self._channels
        if surplus:
            self._surplus.append(channel)
        else:
            self._channels[rank] = channel
        if world != self._member.world:
            raise RingMismatch(
                f"ring {self._member.name!r}: world is {self._member.world} on rank 0 and {world} on rank "
                f"{rank}; every rank has to pass the same world"
            )
        if surplus:
            raise RingMismatch(
                f"ring {self._member.name!r}: two processes say that they are rank {rank}, or it is not between 0 and "
                f"{self._member.world - 1}; give each rank its own number"
            )
        hellos[rank] = hello
        if self._refusal is not None:
            self._send(channel, self._refusal)
        elif "error" in hello:  # all others hear it at once, and this rank stays for those that have not come
            self._refusal = {"error": hello["error"], "kind": "error"}
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)
            for each in self._channels.values():
                self._send(each, self._refusal)

    def _check_refusals(self) -> None:
        """A rank that can't connect (another host) says so in the Store."""
        key = refusal_key(self._member, self._address)
        if self._store.check([key]):
            raise RingError(bytes(self._store.get(key)).decode(errors="replace"))

    def gather(self) -> Iterator[tuple[int, dict[str, Any], list[int]]]:
        """One message of every other rank as (rank, message, descriptors), as they come: a rank that is slow hides no
        error of another, which is raised here."""
        waiting = dict(self._channels)
        while waiting:
            ready = first_readable(waiting, self._deadline)
            if not ready:
                raise RingTimeout(
                    f"{self._member.who}: no answer from rank {_listed(sorted(waiting))} in {self._timeout:.1f} s; "
                    f"is it alive?"
                )
            for rank in ready:
                try:
                    message, descriptors = waiting.pop(rank).receive(self._deadline)
                except OSError as error:
                    raise self._ended(rank, error) from None
                raise_refusal(message)
                yield rank, message, descriptors

    def tell_all(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """Sends one message to every other rank. A rank that is gone is an error, its own if it left one."""
        for rank, channel in self._channels.items():
            try:
                channel.send(message, descriptors)
            except OSError as error:
                with contextlib.suppress(OSError, TimeoutError):
                    raise_refusal(channel.receive(time.monotonic())[0])
                raise self._ended(rank, error) from None

    def refuse(self, refusal: dict[str, Any]) -> None:
        """Tells everybody why there is no ring: over the connections, and in the Store for who has none yet."""
        with contextlib.suppress(Exception):  # the Store may be what failed
            self._publish({**refusal, "at": time.time()})
        for channel in [*self._channels.values(), *self._surplus]:
            self._send(channel, refusal)

    @staticmethod
    def _send(channel: Channel, refusal: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            channel.send(refusal)

    def _publish(self, more: dict[str, Any]) -> None:
        record = {"address": self._address, "boot_id": boot_id(), **more}
        self._store.set(address_key(self._member), json.dumps(record).encode())

    def _ended(self, rank: int, error: OSError) -> RingError:
        return RingError(f"{self._member.who}: rank {rank} ended while the ring was made ({error})")

    def close(self) -> None:
        """Closes the socket and all connections."""
        self._listener.close()
        for channel in [*self._channels.values(), *self._surplus]:
            channel.close()


# (rank, address) of rings that a rank of this process saw fail: they are no news when it tries again, though rank 0 may
# still be there for others.
heard: set[tuple[int, str]] = set()


def connect(member: Member, store: Store, timeout: float) -> Channel:
    """The connection of a rank other than 0 to rank 0. A timeout of 0 is of one that only has to say what is wrong."""
    start, started = time.time(), time.monotonic()
    deadline = started + timeout + GRACE_S
    settle_s = min(timeout or GRACE_S, GRACE_S)
    reason = "it did not publish its address"
    while time.monotonic() < deadline:
        record = read_record(member, store)
        if record is not None and record["boot_id"] != boot_id():
            text = f"{member.who} is on another host than rank 0; shared memory needs all ranks on one host"
            store.set(refusal_key(member, record["address"]), text.encode())
            raise RingError(text)
        if record is not None and "error" in record:
            # One that is younger than this rank's start is of the ring that it came for; an older one may be, or is of
            # an earlier try, and then rank 0 soon writes a new address; an old one is of an earlier try.
            age = start - record["at"]
            waited = time.monotonic() - started
            settled = age <= 0 or (age < GRACE_S and waited > settle_s)
            if settled and (member.rank, record["address"]) not in heard:
                heard.add((member.rank, record["address"]))
                raise_refusal(record)
            reason = f"it gave up an earlier try: {record['error']}"
        elif record is not None and (member.rank, record["address"]) in heard:
            reason = "it published no address since an earlier try, which failed"
        elif record is not None:
            # An address of an earlier ring of this name refuses: rank 0 will write a new one.
            channel = dial(record["address"])
            if channel is not None and channel.peer_uid() == os.geteuid():
                return channel
            reason = (
                "it can't be reached (is it in another container or network namespace, or of another user?)"
            )
        time.sleep(_POLL_S)
    raise RingTimeout(
        f"{member.who}: no connection to rank 0 in {timeout:.1f} s: {reason}; did rank 0 start?"
    )


def hear(member: Member, store: Store, hub: Channel, timeout: float) -> tuple[dict[str, Any], list[int]]:
    """The next message of rank 0; raises its refusal."""
    try:
        message, descriptors = hub.receive(time.monotonic() + timeout + GRACE_S)
    except TimeoutError:
        raise RingTimeout(
            f"{member.who}: no answer from rank 0 in {timeout:.1f} s while the ring was made; is it alive?"
        ) from None
    except OSError as error:
        heard.add((member.rank, hub.address))
        record = None
        with contextlib.suppress(RingError):  # the Store may have ended with rank 0, which hosts it
            record = read_record(member, store)
        if record is not None and record["address"] == hub.address:
            raise_refusal(record)
        raise RingError(f"{member.who}: rank 0 ended while the ring was made ({error})") from None
    if "error" in message:
        heard.add((member.rank, hub.address))
    raise_refusal(message)
    return message, descriptors


def read_record(member: Member, store: Store) -> dict[str, Any] | None:
    """What rank 0 published last: its address, and its refusal if it gave up; ``RingError`` if it is neither."""
    key = address_key(member)
    if not store.check([key]):
        return None
    try:
        record = json_object(bytes(store.get(key)))
        known = record["address"].isascii() and isinstance(record["boot_id"], str)
        if not known or ("error" in record and not isinstance(record["at"], float)):
            raise ValueError
    except (ValueError, KeyError, AttributeError):
        raise RingError(
            f"{member.who}: what the Store holds as {key!r} is no address of rank 0; does anything else write there, "
            f"or another version of ring_reduce?"
        ) from None
    return record


def address_key(member: Member) -> str:
    """Where rank 0 of a ring puts its address; a later ring of the same name writes it anew."""
    return f"ring_reduce/{member.name}/address"


def refusal_key(member: Member, address: str) -> str:
    """Where a rank that can't connect says why; the address makes it one ring's."""
    return f"ring_reduce/{member.name}/refusal/{address}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
