"""The order of the calls: the same on every rank, another in every round, with a warm-up that is not counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ring_reduce.benchmarks.interleave import run_rounds


def recorded(names: str, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """What was called, in order, and the times; a call takes as many microseconds as calls were before it."""
    calls: list[str] = []

    def contender(name: str) -> Callable[[], int]:
        def call() -> int:
            calls.append(name)
            return 1000 * (len(calls) - 1)

        return call

    times = run_rounds({name: contender(name) for name in names}, **options)
    return calls, times


def test_calls_are_interleaved_alike_on_every_rank_and_differently_in_every_round() -> None:
    calls, _ = recorded("abc", rounds=50, burst=1, seed=3)
    rounds = ["".join(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert len(rounds) == 51  # one to warm up
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert recorded("abc", rounds=50, burst=1, seed=3)[0] == calls
    assert recorded("abc", rounds=50, burst=1, seed=4)[0] != calls


def test_warm_up_and_first_calls_of_bursts_are_not_counted() -> None:
    calls, times = recorded("a", rounds=2, burst=3, seed=0, warm_up_rounds=2)
    assert len(calls) == 4 * (3 + 1)
    assert times["a"].tolist() == [[9, 10, 11], [13, 14, 15]]
    calls, times = recorded("a", rounds=1, burst=1, seed=0, warm_up_rounds=0)
    assert (len(calls), times["a"].tolist()) == (1, [[0]])


def test_rounds_and_bursts_are_announced() -> None:
    told: list[Any] = []
    recorded(
        "ab",
        rounds=2,
        burst=2,
        seed=0,
        before_round=told.append,
        before_burst=lambda: told.append("burst"),
    )
    assert told == [-1, "burst", "burst", 0, "burst", "burst", 1, "burst", "burst"]
