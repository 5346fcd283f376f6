"""The shared-memory transport: its sizes, and the core's ring over the memory that the ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import _core
from .bootstrap import Member, Store
from .call import Call
from .errors import RingError
from .handshake import Part, check_equal, make_together
from .machine import granted_cores, memory_left

ALGORITHMS = ("auto", "ring", "direct")

MAX_LANES = 4

# Some ten microseconds, as long as ranks that call at the same time wait for each other; a yield, a system call, would
# cost a part of that each time. More would be lost where two ranks share a core for a while.
SPINS = 1000
YIELDS = 200
# With more ranks than cores a yield lets another rank run, unless each is a session of its own, as torchrun makes them:
# Linux then schedules sessions, and a yield stays within one. So few yields, then the futex.
CROWDED_YIELDS = 16

STAGING_LIMIT_BYTES = 8 << 20  # a rank
_LINE_BYTES = 128  # segments are whole lines, kLineBytes of csrc/portable.h


@dataclass(frozen=True)
class Tuning:
    """The sizes of a ring. Results do not depend on them; all but `spins`, `yields` and `stream_bytes` are agreed."""

    segment_bytes: int = 256 << 10
    depth: int = 4
    window: int = 2
    part_bytes: int = 64 << 10  # of a chunk, in a step of the direct all-reduce
    one_shot_bytes: int = 16 << 10  # of a tensor
    stream_bytes: int = 8 << 20
    spins: int | None = None  # None: spin where there is a core for every rank
    yields: int | None = None  # None: many or few, by the same rule


def default_lanes(world: int) -> int:
    """Threads a rank: the cores divided among the ranks, 1 to 4."""
    return max(1, min(MAX_LANES, int(granted_cores() / world)))


class ShmEngine:
    """The core's ring. See :class:`ring_reduce.engine.Engine`."""

    transport = "shm"
    reason = "all ranks are on one host, and share its memory"
    device = None

    def __init__(self, core: _core.CpuRing, lanes: int) -> None:
        self.lanes = lanes
        self._core = core
        # Not through methods of this class, which would cost more than all else in the call of a small tensor.
        self.reduce_tensors = core.reduce_tensors
        self.abort = core.abort
        self.check = core.check
        self.busy = core.busy
        self.close = core.close
        self.stats = core.stats
        self.start_trace = core.start_trace
        self.take_trace = core.take_trace

    def run(self, call: Call, interruptible: bool) -> float:
        return self._core.run(
            call.operation,
            call.element_type,
            call.normalization.number,
            call.normalization.total,
            call.count,
            call.arrays.address(call.input),
            call.arrays.address(call.output),
            call.elements,
            interruptible,
        )


def open_shm(
    member: Member, store: Store | None, timeout: float, lanes: int | None, algorithm: str, tuning: Tuning
) -> ShmEngine:
    """Makes the ring together with all other ranks; an error of one is an error on all."""
    wanted = lanes if lanes is not None else default_lanes(member.world)
    hello = {
        "rank": member.rank,
        "world": member.world,
        "transport": "shm",
        "wire_version": _core.WIRE_VERSION,
        "lanes": wanted,
        "segment_bytes": tuning.segment_bytes,
        "depth": tuning.depth,
        "window": tuning.window,
        "part_bytes": tuning.part_bytes,
        "algorithm": algorithm,
        "one_shot_bytes": tuning.one_shot_bytes,
    }
    return make_together(member, store, timeout, hello, _SharedMemory(member, timeout, wanted, tuning))


