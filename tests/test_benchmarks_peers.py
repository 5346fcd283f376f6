"""What is measured, and on what: peers that do all of their work, and buffers that know the exact result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_reduce.benchmarks.barrier import Barrier, words_needed
from ring_reduce.benchmarks.buffers import SHIFTS, RotatedBuffers
from ring_reduce.benchmarks.measure import Contender, Plan, _Timing
from ring_reduce.benchmarks.peers import PEERS, CopyPeer, Op, Place
from ring_reduce.benchmarks.report import MB


def _buffers(
    rank: int, *, count: int = 100, dtype: torch.dtype = torch.float32, rotate: int = 4096
) -> RotatedBuffers:
    return RotatedBuffers(rank=rank, world=3, count=count, dtype=dtype, rotate_bytes=rotate)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_buffers_know_the_exact_result(dtype: torch.dtype) -> None:
    ranks = [_buffers(rank, dtype=dtype) for rank in range(3)]
    for _ in range(50):
        inputs = [buffers.take() for buffers in ranks]
        total = sum(x.double() for x in inputs)
        assert isinstance(total, torch.Tensor)
        assert ranks[1].wrong(Op.SUM) > 0
        inputs[1].copy_(total)
        assert ranks[1].wrong(Op.SUM) == 0
        inputs[1][7] += 1
        assert ranks[1].wrong(Op.SUM) == 1
        inputs[1].copy_((total.float() / 3) if dtype is not torch.float64 else total / 3)
        assert ranks[1].wrong(Op.MEAN) == 0
        for buffers in ranks:
            buffers.refill()


def test_buffers_exceed_the_cache_and_change_in_every_call() -> None:
    buffers = _buffers(0, count=256, rotate=10 * 1024)
    lap = [buffers.take() for _ in range(10)]
    assert len({x.data_ptr() for x in lap}) == 10
    assert len({x.numpy().tobytes() for x in lap}) == 10
    again = buffers.take()
    before = again.clone()
    assert again.data_ptr() == lap[0].data_ptr()
    buffers.refill()
    assert not torch.equal(before, again)


def test_large_buffers_still_alternate() -> None:
    buffers = _buffers(0, count=4096, rotate=1)
    assert buffers.take().data_ptr() != buffers.take().data_ptr()


class _NoReduce:
    """A peer that forgets to reduce."""

    name, ops, reduces = "lazy", (Op.SUM,), True

    def setup(self, place: Place) -> None: ...

    def all_reduce(self, x: torch.Tensor, op: Op) -> None: ...

    def close(self) -> None: ...


def test_a_peer_that_does_not_reduce_is_found_out() -> None:
    words = [0] * words_needed(2)
    peer: Any = _NoReduce()
    contender = Contender(peer, Op.SUM)
    plan = Plan(world=2, sizes=(4096,), rotate_bytes=1)
    timing = _Timing(plan, 4096, 0, Barrier(words, rank=0, world=2), [contender])
    # Of two integers in 0..3 the second is 0, and the sum right by chance, once in 4.
    assert timing._count_wrong(contender) > 1024


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_copy_moves_every_byte_and_rotates_its_destination(dtype: torch.dtype) -> None:
    peer = CopyPeer()
    peer.setup(Place(0, 1, torch.distributed.HashStore(), rotate_bytes=1))
    x = torch.arange(1, 101).to(dtype)
    size = x.numel() * x.itemsize
    bits = x.view(torch.uint8).numpy().tobytes()
    for _ in range(3):
        peer.all_reduce(x, Op.SUM)
    assert peer._scratch.size == 2 * size
    assert peer._scratch[:size].tobytes() == peer._scratch[size:].tobytes() == bits


def test_repeats_depend_on_the_size_alone_and_meet_the_calls_asked_for() -> None:
    plan = Plan(world=2, sizes=(1024, 64 * MB))
    assert plan.repeats(1024) == (100, 16)
    assert plan.repeats(64 * MB) == (40, 1)
    assert Plan(world=2, sizes=(1024,), calls=3).repeats(1024) == (1, 3)
    assert max(plan.repeats(nbytes)[0] for nbytes in plan.sizes) < SHIFTS


def test_every_peer_keeps_the_protocol() -> None:
    for name, make in PEERS.items():
        peer = make()
        assert peer.name == name
        assert peer.ops
        assert set(peer.ops) <= set(Op)
