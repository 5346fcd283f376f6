"""An error, or Ctrl-C, of some ranks while the ring is made: what each rank raises, which is the first cause."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import Any
from unittest import mock

import pytest

import ring_reduce as rr
from launch import Seat, Team, caught, spawn
from ring_reduce import _core, bootstrap, meeting
from ring_reduce.channel import Channel
from stores import DictStore


def fail_while_the_ring_is_made(seat: Seat) -> Exception | None:
    with mock.patch.object(_core, "create_shared_memory", side_effect=MemoryError("none left")):
        if seat.rank == 1:
            return caught(lambda: seat.ring())
    return caught(lambda: seat.ring())


def test_an_error_of_one_rank_at_the_start_is_an_error_on_all() -> None:
    errors = spawn(3, fail_while_the_ring_is_made)
    for rank, error in enumerate(errors):
        assert isinstance(error, MemoryError if rank == 1 else rr.RingError)
        assert "none left" in str(error)
        assert rank == 1 or "rank 1" in str(error)


def fail_after_rank_0(seat: Seat) -> Exception | None:
    """Rank 0 refuses and is gone. Only then rank 1 fails, of another cause."""

    def fail(*_: Any) -> Any:
        if seat.rank == 1:
            seat.store.get("refused")
        raise MemoryError(f"none left on rank {seat.rank}")

    with mock.patch.object(_core, "create_shared_memory", fail):
        error = caught(lambda: seat.ring())
    if seat.rank == 0:
        seat.store.set("refused", b"")
    return error


def test_a_rank_that_fails_after_rank_0_raises_its_error() -> None:
    """Though it can send no more: what rank 0 said is still to be read."""
    zero, one = spawn(2, fail_after_rank_0)
    assert type(zero) is MemoryError
    assert type(one) is rr.RingError
    assert "rank 0: MemoryError: none left on rank 0" in str(one)


def fail_beside_a_slow_rank(seat: Seat) -> Exception | None:
    """Rank 2 can't make its memory. Rank 1 makes none before rank 0 has heard of it."""

    def make(*_: Any) -> Any:
        if seat.rank == 1:
            seat.store.get("heard")
        raise MemoryError(f"none left on rank {seat.rank}")

    with mock.patch.object(_core, "create_shared_memory", make) if seat.rank else contextlib.nullcontext():
        error = caught(lambda: seat.ring())
    if seat.rank == 0:
        seat.store.set("heard", b"")
    return error


def test_a_slow_rank_hides_no_error_of_another() -> None:
    zero, one, two = spawn(3, fail_beside_a_slow_rank, timeout=30)
    assert type(two) is MemoryError
    for error in (zero, one):
        assert type(error) is rr.RingError
        assert "rank 2: MemoryError: none left on rank 2" in str(error)


def test_rank_0_names_all_that_do_not_answer() -> None:
    hub = bootstrap.Hub(bootstrap.Member(0, 4, "x"), DictStore(), 0.1)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    hub._channels = {rank: Channel(ours, "") for rank, (ours, _) in zip((1, 2, 3), pairs, strict=True)}
    pairs[1][1].send(b'{"ready": true}')
    gathered = hub.gather()
    assert next(gathered) == (2, {"ready": True}, [])
    with pytest.raises(rr.RingTimeout, match=r"no answer from rank 1, 3 in 0.1 s; is it alive"):
        next(gathered)
    hub.close()
    for _, theirs in pairs:
        theirs.close()


def test_rank_0_looks_once_more_when_the_time_to_meet_is_over() -> None:
    class Late(DictStore):
        """Rank 1 comes at the last moment."""

        def set(self, key: str, value: bytes) -> None:
            super().set(key, value)
            if key.endswith("/token"):
                hello = key.replace("/token", f"/hello/{json.loads(value)['token']}/1")
                super().set(hello, b'{"near": true, "number": "1"}')

    met = meeting.meet(bootstrap.Member(0, 2, "x"), Late(), 0.0, {})
    assert [hello["near"] for hello in met.hellos] == [True, True]


def interrupted_start(seat: Seat) -> str:
    if seat.rank == 1:
        return ""
    try:
        seat.store.set("waiting", b"")
        seat.ring()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "made"


def test_ctrl_c_while_waiting_for_others() -> None:
    with Team(2) as team:
        team.begin(interrupted_start)
        team.wait_for("waiting")
        os.kill(team.processes[0].pid, 2)
        assert team.finish(timeout=20) == ["KeyboardInterrupt", ""]


def interrupted_while_the_ring_is_made(seat: Seat) -> str:
    """Rank 1 is at its memory, and rank 0 waits for it, or soon will."""

    def wait(*_: Any) -> None:
        seat.store.set("waiting", b"")
        for _slice in range(3000):  # not in one: another thread may get the signal, and this one sleeps on
            time.sleep(0.01)

    try:
        with (
            mock.patch.object(_core, "create_shared_memory", wait) if seat.rank else contextlib.nullcontext()
        ):
            seat.ring()
    except BaseException as error:
        return type(error).__name__
    return "made"


def test_ctrl_c_on_all_ranks_while_the_ring_is_made() -> None:
    """It is no RingError anywhere, though the ranks hear of each other's."""
    with Team(2) as team:
        team.begin(interrupted_while_the_ring_is_made)
        team.wait_for("waiting")
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):  # both have it before either goes on
            for process in team.processes:
                os.kill(process.pid, number)
        assert team.finish(timeout=20) == ["KeyboardInterrupt"] * 2
