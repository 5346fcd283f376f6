"""Interleaved rounds on one rank: drift of the machine and traces in the caches hit all contenders alike."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from .summary import Times

TimedCall = Callable[
    [], int
]  # aligns the ranks, makes one call, and returns the nanoseconds of the call alone
Name = TypeVar("Name", bound=Hashable)


def _nothing(*_: Any) -> None: ...


def run_rounds(
    contenders: Mapping[Name, TimedCall],
    *,
    rounds: int,
    burst: int,
    seed: int,
    warm_up_rounds: int = 1,
    before_round: Callable[[int], None] = _nothing,
    before_burst: Callable[[], None] = _nothing,
) -> dict[Name, Times]:
    """Microseconds of each contender on this rank, by (round, call); all ranks must pass the same.

    In a round each contender makes ``burst`` calls, in an order that is drawn anew for every round. The first call of a
    longer burst is made once more and not counted: it pays for what the contender before did to the caches. The rounds
    of the warm-up come before the others, are numbered below 0 and not counted either.
    """
    times = {name: np.zeros((rounds, burst)) for name in contenders}
    # The collector would run in the timed part of whichever contender allocates most.
    gc.collect()
    gc.disable()
    try:
        for turn in range(-warm_up_rounds, rounds):
            before_round(turn)
            order = list(contenders)
            random.Random(seed * 1_000_003 + turn).shuffle(order)
            for name in order:
                before_burst()
                if burst > 1:
                    contenders[name]()
                for call in range(burst):
                    # A warm-up writes where the first round will.
                    times[name][max(turn, 0), call] = contenders[name]() / 1e3
    finally:
        gc.enable()
    return times
