"""A rank that sends what no rank sends while a ring of two is made: right messages of which one has been mutated."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ring_reduce import _core, bootstrap
from stores import DictStore

WAIT_S = 5.0  # for what the other rank sends; a bound on a hang
NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2,
    3,
    2**31 - 1,
    2**31,
    2**32,
    2**63,
    2**64,
    10**400,
    -(2**63),
    0.5,
    -0.0,
    1e308,
]
OTHERS: list[Any] = [
    None,
    True,
    "",
    "1",
    "\udcff",
    "x" * 5000,
    [],
    [[]],
    {},
    {"rank": {}},
    float("inf"),
    float("nan"),
]


def mutated_json(message: dict[str, Any], chance: random.Random) -> bytes:
    """``message`` with one thing changed: a value, a key, or the bytes."""
    message = json.loads(json.dumps(message))
    place: Any = message
    while isinstance(place, dict) and (inner := [v for v in place.values() if isinstance(v, dict)]):
        if chance.random() < 0.2:
            break
        place = chance.choice(inner)
    key = chance.choice(list(place)) if place else "rank"
    kind = chance.randrange(8)
    if kind == 0:
        place.pop(key, None)
    elif kind < 4:
        place[key] = chance.choice(NUMBERS)
    elif kind == 4:
        place[key] = chance.choice(OTHERS)
    elif kind == 5:
        place[chance.choice(["error", "kind", "descriptors", "processes", "x"])] = chance.choice(
            NUMBERS + OTHERS
        )
    data = json.dumps(message).encode()
    return mutated_bytes(data, chance) if kind > 5 else data


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Cut off, with a bit flipped, nested deeply, or nothing of what it was."""
    at = chance.randrange(len(data) + 1)
    flipped = bytearray(data)
    flipped[at % len(data)] ^= 1 << chance.randrange(8)
    deep = chance.choice([b"[", b'{"rank":', b"["]) * chance.choice([100, 5000])
    made: list[bytes] = [
        data[:at],
        bytes(flipped),
        data[:at] + deep + data[at:],
        deep,
        chance.randbytes(chance.randrange(200)),
        data + b"7" * 5000,
        data[:-1] + b" " * 70000 + data[-1:],
        b"[1, 2]",
    ]
    return chance.choice(made)


def wrong_descriptors(chance: random.Random, size: int) -> list[int]:
    """Open descriptors of the wrong kind or number, or of memory that is too small or not sealed."""

    def unsealed(length: int) -> int:
        descriptor = os.memfd_create("hostile")
        os.ftruncate(descriptor, length)
        return descriptor

    def pipe_end() -> int:
        kept, other = os.pipe()
        os.close(other)
        return kept

    def device(path: str) -> int:
        return os.open(path, os.O_RDWR)

    def file() -> int:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
        os.ftruncate(descriptor, size)
        return descriptor

    makers: list[Callable[[], int]] = [
        lambda: _core.create_shared_memory(max(1, size - 4096)),
        lambda: _core.create_shared_memory(4 * size),
        lambda: unsealed(size),
        lambda: unsealed(0),
        pipe_end,
        file,
        lambda: device("/dev/null"),
        lambda: device("/dev/zero"),
        lambda: os.open("/", os.O_RDONLY),
        lambda: os.open("/", os.O_PATH),
        lambda: os.pidfd_open(os.getpid()),
        lambda: socket.socket(socket.AF_UNIX).detach(),
        lambda: os.eventfd(0),
    ]
    return [chance.choice(makers)() for _ in range(chance.choice([0, 1, 1, 2, 2, 2, 3, 8, 20]))]


