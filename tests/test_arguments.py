"""What a ring is made from: each wrong argument is an error that says what it is and what it has to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught


@pytest.mark.parametrize(("rank", "world"), [(0, 0), (-1, 2), (2, 2), (0, -1)])
def test_a_rank_outside_the_world(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of a world of {world}: a ring needs world >= 1"):
        rr.Ring(rank=rank, world=world)


@pytest.mark.parametrize("what", ["rank", "world", "lanes"])
@pytest.mark.parametrize("value", ["1", 1.0, None, [1]])
def test_numbers_that_are_not_whole(what: str, value: Any) -> None:
    if what == "lanes" and value is None:
        return  # the default
    arguments: dict[str, Any] = {"rank": 0, "world": 1, what: value}
    with pytest.raises(TypeError, match=f"{what} is .* it has to be a whole number"):
        rr.Ring(**arguments)


def test_whole_numbers_of_numpy() -> None:
    with rr.Ring(rank=np.int64(0), world=np.int32(1), lanes=np.int8(1)) as ring:
        assert ring.all_reduce(np.ones(3))[0] == 1
        assert repr(ring) == "<Ring 'default' rank 0 of 1, 1 lane, shm>"
    assert "closed" in repr(ring)


@pytest.mark.parametrize("lanes", [0, -1, 65])
def test_too_few_or_too_many_lanes(lanes: int) -> None:
    with pytest.raises(ValueError, match=f"lanes={lanes}: a ring has 1 to 64 lanes"):
        rr.Ring(rank=0, world=1, lanes=lanes)


@pytest.mark.parametrize("store", [{}, "localhost:29500", object()])
def test_a_store_that_is_none(store: Any) -> None:
    with pytest.raises(TypeError, match=r"store is a .*; a ring meets in a torch.distributed.Store"):
        rr.Ring(store, rank=0, world=2)


def test_no_store_for_several_ranks() -> None:
    with pytest.raises(
        ValueError, match="ring 'default', rank 1: a ring of 2 ranks needs a store to meet in"
    ):
        rr.Ring(rank=1, world=2)


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def abort_with(seat: Seat, how: str) -> str:
    def body() -> None:
        with seat.ring() as ring:
            if seat.rank == 1 and how == "raise":
                raise SilentError
            if seat.rank == 1:
                ring.abort("a lone \ud800 surrogate")
            ring.all_reduce(np.ones(5))

    error = caught(body)
    return type(error).__name__ if isinstance(error, SilentError) else str(error)


def test_reasons_that_are_no_text(run: Run) -> None:
    first, second = run(2, abort_with, "surrogate")
    assert first == second == "rank 1 aborted the ring: a lone ? surrogate"
    assert run(2, abort_with, "raise") == ["rank 1 aborted the ring: SilentError", "SilentError"]
