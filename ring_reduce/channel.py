"""A connection of two ranks of a host while a ring is made: JSON messages with file descriptors over a Unix socket."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from .errors import RingAborted, RingError, RingMismatch, RingTimeout

_MESSAGE_BYTES = 65536
_TEXT_LENGTH = 4000  # of an error; JSON may need twelve bytes for a character


class Channel:
    """One end of a connection: JSON messages with file descriptors, each with a deadline."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.address = address
        self._socket = connection
        connection.setblocking(False)

    def send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        data = json.dumps(message).encode()
        socket.send_fds(self._socket, [data], descriptors or [])

    def receive(self, deadline: float) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors; ``ConnectionError`` if the other end is gone, ``TimeoutError``."""
        while not readable(self._socket, min(0.2, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise TimeoutError
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # reported once; what was sent before the end is still to be read
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC
            )
        try:
            message = json_object(data)
        except ValueError:
            close_all(descriptors)
            raise ConnectionError("it sent no JSON object" if data else "it closed the connection") from None
        if "descriptors" not in message or "error" in message:  # nobody will look for them
            close_all(descriptors)
        return message, descriptors

    def fileno(self) -> int:
        return self._socket.fileno()

    def peer_uid(self) -> int:
        """Abstract sockets have no permissions, so each end looks at who is at the other."""
        size = struct.calcsize("3i")
        return int(
            struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
        )

    def close(self) -> None:
        self._socket.close()


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object that ``data`` is; ``ValueError`` if it is none. Whoever wrote it may be hostile."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value


def close_all(descriptors: list[int]) -> None:
    """Closes them, and leaves the list empty."""
    while descriptors:
        os.close(descriptors.pop())


def refusal_of(text: str, kind: str) -> dict[str, str]:
    """The message that carries an error; of a long text its beginning, so that it fits."""
    return {"error": text[:_TEXT_LENGTH], "kind": kind}


def raise_refusal(message: dict[str, Any]) -> None:
    """Raises the error that a message carries, if it does."""
    if "error" in message:
        kinds = {"timeout": RingTimeout, "mismatch": RingMismatch, "aborted": RingAborted}
        raise kinds.get(str(message.get("kind")), RingError)(str(message["error"]))


def dial(address: str) -> Channel | None:
    """A connection to an abstract address; None if nobody listens there, or nobody within reach."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + address)
    except OSError:
        connection.close()
        return None
    return Channel(connection, address)


def readable(connection: socket.socket, timeout_s: float) -> bool:
    """Whether something can be read, or accepted, within ``timeout_s`` seconds."""
    # Not select(), which takes descriptors below 1024 only.
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def first_readable(channels: Mapping[int, Channel], deadline: float) -> list[int]:
    """The ranks whose channel has a message, or has ended, as soon as there is one; none after the deadline."""
    ranks = {channel.fileno(): rank for rank, channel in channels.items()}
    poller = select.poll()
    for descriptor in ranks:
        poller.register(descriptor, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        found = poller.poll(max(0.0, min(0.2, left)) * 1000)
        if found or left < 0:
            return sorted(ranks[descriptor] for descriptor, _ in found)
