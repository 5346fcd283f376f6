"""What a rank measures at one size, and what all ranks' parts come to."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .plan import Contender
from .summary import Times, slowest_rank


@dataclass(frozen=True)
class Found:
    """Of one contender at one size: on one rank, or of all."""

    times: Times  # microseconds, by (round, call)
    wrong: int | None  # elements; None where nothing is reduced
    relative_error: (
        float | None
    )  # of random data (buffers.py); None for integers and where nothing is reduced
    bytes_sent: int | None  # a rank and call; None where it isn't counted


@dataclass(frozen=True)
class Measurement:
    """All contenders at one size, and the time of a hop between cores in each round (barrier.py)."""

    dtype: str
    nbytes: int
    found: dict[Contender, Found]
    hops_ns: Times

    def times(self, backend: str, op: Any, in_place: bool) -> Times | None:
        """The times of a contender, if it was measured."""
        found = self.found.get(Contender(backend, op, in_place))
        return None if found is None else found.times


@dataclass(frozen=True)
class Report:
    """All that a run found, and whether its ranks shared a host, and so could be started together."""

    measurements: list[Measurement]
    one_host: bool


def merge(ranks: Sequence[Found]) -> Found:
    """A call takes what its slowest rank takes; wrong elements add up; of errors and bytes the largest counts."""
    first = ranks[0]
    return Found(
        slowest_rank(np.stack([rank.times for rank in ranks])),
        None if first.wrong is None else sum(rank.wrong or 0 for rank in ranks),
        _largest([rank.relative_error for rank in ranks]),
        _largest([rank.bytes_sent for rank in ranks]),
    )


Number = TypeVar("Number", int, float)


def _largest(values: Sequence[Number | None]) -> Number | None:
    told = [value for value in values if value is not None]
    return max(told) if len(told) == len(values) else None


class Exchange:
    """Brings what the ranks found to rank 0, through the store in which they met."""

    def __init__(self, store: Any, *, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._sent = 0

    def gather(self, found: Found) -> Found | None:
        """On rank 0 what all ranks' parts come to; None on the others. Every rank calls it the same number of times."""
        self._sent += 1
        if self._rank != 0:
            self._store.set(self._key(self._rank), pickle.dumps(found))
            return None
        ranks = [found]
        for rank in range(1, self._world):
            ranks.append(pickle.loads(self._store.get(self._key(rank))))
            self._store.delete_key(self._key(rank))
        return merge(ranks)

    def agree(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns on rank 0, on every rank. Every rank calls it the same number of times."""
        self._sent += 1
        if self._rank == 0:
            value = make()
            self._store.set(self._key(0), pickle.dumps(value))
            return value
        return pickle.loads(self._store.get(self._key(0)))

    def _key(self, rank: int) -> str:
        return f"exchange {self._sent} of rank {rank}"