class HostileRank:
    """The other rank of a ring of two, on a thread. By its seed it mutates one of its messages."""

    def __init__(self, rank: int, store: DictStore, name: str, seed: int) -> None:
        self._rank, self._store, self._name = rank, store, name
        self._chance = random.Random(seed)
        self._turn = self._chance.randrange(3 if rank == 1 else 4)
        self._sent = 0
        self.error: BaseException | None = None  # a fault of this program
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(WAIT_S)
        if rank == 0:
            address = f"hostile-{os.getpid()}-{id(self)}-{seed}"
            self._listener.bind("\0" + address)
            self._listener.listen()
            self._publish({"address": address, "boot_id": bootstrap.boot_id()})
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HostileRank:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(2 * WAIT_S)
        assert not self._thread.is_alive(), "the hostile rank hangs"
        if self.error is not None:
            raise self.error

    def _publish(self, record: dict[str, Any]) -> None:
        member = bootstrap.Member(self._rank, 2, self._name)
        self._store.set(bootstrap.address_key(member), json.dumps(record).encode())

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, _EndedError), self._connected() as connection:
                (self._as_hub if self._rank == 0 else self._as_member)(connection)
        except BaseException as error:
            self.error = error

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        if self._rank == 0:
            connection = self._listener.accept()[0]
        else:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect("\0" + self._address())
        connection.settimeout(WAIT_S)
        with connection:
            yield connection

    def _address(self) -> str:
        key = bootstrap.address_key(bootstrap.Member(self._rank, 2, self._name))
        deadline = time.monotonic() + WAIT_S
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise _EndedError
            time.sleep(0.001)
        return str(json.loads(self._store.get(key))["address"])

    def _as_member(self, connection: socket.socket) -> None:
        hello = {
            "rank": 1,
            "world": 2,
            "transport": "shm",
            "wire_version": _core.WIRE_VERSION,
            "lanes": 1,
            "segment_bytes": 1024,
            "depth": 4,
            "window": 2,
            "part_bytes": 1024,
            "algorithm": "auto",
            "one_shot_bytes": 512,
        }
        self._send(connection, hello)
        agreed = self._heard(connection)["agreed"]
        self._send_part(connection, 1, agreed)
        for _ in range(2):
            self._heard(connection)
        self._send(connection, {"ready": True})
        self._heard(connection)

    def _as_hub(self, connection: socket.socket) -> None:
        hello = self._heard(connection)
        agreed = {**hello, "rank": 0}
        self._send(connection, {"agreed": agreed})
        self._heard(connection)
        self._send_part(connection, 0, agreed)
        self._send_part(connection, 1, agreed)
        self._heard(connection)
        self._send(connection, {"go": True})

    def _send_part(self, connection: socket.socket, rank: int, agreed: dict[str, Any]) -> None:
        size = _core.region_bytes(
            **{key: agreed[key] for key in ("lanes", "depth", "segment_bytes", "world", "part_bytes")}
        )
        descriptors = [_core.create_shared_memory(size), os.pidfd_open(os.getpid())]
        message = {"rank": rank, "descriptors": 2, "processes": 1, "record": {}}
        self._send(connection, message, descriptors, size)

    def _send(
        self,
        connection: socket.socket,
        message: dict[str, Any],
        descriptors: list[int] | None = None,
        size: int = 4096,
    ) -> None:
        data, passed = json.dumps(message).encode(), descriptors or []
        if self._sent == self._turn:
            what = self._chance.randrange(4)
            if what > 0:
                data = mutated_json(message, self._chance)
            if what < 2:
                _close_all(passed)
                passed = wrong_descriptors(self._chance, size)
                if self._chance.random() < 0.7:  # or the other rank looks no further
                    data = data.replace(b'"descriptors": 2', b'"descriptors": %d' % len(passed))
        self._sent += 1
        try:
            socket.send_fds(connection, [data], passed)
        finally:
            _close_all(passed)

    def _heard(self, connection: socket.socket) -> dict[str, Any]:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 8, socket.MSG_CMSG_CLOEXEC)
        _close_all(descriptors)
        if not data or b'"error"' in data:
            raise _EndedError
        message: dict[str, Any] = json.loads(data)
        return message


class _EndedError(Exception):
    """The other rank has given up."""


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
