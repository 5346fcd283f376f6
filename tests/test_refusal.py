"""Arguments that one rank alone gets wrong: its own error there, and one with that text on all others, at once."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught, spawn
from ring_reduce import bootstrap, bounded_store, refusal, transport

LONG_S = 60.0  # of a ring: nobody waits so long
IN_TIME_S = 40.0


def make(seat: Seat, has_group: bool, **options: Any) -> rr.Ring:
    store: Any = (
        dist.FileStore(str(seat.directory / f"store {seat.job}")) if has_group else seat.store
    )  # without the world: it would remove the file with the first ring
    options = {"rank": seat.rank, "world": seat.world, "timeout": LONG_S, "name": "x", **options}
    return rr.Ring(store, _has_group=has_group, **options)


def make_twice(
    seat: Seat, has_group: bool, wrong: list[int], options: dict[str, Any]
) -> tuple[Exception | None, float]:
    """What a ring that has ``options`` on some ranks raises, and the sum of one without, of the same name."""
    error = caught(lambda: make(seat, has_group, **options if seat.rank in wrong else {}))
    with make(seat, has_group) as ring:
        return error, float(ring.all_reduce(np.ones(9))[0])


CASES: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "tree"}, "ValueError: algorithm='tree'; there are auto, ring and direct"),
    ({"timeout": 0}, "ValueError: timeout is 0 s; it has to be positive"),
    ({"transport": "tcp"}, "ValueError: transport='tcp'; there are auto, shm"),
    ({"transport": "cuda_ipc"}, "ValueError: transport='cuda_ipc' is for GPUs"),
]


@pytest.mark.parametrize("has_group", [False, True], ids=["bare", "group"])
@pytest.mark.parametrize(("case", "victim"), [(0, 0), (1, 2), (2, 1), (3, 0)])
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(
    run: Run, has_group: bool, case: int, victim: int
) -> None:
    options, text = CASES[case]
    outcomes = run(3, make_twice, has_group, [victim], options, timeout=IN_TIME_S)
    for rank, (error, total) in enumerate(outcomes):
        assert type(error) is (ValueError if rank == victim else rr.RingError)
        assert rank == victim or f"ring 'x', rank {victim}: {text}" in str(error)
        assert total == 3.0


@pytest.mark.parametrize("has_group", [False, True], ids=["bare", "group"])
def test_a_wrong_argument_of_all_ranks_is_an_error_on_each(run: Run, has_group: bool) -> None:
    for error, total in run(3, make_twice, has_group, [0, 1, 2], {"lanes": 65}, timeout=IN_TIME_S):
        assert type(error) is ValueError
        assert str(error) == "lanes=65: a ring has 1 to 64 lanes"
        assert total == 3.0


def make_without_a_gpu(seat: Seat) -> Exception | None:
    """Rank 1 finds no such device, once its arguments have been looked at."""
    found: dict[str, Any] = (
        {"side_effect": AssertionError("no device 7")} if seat.rank == 1 else {"return_value": None}
    )
    with mock.patch.object(transport, "_gpu_uuid", **found):
        return caught(lambda: make(seat, True, transport="process_group"))


def test_a_device_that_one_rank_lacks_is_an_error_on_all() -> None:
    zero, one = spawn(2, make_without_a_gpu, timeout=IN_TIME_S)
    assert type(one) is AssertionError
    assert type(zero) is rr.RingError
    assert "ring 'x', rank 1: AssertionError: no device 7" in str(zero)


def refuse_before_the_others_come(seat: Seat, has_group: bool) -> Exception | None:
    """Rank 1 says what is wrong while it is alone."""
    if seat.rank == 1:
        seat.store.set("refuses", b"")
        return caught(lambda: make(seat, has_group, lanes=-1))
    seat.store.get("refuses")
    return caught(lambda: make(seat, has_group))


@pytest.mark.parametrize("has_group", [False, True], ids=["bare", "group"])
def test_a_rank_that_refuses_stays_for_the_others(run: Run, has_group: bool) -> None:
    errors = run(3, refuse_before_the_others_come, has_group, timeout=IN_TIME_S)
    for rank in (0, 2):
        assert type(errors[rank]) is rr.RingError
        assert "rank 1: ValueError: lanes=-1" in str(errors[rank])


def refuse_where_an_earlier_try_failed(seat: Seat) -> Exception | None:
    """Rank 0 gave up a try in which it was alone. It tries again once rank 1 has seen that."""
    if seat.rank == 0:
        assert type(caught(lambda: make(seat, False, timeout=0.1))) is rr.RingTimeout
        seat.store.set("gave up", b"")
        seat.store.get("looked")
        return caught(lambda: make(seat, False))
    seat.store.get("gave up")
    read_record = bootstrap.read_record

    def look(*arguments: Any) -> Any:
        record = read_record(*arguments)
        seat.store.set("looked", b"")
        return record

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(bootstrap, "read_record", look))
        for module in (bootstrap, bounded_store, refusal):
            stack.enter_context(mock.patch.object(module, "GRACE_S", IN_TIME_S))
        return caught(lambda: make(seat, False, lanes=-1))


def test_a_rank_that_refuses_does_not_mind_an_earlier_try() -> None:
    zero, one = spawn(2, refuse_where_an_earlier_try_failed, timeout=IN_TIME_S)
    assert type(one) is ValueError
    assert type(zero) is rr.RingError
    assert "rank 1: ValueError: lanes=-1" in str(zero)
