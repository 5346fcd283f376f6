"""The choice of a ring's transport: by what all ranks can do, or by name; and what it says of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ring_reduce as rr
from conftest import Run
from ddp_helpers import batch_of, gradients, group, loss_of, make_net, wrap
from group_rings import group_ring
from launch import Seat, caught
from ring_reduce import bootstrap, doctor, meeting, transport
from ring_reduce.bootstrap import Member
from ring_reduce.errors import PeerLost, RingError, RingMismatch, RingTimeout
from stores import DictStore


@contextlib.contextmanager
def on_another_host(elsewhere: bool) -> Iterator[None]:
    host = "another" if elsewhere else bootstrap.boot_id()
    with mock.patch.object(bootstrap, "boot_id", return_value=host):
        yield


def said_of(ring: rr.Ring) -> tuple[str, str, float]:
    total = float(ring.all_reduce(np.ones(7))[-1])
    assert ring.device is None
    return ring.transport, ring.transport_reason, total


def choose(seat: Seat, elsewhere: int, asked: str) -> list[tuple[str, str, float]]:
    """Twice, so that the second meets in a store that holds the first's."""
    found = []
    with on_another_host(seat.rank == elsewhere):
        for _ in range(2):
            with group_ring(seat, transport=asked) as ring:
                found.append(said_of(ring))
    return found


@pytest.mark.parametrize(
    ("elsewhere", "asked", "chosen", "why"),
    [
        (-1, "auto", "shm", "all ranks are on one host, and share its memory"),
        (2, "auto", "process_group", "there is no shm: rank 2 is on another host than rank 0"),
        (-1, "process_group", "process_group", "it was asked for"),
    ],
)
def test_what_is_chosen(run: Run, elsewhere: int, asked: str, chosen: str, why: str) -> None:
    ranks = run(3, choose, elsewhere, asked)
    assert all(rank == ranks[0] for rank in ranks)
    for name, reason, total in ranks[0]:
        assert (name, total) == (chosen, 3.0)
        assert reason.startswith(why)


