"""How the ranks of a host find each other and share memory: a Store for one address, then a Unix socket.

Rank 0 listens on an abstract Unix socket, which has no file, and puts its address into the Store. The others connect
and three exchanges follow, each through rank 0, so that a failure of one rank is an error on all:

1. each says what it wants (hello), rank 0 answers what is agreed;
2. each makes its memory and sends it with its pidfd, rank 0 passes them all to all;
3. each maps them and says so (ready), rank 0 answers go.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import RingError, RingMismatch, RingTimeout

_MESSAGE_BYTES = 65536
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


class Channel:
    """One end of a connection: JSON messages with file descriptors, each with a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)

    def send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        data = json.dumps(message).encode()[:_MESSAGE_BYTES]
        socket.send_fds(self._socket, [data], descriptors or [])

    def receive(self, deadline: float) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors; ``ConnectionError`` if the other end is gone, ``TimeoutError``."""
        while not select.select([self._socket], [], [], max(0.0, min(0.2, deadline - time.monotonic())))[0]:
            if time.monotonic() > deadline:
                raise TimeoutError
        data, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 8)
        if not data:
            raise ConnectionError("the other end closed the connection")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ConnectionError("the other end sent no JSON object")
        return message, descriptors

    def peer_uid(self) -> int:
        """Abstract sockets have no permissions, so each end looks at who is at the other."""
        size = struct.calcsize("3i")
        return int(
            struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
        )

    def close(self) -> None:
        self._socket.close()


def raise_refusal(message: dict[str, Any]) -> None:
    """Raises the error that a message carries, if it does."""
    if "error" in message:
        kinds = {"timeout": RingTimeout, "mismatch": RingMismatch}
        raise kinds.get(str(message.get("kind")), RingError)(str(message["error"]))


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
        self._channels: dict[int, Channel] = {}
        self._address = f"ring_reduce-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def gather_hellos(self) -> dict[int, dict[str, Any]]:
        """The hello of every other rank, by rank."""
        self._listener.bind("\0" + self._address)
        self._listener.listen(max(16, self._member.world))
        self._store.set(
            address_key(self._member), json.dumps({"address": self._address, "boot_id": boot_id()}).encode()
        )
        hellos: dict[int, dict[str, Any]] = {}
        while len(hellos) < self._member.world - 1:
            if select.select([self._listener], [], [], 0.2)[0]:
                self._admit(Channel(self._listener.accept()[0]), hellos)
            elif time.monotonic() > self._deadline:
                missing = [rank for rank in range(1, self._member.world) if rank not in hellos]
                raise RingTimeout(
                    f"{self._member.who}: no word from rank {_listed(missing)} of {self._member.world} in "
                    f"{self._timeout:.1f} s; did every rank start, on this host, and make the ring?"
                )
            self._check_refusals()
        return hellos

    def _admit(self, channel: Channel, hellos: dict[int, dict[str, Any]]) -> None:
        """Takes a newcomer in. A stranger is turned away; a rank that disagrees is an error for all."""
        if channel.peer_uid() != os.geteuid():
            channel.send({"error": f"{self._member.who} runs as another user"})
            channel.close()
            return
        try:
            hello, _ = channel.receive(min(self._deadline, time.monotonic() + GRACE_S))
            rank = int(hello["rank"])
        except (ConnectionError, TimeoutError, KeyError, ValueError):
            channel.close()
            return
        previous = self._channels.get(rank)
        self._channels[rank if rank not in self._channels else -1 - rank] = (
            channel  # it is told of any error too
        )
        if hello["world"] != self._member.world:
            raise RingMismatch(
                f"ring {self._member.name!r}: world is {self._member.world} on rank 0 and {hello['world']} on rank "
                f"{rank}; every rank has to pass the same world"
            )
        if previous is not None or not 0 < rank < self._member.world:
            raise RingMismatch(
                f"ring {self._member.name!r}: two processes say that they are rank {rank}, or it is not between 0 and "
                f"{self._member.world - 1}; give each rank its own number"
            )
        hellos[rank] = hello

    def _check_refusals(self) -> None:
        """A rank that can't connect (another host) says so in the Store."""
        key = refusal_key(self._member, self._address)
        if self._store.check([key]):
            raise RingError(bytes(self._store.get(key)).decode())

    def gather(self) -> dict[int, tuple[dict[str, Any], list[int]]]:
        """One message of every other rank; an error of one is raised here."""
        messages = {}
        for rank, channel in self._channels.items():
            try:
                message, descriptors = channel.receive(self._deadline)
            except TimeoutError:
                raise RingTimeout(
                    f"{self._member.who}: no answer from rank {rank} in {self._timeout:.1f} s; is it alive?"
                ) from None
            except OSError as error:
                raise RingError(
                    f"{self._member.who}: rank {rank} ended while the ring was made ({error})"
                ) from None
            raise_refusal(message)
            messages[rank] = (message, descriptors)
        return messages

    def tell_all(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """Sends one message to every other rank."""
        for rank, channel in self._channels.items():
            try:
                channel.send(message, descriptors)
            except OSError as error:
                if "error" not in message:
                    raise RingError(
                        f"{self._member.who}: rank {rank} ended while the ring was made ({error})"
                    ) from None

    def close(self) -> None:
        """Closes the socket and all connections."""
        self._listener.close()
        for channel in self._channels.values():
            channel.close()


def connect(member: Member, store: Store, timeout: float) -> Channel:
    """The connection of a rank other than 0 to rank 0."""
    deadline = time.monotonic() + timeout + GRACE_S
    key = address_key(member)
    reason = "it did not publish its address"
    while time.monotonic() < deadline:
        if store.check([key]):
            hub = json.loads(bytes(store.get(key)).decode())
            if hub["boot_id"] != boot_id():
                text = (
                    f"{member.who} is on another host than rank 0; shared memory needs all ranks on one host"
                )
                store.set(refusal_key(member, hub["address"]), text.encode())
                raise RingError(text)
            # An address of an earlier ring of this name is refused: rank 0 will write the new one.
            channel = _try_connect(hub["address"])
            if channel is not None and channel.peer_uid() == os.geteuid():
                return channel
            reason = (
                "it can't be reached (is it in another container or network namespace, or of another user?)"
            )
        time.sleep(_POLL_S)
    raise RingTimeout(
        f"{member.who}: no connection to rank 0 in {timeout:.1f} s: {reason}; did rank 0 start?"
    )


def _try_connect(address: str) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + address)
    except OSError:
        connection.close()
        return None
    return Channel(connection)


def address_key(member: Member) -> str:
    """Where rank 0 of a ring puts its address; a later ring of the same name writes it anew."""
    return f"ring_reduce/{member.name}/address"


def refusal_key(member: Member, address: str) -> str:
    """Where a rank that can't connect says why; the address makes it one ring's."""
    return f"ring_reduce/{member.name}/refusal/{address}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
