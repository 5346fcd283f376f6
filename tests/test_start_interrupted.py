"""An exception of the user's own while a ring is made, from a signal's handler say: it stays what it is on its rank,
and is an error of the ring on the others. And what one rank alone asks for.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught
from ring_reduce import group_start, meeting
from test_refusal import make

IN_TIME_S = 60.0


class Preempted(Exception):
    """What a handler of SIGTERM may raise."""


def preempted(*_: Any) -> Any:
    raise Preempted("the node is taken")


def preempted_while_meeting(seat: Seat, victim: int) -> Exception | None:
    """Once the other has come, or has been told where rank 0 is."""
    collect = meeting._collect

    def last(*arguments: Any) -> Any:
        came = collect(*arguments)
        return came if None in arguments[-1] else preempted()

    name, replaced = ("_collect", last) if victim == 0 else ("_is_near", preempted)
    with mock.patch.object(meeting, name, replaced if seat.rank == victim else getattr(meeting, name)):
        return caught(lambda: make(seat, True, transport="shm", timeout=IN_TIME_S))


@pytest.mark.parametrize("victim", [0, 1])
def test_while_ranks_meet(run: Run, victim: int) -> None:
    errors = run(2, preempted_while_meeting, victim)
    check(errors[victim], errors[1 - victim], victim)


def preempted_while_connecting(seat: Seat) -> Exception | None:
    replaced = preempted if seat.rank == 0 else group_start._await
    with mock.patch.object(group_start, "_await", replaced):
        return caught(lambda: make(seat, True, transport="process_group", timeout=IN_TIME_S))


def test_while_process_groups_connect(run: Run) -> None:
    ours, others = run(2, preempted_while_connecting)
    check(ours, others, 0)


def check(ours: Exception | None, others: Exception | None, victim: int) -> None:
    assert (type(ours).__name__, str(ours)) == ("Preempted", "the node is taken")
    assert type(others) is rr.RingAborted
    assert str(others) == f"rank {victim} aborted the ring: Preempted: the node is taken"


def ask_for(seat: Seat, mine: list[dict[str, Any]]) -> Exception | None:
    return caught(lambda: make(seat, False, timeout=IN_TIME_S, **mine[seat.rank]))


def test_a_gpu_on_one_rank_alone_is_named(run: Run) -> None:
    for error in run(2, ask_for, [{}, {"device": "cuda:0"}]):
        assert type(error) is rr.RingMismatch
        assert "transport is 'shm' on rank 0 and 'cuda_ipc' on rank 1" in str(error)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("letter", ["x", "\U0001f600"])
def test_a_long_text_reaches_the_other_rank(run: Run, wrong: int, letter: str) -> None:
    mine: list[dict[str, Any]] = [{}, {}]
    mine[wrong] = {"algorithm": letter * 70_000}
    errors = run(2, ask_for, mine)
    assert type(errors[wrong]) is ValueError
    assert type(errors[1 - wrong]) is rr.RingError
    assert f"rank {wrong}: ValueError: algorithm='{letter * 100}" in str(errors[1 - wrong])


@pytest.mark.parametrize("device", ["cuda:0", 7])
def test_a_device_that_torch_lacks_is_a_bad_argument(run: Run, device: Any) -> None:
    (error,) = run(1, lacking, device)
    assert type(error) in (ValueError, rr.RingError), error
    assert "device" in str(error) or "GPU" in str(error)


def lacking(seat: Seat, device: Any) -> Exception | None:
    return caught(lambda: make(seat, True, device=device, timeout=IN_TIME_S))