def refuse(seat: Seat, elsewhere: int, options: list[dict[str, Any]]) -> str:
    with on_another_host(seat.rank == elsewhere):
        error = caught(lambda: group_ring(seat, timeout=30.0, **options[seat.rank % len(options)]))
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("elsewhere", "options", "refusal"),
    [
        (1, [{"transport": "shm"}], "RingError: ring 'group', rank 1 is on another host than rank 0"),
        (
            1,
            [{"transport": "auto", "algorithm": "direct"}],
            "RingError: ring 'group': process_group can't be used: ",
        ),
        (
            -1,
            [{"transport": "shm"}, {"transport": "process_group"}],
            "RingMismatch: ring 'group': transport is 'shm' on rank 0 and 'process_group' on rank 1",
        ),
        (
            -1,
            [{"segment_bytes": 128}, {"segment_bytes": 256}],
            "RingMismatch: ring 'group': tuning is {'segment_bytes': 128, 'window': None} on rank 0 and",
        ),
    ],
)
def test_what_all_ranks_refuse(run: Run, elsewhere: int, options: list[dict[str, Any]], refusal: str) -> None:
    texts = run(2, refuse, elsewhere, options)
    assert texts[0] == texts[1]
    assert texts[0].startswith(refusal)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"transport": "tcp"}, "there are auto, shm, cuda_ipc, process_group"),
        ({"transport": "process_group"}, r"use Ring.from_group\(\)"),
        ({"transport": "cuda_ipc"}, "pass device='cuda'"),
        ({"transport": "process_group", "_has_group": True, "algorithm": "direct"}, "use 'ring'"),
        ({"transport": "shm", "device": "cuda:1"}, "device is cuda:1; use cuda_ipc or process_group"),
        ({"device": "meta"}, "on the CPU or on a CUDA device"),
    ],
)
def test_what_one_rank_alone_can_tell(options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        rr.Ring(rank=0, world=1, **options)


def miss(seat: Seat) -> str:
    """Rank 1 does not come."""
    seat.meet("here")  # the others have the time for themselves
    if seat.rank == 1:
        return ""
    error = caught(lambda: group_ring(seat, timeout=0.5))
    return f"{type(error).__name__}: {error}"


def test_a_rank_that_does_not_come_is_named(run: Run) -> None:
    first, _, third = run(3, miss)
    assert first == third
    assert first.startswith(
        "RingTimeout: ring 'group', rank 0: no word from rank 1 of 3 in 0.5 s; did every rank"
    )


def test_an_answer_of_an_earlier_ring_is_not_believed() -> None:
    """Its token and its answer still stand in the store, and its rank 0 is gone."""
    store, member = DictStore(), Member(1, 2, "old")
    store.set("ring_reduce/old/meeting/token", json.dumps({"token": "past", "boot_id": "x"}).encode())
    hellos = [{"near": True}, {"near": True, "number": "of another process"}]
    store.set("ring_reduce/old/meeting/answer/past", json.dumps({"hellos": hellos}).encode())
    with (
        mock.patch.object(meeting, "GRACE_S", 0.0),
        pytest.raises(RingTimeout, match="no answer from rank 0"),
    ):
        meeting.meet(member, store, 0.2, {})
    assert json.loads(store.get("ring_reduce/old/meeting/hello/past/1"))["near"] is False


def test_a_store_in_which_something_else_writes() -> None:
    store = DictStore()
    store.set("ring_reduce/odd/meeting/token", b"[1]")
    with pytest.raises(
        RingError, match=r"the Store holds as 'ring_reduce/odd/meeting/token' is no word of rank 0"
    ):
        meeting.meet(Member(1, 2, "odd"), store, 30.0, {})


class Opener:
    """Stands for what opens a transport."""

    def __init__(self, algorithm: str = "auto", ipc: Exception | None = None) -> None:
        self.member, self.device, self.algorithm, self._ipc = (
            Member(0, 2, "x"),
            torch.device("cuda:0"),
            algorithm,
            ipc,
        )

    def cuda_ipc(self) -> Any:
        if self._ipc is not None:
            raise self._ipc
        return "cuda_ipc", ""

    def process_group(self, token: str | None, reason: str) -> Any:
        return f"process_group {token}", reason


def chosen_on_gpus(opener: Opener, *, near: bool = True, gpus: str = "ab", problem: str | None = None) -> Any:
    hellos = [
        {"near": near or rank == 0, "gpu": gpu, "no_process_group": problem if rank == 1 else None}
        for rank, gpu in enumerate(gpus)
    ]
    return transport._first_that_all_can(opener, meeting.Meeting("t", hellos), "auto")  # type: ignore[arg-type]


def test_what_is_chosen_on_gpus() -> None:
    no_access = RingError("rank 1: no peer access between 0 and 1")
    assert chosen_on_gpus(Opener()) == ("cuda_ipc", "")
    reason = "there is no cuda_ipc: rank 1: no peer access between 0 and 1"
    assert chosen_on_gpus(Opener(ipc=no_access)) == ("process_group t", reason)
    assert chosen_on_gpus(Opener(), near=False)[1].startswith(
        "there is no cuda_ipc: rank 1 is on another host"
    )
    for error in (
        RingTimeout("late"),
        RingMismatch("other"),
        PeerLost("gone"),
    ):  # which would be so elsewhere too
        with pytest.raises(type(error), match=str(error)):
            chosen_on_gpus(Opener(ipc=error))
    with pytest.raises(RingError, match=r"can't be used: ranks 0 and 1 share a GPU.*\(there is no cuda_ipc"):
        chosen_on_gpus(Opener(ipc=no_access), gpus="aa")
    with pytest.raises(RingError, match="on rank 1, this torch was built without NCCL"):
        chosen_on_gpus(Opener(ipc=no_access), problem="this torch was built without NCCL")


def from_groups(seat: Seat) -> list[Any]:
    """Of the whole world, and of two ranks whose group has other ranks than the world."""
    with group(seat) as ring:
        found: list[Any] = [ring.transport]
        pair = dist.new_group([1, 2])
        if seat.rank > 0:
            with rr.Ring.from_group(pair, transport="process_group") as ring_of_two:
                x = torch.full((9,), float(seat.rank))
                found += [ring_of_two.rank, float(ring_of_two.all_reduce(x)[0])]
                # It has groups of its own: the caller's may be in use, and may end.
                work = dist.all_reduce(torch.ones(3), group=pair, async_op=True)
                found.append(float(ring_of_two.all_reduce(x, rr.MEAN)[0]))
                work.wait()
                dist.destroy_process_group(pair)
                found.append(float(ring_of_two.all_reduce(x)[0]))
        return found


def test_rings_of_groups(run: Run) -> None:
    assert run(3, from_groups) == [["shm"], ["shm", 0, 3.0, 3.0, 6.0], ["shm", 1, 3.0, 3.0, 6.0]]


def ddp_gradients(seat: Seat) -> list[list[torch.Tensor]]:
    """Of a step under DDP with unequal batches, over both transports."""
    found = []
    with group(seat):
        for asked in ("shm", "process_group"):
            with rr.Ring.from_group(name=asked, transport=asked, algorithm="ring") as ring:
                model = wrap(make_net(torch.float32))
                state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
                for step in range(2):
                    batch = batch_of(seat.rank, step, 3 + 2 * seat.rank, torch.float32)
                    model.zero_grad()
                    state.add_count(len(batch))
                    loss_of(model(batch), 1.0).backward()
                assert state.last is not None
                assert state.last.total_count == sum(3 + 2 * rank for rank in range(seat.world))
                found.append(gradients(model))
    return found


def test_gradients_under_ddp_are_the_same(run: Run) -> None:
    for over_shm, over_group in run(3, ddp_gradients):
        assert all(torch.equal(a, b) for a, b in zip(over_shm, over_group, strict=True))
        assert all(bool(gradient.any()) for gradient in over_shm[:1])


def test_doctor_of_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ability = doctor.process_group_ability()
    assert ability.usable
    assert "Gloo" in ability.reason
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert doctor.process_group_ability() == doctor.Ability(False, "this torch was built without Gloo")


def test_on_gpus_process_group_needs_nccl_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert transport.process_group_problem(on_gpu=True) == "this torch was built without NCCL"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "there is no Triton" in str(transport.process_group_problem(on_gpu=True))
    assert transport.process_group_problem(on_gpu=False) is None


def test_one_rank_on_a_gpu_needs_no_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = Opener(ipc=RingError("no driver"))
    opener.member = Member(0, 1, "x")
    with pytest.raises(RingError, match="no driver"):
        transport._alone(opener, "cuda_ipc")  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "process_group_problem", lambda on_gpu: "no NCCL")
    with pytest.raises(RingError, match="no driver"):
        transport._alone(opener, "auto")  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "process_group_problem", lambda on_gpu: None)
    chosen: Any = transport._alone(opener, "auto")  # type: ignore[arg-type]
    assert chosen == ("process_group None", "there is no cuda_ipc: no driver")
    opener.member = Member(0, 2, "x")
    with pytest.raises(RingError, match="no driver"):
        transport._alone(opener, "auto")  # type: ignore[arg-type]
