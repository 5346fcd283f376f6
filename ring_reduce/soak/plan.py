"""What every rank does in every episode: a function of the seed, so that all ranks know it without a word."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from ring_reduce.normalization import DIVIDE_BY_COUNT, MEAN, SUM, WEIGHTED_MEAN, Normalization, divide_by

# Seconds that a ring waits; short where the fault is that nobody comes.
PATIENT_S, HURRIED_S = 60.0, 2.0
# Each fault with how often it comes, relative to the others. What has to run into a time-out takes seconds.
FAULT_WEIGHTS = {
    "kill": 8,  # SIGKILL at a random moment of a call
    "stop": 1,  # SIGSTOP until the others have given up
    "pause": 4,  # SIGSTOP and SIGCONT, some milliseconds each: delays between any two steps
    "abort": 4,  # Ring.abort() from another thread at a random moment
    "raise": 3,  # an exception inside `with Ring`
    "leave": 3,  # Ring.close() while others go on
    "mismatch": 6,  # one rank's call differs
    "absent": 1,  # one rank does not make a call
    "late": 2,  # one rank makes its rings late
    "never": 1,  # one rank makes no ring
}
HARMLESS = ("pause", "late")  # the calls have to succeed all the same
AMID_CALLS = ("kill", "stop", "abort")  # a thread of the victim strikes, however late it gets a core
DIFFERENCES = ("size", "dtype", "normalization", "divisor", "operation")

OPERATIONS = {"all_reduce": 8, "reduce_scatter": 1, "all_gather": 1}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64")
LAYOUTS = ("whole", "offset", "strided", "transposed")
FLAT_LAYOUTS = LAYOUTS[:3]
_TINY = {"depth": 3, "window": 2, "segment_bytes": 1024, "part_bytes": 1024, "one_shot_bytes": 512}
_DEEP = {"depth": 8, "window": 5, "segment_bytes": 16384, "part_bytes": 8192}
_TUNINGS: tuple[dict[str, int], ...] = ({}, {}, _TINY, _DEEP)
_MOST_SEGMENTS = 128  # a call: more would be a test of the scheduler's patience, where ranks share cores
_MOST_HURRIED = 4096


@dataclass(frozen=True)
class Orders:
    """What the user asked for, the same for every rank."""

    world: int
    seed: int
    faults: tuple[str, ...]  # of FAULT_WEIGHTS
    always: bool  # a fault in every episode, rather than in most
    folder: str  # where ranks and judge leave word: a folder an episode
    first: int = 0  # the episode to begin with


@dataclass(frozen=True)
class RingPlan:
    """A ring of some of the ranks."""

    members: tuple[int, ...]
    timeout: float
    lanes: int | None
    algorithm: str
    tuning: dict[str, int] = field(hash=False)

    @property
    def most_elements(self) -> int:
        """A bound on sizes, so that small segments make no endless call."""
        if self.timeout < PATIENT_S:  # nor one that a busy machine takes too long to check
            return _MOST_HURRIED
        smallest = min(self.tuning.get(name, 1 << 16) for name in ("segment_bytes", "part_bytes"))
        return smallest // 8 * _MOST_SEGMENTS * len(self.members) // 2


@dataclass(frozen=True)
class Fault:
    """What goes wrong, with whom and when."""

    kind: str
    victim: int
    after_s: float  # from the first of the steady calls on, or before the rings are made
    pulses: int = 1  # of a pause
    pause_s: float = 0.0  # of each
    difference: str = ""  # of a mismatch


@dataclass(frozen=True)
class Steady:
    """The calls that go on while the fault strikes: float32, all alike but for their values."""

    elements: int
    in_flight: int  # asynchronous calls at a time; 0: synchronous
    calls: int | None  # None: until the fault ends them


@dataclass(frozen=True)
class Episode:
    """Rings, then checked calls on any of them, then steady calls on the first, in which the fault strikes."""

    number: int
    rings: tuple[RingPlan, ...]  # the first has all ranks
    calls: int
    in_flight: int
    steady: Steady
    fault: Fault | None


@dataclass(frozen=True)
class CallPlan:
    """One checked call."""

    key: tuple[int, int, int]  # seed, episode, number: of the data too
    ring: int
    operation: str
    elements: int  # of each rank's input
    dtype: str
    normalization: Normalization
    counts: tuple[float, ...] | None  # by member
    arrays: str  # numpy or torch
    layout: str
    out_of_place: bool
    async_op: bool
    special: bool  # NaN and infinities among the values
    late: int  # the member that calls late
    late_s: float

    def __str__(self) -> str:
        counts = "" if self.counts is None else f", counts {self.counts}"
        return (
            f"call {self.key[2]} of episode {self.key[1]}: {self.operation} of {self.elements} {self.dtype}, "
            f"{self.normalization!r}{counts}, {self.layout} {self.arrays}"
        )


def episode_of(orders: Orders, number: int) -> Episode:
    """An episode of a run."""
    numbers = random.Random(f"{orders.seed} {number}")
    fault = _fault(numbers, orders)
    timeout = HURRIED_S if fault is not None and fault.kind in ("stop", "absent", "never") else PATIENT_S
    subsets = [
        tuple(sorted(numbers.sample(range(orders.world), numbers.randint(1, orders.world))))
        for _ in range(numbers.choice((0, 0, 1, 2)))
    ]
    rings = [_ring(numbers, members, timeout) for members in (tuple(range(orders.world)), *subsets)]
    return Episode(
        number=number,
        rings=tuple(rings),
        calls=numbers.randint(0, 5 if orders.always else 30),
        in_flight=numbers.choice((1, 1, 3, 20)),
        steady=_steady(numbers, rings[0].most_elements, fault),
        fault=fault,
    )


def _fault(numbers: random.Random, orders: Orders) -> Fault | None:
    if not orders.faults or (not orders.always and numbers.random() < 0.25):
        return None
    kind = numbers.choices(orders.faults, [FAULT_WEIGHTS[name] for name in orders.faults])[0]
    after_s = numbers.uniform(0.05, 0.5) if kind == "late" else 10 ** numbers.uniform(-4, -1.5)
    return Fault(
        kind=kind,
        victim=numbers.randrange(orders.world),
        after_s=after_s,
        pulses=numbers.randint(1, 6),
        pause_s=10 ** numbers.uniform(-3, -1.3),
        difference=numbers.choice(DIFFERENCES),
    )


def _ring(numbers: random.Random, members: tuple[int, ...], timeout: float) -> RingPlan:
    return RingPlan(
        members=members,
        timeout=timeout,
        lanes=numbers.choice((None, None, 1, 2, 3)),
        algorithm=numbers.choice(("auto", "auto", "ring", "direct")),
        tuning=numbers.choice(_TUNINGS),
    )


def _steady(numbers: random.Random, most: int, fault: Fault | None) -> Steady:
    elements = min(most, int(2 ** numbers.uniform(0, 20)))
    endless = fault is not None and fault.kind in AMID_CALLS
    return Steady(
        elements=elements,
        in_flight=numbers.choice((0, 0, 2, 10)),
        calls=None if endless else max(20, min(400, (1 << 22) // elements)),
    )


def call_of(orders: Orders, episode: Episode, number: int) -> CallPlan:
    """A checked call of an episode."""
    numbers = random.Random(f"{orders.seed} {episode.number} {number}")
    which = numbers.randrange(len(episode.rings))
    ring = episode.rings[which]
    world = len(ring.members)
    operation = numbers.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
    dtype = numbers.choice(DTYPES)
    normalization = _normalization(numbers, dtype, operation)
    counts = None
    if normalization.uses_count:
        counts = tuple(float(numbers.choice((0, 1, 7, numbers.randint(1, 5000), 0.5))) for _ in range(world))
    elements = min(ring.most_elements, int(2 ** numbers.uniform(0, 20)) - numbers.choice((0, 0, 0, 1)))
    return CallPlan(
        key=(orders.seed, episode.number, number),
        ring=which,
        operation=operation,
        elements=_fitting(elements, operation, world),
        dtype=dtype,
        normalization=normalization,
        counts=counts,
        arrays="torch" if dtype == "bfloat16" else numbers.choice(("numpy", "torch")),
        layout=numbers.choice(LAYOUTS if operation == "all_reduce" else FLAT_LAYOUTS),
        out_of_place=numbers.random() < 0.5,
        async_op=numbers.random() < 0.5,
        special=dtype.startswith(("float", "bfloat")) and numbers.random() < 0.1,
        late=numbers.randrange(world),
        late_s=numbers.uniform(0, 0.003) if numbers.random() < 0.1 else 0.0,
    )


def _normalization(numbers: random.Random, dtype: str, operation: str) -> Normalization:
    if operation == "all_gather" or dtype.startswith("int"):
        return SUM
    choices: list[Any] = [
        SUM,
        MEAN,
        divide_by(numbers.choice((2, 3, 256, 0.3))),
        DIVIDE_BY_COUNT,
        WEIGHTED_MEAN,
    ]
    chosen: Normalization = numbers.choice(choices)
    return chosen


def _fitting(elements: int, operation: str, world: int) -> int:
    """reduce_scatter splits its input, all_gather multiplies it."""
    if operation == "reduce_scatter":
        return elements // world * world
    return elements // world if operation == "all_gather" else elements
