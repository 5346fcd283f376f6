"""What a process of the same user may send while a ring is made: seeded mutations of right messages and descriptors.

Each has to end in a ring or in a ``RingError``, soon, with nothing left open. ``RING_REDUCE_FUZZ_MINUTES`` runs for so
long, with seeds beyond those of the short run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from unittest import mock

import pytest

import ring_reduce as rr
from conftest import Run
from hostile_rank import HostileRank, mutated_json
from launch import Seat
from ring_reduce import bootstrap, shm
from stores import DictStore

SEEDS = 300
MINUTES = float(os.environ.get("RING_REDUCE_FUZZ_MINUTES", "0"))
TIMEOUT_S = 0.1  # where the hostile rank makes the other wait
HANG_S = 10.0  # far above both time-outs and the grace

TUNING = shm.Tuning(segment_bytes=1024, part_bytes=1024, one_shot_bytes=512)


def make(rank: int, store: DictStore, name: str) -> str:
    """What comes of making a ring of two: "" or the error, which has to be one of a ring."""
    try:
        member = bootstrap.Member(rank, 2, name)
        shm.open_shm(member, store, TIMEOUT_S, 1, "auto", TUNING).close()
    except rr.RingError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def against_a_hostile_rank(rank: int, seed: int) -> str:
    store, name = DictStore(), f"hostile {seed}"
    with HostileRank(1 - rank, store, name, seed):
        return make(rank, store, name)


def against_a_hostile_record(rank: int, seed: int) -> str:
    """Rank 1 finds what somebody has put into the Store."""
    chance = random.Random(seed)
    record = {
        "address": "nobody",
        "boot_id": bootstrap.boot_id(),
        "error": "no",
        "kind": "error",
        "at": time.time(),
    }
    for key in ("error", "kind", "at"):
        if chance.random() < 0.5:
            del record[key]
    key = bootstrap.address_key(bootstrap.Member(rank, 2, "hostile"))
    return make(rank, DictStore(**{key: mutated_json(record, chance)}), "hostile")


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def attack(seat: Seat, against: Callable[[int, int], str], rank: int, first: int, count: int) -> list[str]:
    """Runs seeds; what each came to."""
    outcomes, started = [], time.monotonic()
    with mock.patch.object(bootstrap, "GRACE_S", 0.1), mock.patch.object(bootstrap, "_POLL_S", 0.002):
        for seed in range(first, first + count):
            before, begun = descriptors(), time.monotonic()
            try:
                outcomes.append(against(rank, seed))
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
            assert descriptors() == before, f"seed {seed} leaves a descriptor open: {outcomes[-1]}"
            assert time.monotonic() - begun < HANG_S, f"seed {seed} takes too long: {outcomes[-1]}"
    print(f"{count} seeds in {time.monotonic() - started:.1f} s")
    return outcomes


CASES = {
    "a hostile rank 1": (against_a_hostile_rank, 0, SEEDS),
    "a hostile rank 0": (against_a_hostile_rank, 1, SEEDS),
    "a hostile record": (against_a_hostile_record, 1, 60),
}


@pytest.mark.parametrize("case", CASES)
def test_no_message_breaks_more_than_the_start(run: Run, case: str) -> None:
    against, rank, count = CASES[case]
    (outcomes,) = run(1, attack, against, rank, 0, count)
    assert any(outcomes)
    assert (
        "" in outcomes or case == "a hostile record"
    )  # what breaks nothing, or else only the first check was seen
    assert len({outcome.split(":")[0] for outcome in outcomes}) > 1
    first, end = count, time.monotonic() + 60 * MINUTES / len(CASES)
    while time.monotonic() < end:
        run(1, attack, against, rank, first, count)
        first += count
