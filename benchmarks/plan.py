"""What is to be measured: a plan is the same on every rank. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .peers import Op

TRAFFIC_BYTES = 2 << 30  # a contender's calls at one size, together, before the limits below
MOST_CALLS, LEAST_CALLS = 1600, 40
LEAST_ROUNDS = 10  # what the interval of a ratio is resampled from, where so many calls are asked for


class Case(NamedTuple):
    """What is reduced."""

    dtype: str
    nbytes: int


class Contender(NamedTuple):
    """A peer with an operation and a place for the result."""

    backend: str
    op: Op
    in_place: bool

    def __str__(self) -> str:
        return f"{self.backend} {self.op.value} {'in' if self.in_place else 'out of'} place"


@dataclass(frozen=True)
class Plan:
    """What to measure, on how many ranks, and how often."""

    world: int
    sizes: tuple[int, ...]  # bytes
    dtypes: tuple[str, ...] = ("float32",)  # torch's names
    ops: tuple[str, ...] = (Op.SUM.name,)
    backends: tuple[str, ...] = ("ring", "gloo", "copy")
    device: str = "cpu"
    calls: int | None = None  # of each contender at each size; None: by size
    warm_up_calls: int | None = None  # None: one round
    rotate_bytes: int = 64 << 20  # should exceed the last-level cache
    spread: bool = True  # a core of its own for each rank to start from, where there are as many
    timeout: float = 300.0  # seconds without progress
    together: bool = False  # all types and sizes in the same rounds

    def repeats(self, nbytes: int) -> tuple[int, int]:
        """(rounds, counted calls a round) of every contender at a size: a function of the size alone."""
        if self.together:
            nbytes = max(self.sizes)
        calls = self.calls or min(MOST_CALLS, max(LEAST_CALLS, TRAFFIC_BYTES // max(1, nbytes)))
        burst = 16 if nbytes <= 256 << 10 else 4 if nbytes <= 4 << 20 else 1
        burst = max(1, min(burst, calls // LEAST_ROUNDS))
        return -(-calls // burst), burst

    def warm_up_rounds(self, nbytes: int) -> int:
        """Rounds before the counted ones."""
        return 1 if self.warm_up_calls is None else -(-self.warm_up_calls // self.repeats(nbytes)[1])

    def groups(self) -> list[list[Case]]:
        """The cases, those together that are measured in the same rounds."""
        return [self.cases()] if self.together else [[case] for case in self.cases()]

    def cases(self) -> list[Case]:
        """In the order in which they are reported. Bytes are whole elements."""
        return [
            Case(dtype, nbytes)
            for dtype in self.dtypes
            for nbytes in dict.fromkeys(size - size % ITEM_BYTES[dtype] for size in self.sizes)
        ]


ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
INTEGERS = ("int32", "int64")  # have no mean
# nccl-tests' names of types, which its -d takes and its tables show.
NCCL_NAMES = {
    "float64": "double",
    "float32": "float",
    "float16": "half",
    "bfloat16": "bfloat16",
    "int32": "int32",
    "int64": "int64",
}