class _SharedMemory:
    """What the handshake asks of a transport."""

    steps: Sequence[Callable[[ShmEngine], None]] = ()

    def __init__(self, member: Member, timeout: float, lanes: int, tuning: Tuning) -> None:
        self._member = member
        self._lanes = lanes  # that this rank asks for
        self._timeout = timeout
        self._tuning = tuning

    def agree(self, mine: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The fewest lanes that any rank wants, and segments that fit the staging limit; all else must be equal."""
        check_equal(self._member, mine, hellos, mine.keys() - {"rank", "world", "lanes"})
        agreed = {**mine, "lanes": min([mine["lanes"], *(hello["lanes"] for hello in hellos.values())])}
        while _region_bytes(agreed) > STAGING_LIMIT_BYTES:
            # What takes more of a lane first, so that neither is left with next to nothing.
            of_lane = {"segment_bytes": agreed["depth"], "part_bytes": 2 * agreed["world"] + 2}
            key = max(of_lane, key=lambda name: of_lane[name] * agreed[name])
            if agreed[key] <= _LINE_BYTES:
                break
            agreed[key] = agreed[key] // 2 // _LINE_BYTES * _LINE_BYTES
        return agreed

    def make_part(self, agreed: dict[str, Any]) -> Part:
        """This rank's memory, as a file descriptor."""
        self._check_agreed(agreed)
        size, left = _region_bytes(agreed), memory_left()
        # The kernel would not refuse it, but end a process. All ranks may share the cgroup, with none served yet.
        if left is not None and left < size * self._member.world:
            raise RingError(
                f"{self._member.who}: the ring needs {size} bytes of shared memory a rank, "
                f"{size * self._member.world} in all, and the cgroup's memory limit leaves {max(0, left)}; raise the "
                f"limit, or use fewer lanes"
            )
        return Part({}, [_core.create_shared_memory(size)])

    def descriptors(self, rank: int) -> int:
        return 1

    def _check_agreed(self, agreed: dict[str, Any]) -> None:
        """Rank 0 chose it: no more than this rank asked for, and a multiple of lines where that is asked for."""
        tuning = self._tuning
        most = {
            "world": self._member.world,
            "lanes": self._lanes,
            "depth": tuning.depth,
            "window": tuning.window,
            "segment_bytes": tuning.segment_bytes,
            "part_bytes": tuning.part_bytes,
            "one_shot_bytes": tuning.one_shot_bytes,
        }
        for key, limit in most.items():
            value = agreed.get(key)
            least = 0 if key == "one_shot_bytes" else 1
            if type(value) is not int or not least <= value <= limit:
                raise RingError(
                    f"{self._member.who}: rank 0 says that {key} is {value!r:.80}, and this rank asked for {limit}; no "
                    f"rank of this version does"
                )
        if agreed.get("algorithm") not in ALGORITHMS:
            raise RingError(
                f"{self._member.who}: rank 0 says that algorithm is {agreed.get('algorithm')!r:.80}; there are "
                f"{', '.join(ALGORITHMS)}"
            )

    def open(self, agreed: dict[str, Any], parts: list[Part], processes: list[int]) -> ShmEngine:
        """The ring over the memory of all ranks, given by rank as their pidfds are (-1: none)."""
        member, tuning = self._member, self._tuning
        crowded = granted_cores() < member.world * agreed["lanes"]
        spins = tuning.spins if tuning.spins is not None else (0 if crowded else SPINS)
        yields = tuning.yields if tuning.yields is not None else (CROWDED_YIELDS if crowded else YIELDS)
        ring = partial(
            _core.CpuRing,
            rank=member.rank,
            world=member.world,
            memory_fds=[part.descriptors[0] for part in parts],
            process_fds=processes,
            lanes=agreed["lanes"],
            depth=agreed["depth"],
            segment_bytes=agreed["segment_bytes"],
            part_bytes=agreed["part_bytes"],
            window=agreed["window"],
            timeout_s=self._timeout,
            spins=spins,
            yields=yields,
            stream_bytes=tuning.stream_bytes,
            one_shot_bytes=0 if agreed["algorithm"] == "ring" else agreed["one_shot_bytes"],
            direct=agreed["algorithm"] == "direct" or (agreed["algorithm"] == "auto" and member.world > 2),
        )
        try:
            return ShmEngine(ring(), agreed["lanes"])
        except ValueError as error:  # what another rank agreed to, or its memory, is not what a rank makes
            raise RingError(f"{member.who}: {error}") from None

    def discard(self, opened: ShmEngine | None) -> None:
        """Takes back a ring that another rank could not make."""
        if opened is not None:
            opened.close()


def _region_bytes(agreed: dict[str, Any]) -> int:
    shape = {key: agreed[key] for key in ("lanes", "depth", "segment_bytes", "world", "part_bytes")}
    return _core.region_bytes(**shape)
