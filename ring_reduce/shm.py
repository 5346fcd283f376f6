"""The shared-memory transport: what the ranks agree on, and the core's ring over the memory that they exchange."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import Any

from . import _core
from .bootstrap import Channel, Hub, Member, Store, connect, hear
from .errors import RingError, RingMismatch, RingTimeout
from .machine import cpu_quota, memory_left, usable_cores

MAX_LANES = 4

# A few microseconds. More would be lost where two ranks share a core for a while; a yield that finds nothing else to
# run returns as fast as a spin.
SPINS = 100
YIELDS = 200
# With more ranks than cores a yield lets another rank run, unless each is a session of its own, as torchrun makes them:
# Linux then schedules sessions, and a yield stays within one. So few yields, then the futex.
CROWDED_YIELDS = 16

STAGING_LIMIT_BYTES = 8 << 20  # a rank


@dataclass(frozen=True)
class Tuning:
    """The sizes of a ring. Results do not depend on them; all but `spins`, `yields` and `stream_bytes` are agreed."""

    segment_bytes: int = 256 << 10
    depth: int = 4
    window: int = 2
    stream_bytes: int = 8 << 20
    spins: int | None = None  # None: spin where there is a core for every rank
    yields: int | None = None  # None: many or few, by the same rule


def _cores() -> float:
    """Cores' worth of time that this process gets at most."""
    return min(usable_cores(), cpu_quota() or math.inf)


def default_lanes(world: int) -> int:
    """Threads a rank: the cores divided among the ranks, 1 to 4."""
    return max(1, min(MAX_LANES, int(_cores() / world)))


@dataclass(frozen=True)
class ShmRing:
    """The core's ring and what the ranks agreed on."""

    core: _core.CpuRing
    lanes: int


def open_ring(
    member: Member, store: Store | None, timeout: float, lanes: int | None, tuning: Tuning
) -> ShmRing:
    """Makes the ring together with all other ranks; an error of one is an error on all."""
    bootstrap = _Bootstrap(member, store, timeout, tuning)
    wanted = {
        "rank": member.rank,
        "world": member.world,
        "wire_version": _core.WIRE_VERSION,
        "lanes": lanes if lanes is not None else default_lanes(member.world),
        "segment_bytes": tuning.segment_bytes,
        "depth": tuning.depth,
        "window": tuning.window,
    }
    try:
        if member.world == 1:
            return bootstrap.alone(wanted)
        if store is None:
            raise ValueError(f"a ring of {member.world} ranks needs a store to meet in")
        if member.rank == 0:
            return bootstrap.as_hub(Hub(member, store, timeout), wanted)
        return bootstrap.as_member(connect(member, store, timeout), wanted)
    finally:
        bootstrap.close_descriptors()


class _Bootstrap:
    """One rank's part in making the ring. Owns all descriptors until the ring has them."""

    def __init__(self, member: Member, store: Store | None, timeout: float, tuning: Tuning) -> None:
        self._member = member
        self._store = store
        self._timeout = timeout
        self._tuning = tuning
        self._memory: dict[int, int] = {}  # by rank
        self._process: dict[int, int] = {}  # by rank; none where the kernel has no pidfds

    def alone(self, wanted: dict[str, Any]) -> ShmRing:
        agreed = _agree(wanted, {})
        self._make_memory(agreed)
        return self._map(agreed)

    def as_hub(self, hub: Hub, wanted: dict[str, Any]) -> ShmRing:
        ring = None
        try:
            agreed = _agree(wanted, hub.gather_hellos())
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
                ring.core.close()
            raise
        finally:
            hub.close()

    def as_member(self, hub: Channel, wanted: dict[str, Any]) -> ShmRing:
        rank, ring = self._member.rank, None
        try:
            self._tell(hub, wanted)
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
                ring.core.close()
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
        rank, size, left = self._member.rank, _region_bytes(agreed), memory_left()
        if left is not None and left < size:  # the kernel would not refuse it, but end a process
            raise RingError(
                f"{self._member.who}: the ring needs {size} bytes of shared memory a rank, and the cgroup's memory "
                f"limit leaves {max(0, left)}; raise the limit, or use fewer lanes"
            )
        self._memory[rank] = _core.create_shared_memory(size)
        with contextlib.suppress(
            OSError
        ):  # an old kernel, or a sandbox: deaths are then seen by the deadline
            self._process[rank] = os.pidfd_open(os.getpid())

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

    def _map(self, agreed: dict[str, Any]) -> ShmRing:
        member, tuning = self._member, self._tuning
        crowded = _cores() < member.world * agreed["lanes"]
        spins = tuning.spins if tuning.spins is not None else (0 if crowded else SPINS)
        yields = tuning.yields if tuning.yields is not None else (CROWDED_YIELDS if crowded else YIELDS)
        core = _core.CpuRing(
            rank=member.rank,
            world=member.world,
            memory_fds=[self._memory[rank] for rank in range(member.world)],
            process_fds=[
                -1 if rank == member.rank else self._process.get(rank, -1) for rank in range(member.world)
            ],
            lanes=agreed["lanes"],
            depth=agreed["depth"],
            segment_bytes=agreed["segment_bytes"],
            window=agreed["window"],
            timeout_s=self._timeout,
            spins=spins,
            yields=yields,
            stream_bytes=tuning.stream_bytes,
        )
        return ShmRing(core, agreed["lanes"])


def _agree(mine: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The fewest lanes that any rank wants, and segments that fit the staging limit; all else must be equal."""
    for rank, hello in hellos.items():
        for key in ("wire_version", "segment_bytes", "depth", "window"):
            if hello.get(key) != mine[key]:
                raise RingMismatch(
                    f"{key} is {mine[key]} on rank 0 and {hello.get(key)} on rank {rank}; every rank has to run "
                    f"the same version of ring_reduce with the same settings"
                )
    agreed = {**mine, "lanes": min([mine["lanes"], *(hello["lanes"] for hello in hellos.values())])}
    while _region_bytes(agreed) > STAGING_LIMIT_BYTES:
        agreed["segment_bytes"] //= 2
    return agreed


def _region_bytes(agreed: dict[str, Any]) -> int:
    shape = {key: agreed[key] for key in ("lanes", "depth", "segment_bytes")}
    return _core.region_bytes(**shape)


def _refusal(member: Member, error: BaseException) -> dict[str, Any]:
    kinds: dict[type[BaseException], str] = {RingTimeout: "timeout", RingMismatch: "mismatch"}
    text = str(error) if isinstance(error, RingError) else f"{member.who}: {type(error).__name__}: {error}"
    return {"error": text, "kind": kinds.get(type(error), "error")}


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
