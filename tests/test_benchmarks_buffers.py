"""What is reduced: buffers that change, and that know the exact result and how far another is from it."""

from __future__ import annotations

import math

import pytest
import torch

from ring_reduce.benchmarks import buffers
from ring_reduce.benchmarks.buffers import SHIFTS, Inputs, RotatedBuffers, integers, normals
from ring_reduce.benchmarks.host import MB
from ring_reduce.benchmarks.peers import Op
from ring_reduce.benchmarks.plan import Plan

CPU = torch.device("cpu")
WORLD = 3


def made(
    rank: int, *, count: int = 100, dtype: torch.dtype = torch.float32, rotate: int = 4096, calls: int = 1000
) -> RotatedBuffers:
    inputs = Inputs(integers, rank=rank, world=WORLD, count=count, dtype=dtype, device=CPU)
    return RotatedBuffers(inputs, count=count, dtype=dtype, device=CPU, rotate_bytes=rotate, calls=calls)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]
)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("period", [buffers.PERIOD, 37])
def test_buffers_know_the_exact_result(
    dtype: torch.dtype, in_place: bool, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "PERIOD", period)
    ranks = [made(rank, dtype=dtype) for rank in range(WORLD)]
    for _ in range(50):
        taken = [each.take(in_place=in_place) for each in ranks]
        total = sum((x.double() for x, _ in taken), torch.zeros(100, dtype=torch.float64))
        x, out = taken[1]
        assert (out is x) is in_place
        out.fill_(-1)
        assert ranks[1].wrong(Op.SUM, in_place=in_place) == 100
        out.copy_(total)
        assert ranks[1].wrong(Op.SUM, in_place=in_place) == 0
        out[7] += 1
        assert ranks[1].wrong(Op.SUM, in_place=in_place) == 1
        if dtype.is_floating_point:
            out.copy_((total.float() / 3) if dtype is not torch.float64 else total / 3)
            assert ranks[1].wrong(Op.MEAN, in_place=in_place) == 0
        for each in ranks:
            each.refill()


def test_an_input_that_was_changed_out_of_place_is_wrong() -> None:
    ranks = [made(rank) for rank in range(WORLD)]
    taken = [each.take(in_place=False) for each in ranks]
    x, out = taken[0]
    out.copy_(torch.stack([x for x, _ in taken]).sum(0))
    assert ranks[0].wrong(Op.SUM, in_place=False) == 0
    x[11] += 1
    assert ranks[0].wrong(Op.SUM, in_place=False) == 1


def test_buffers_exceed_the_cache_and_change_in_every_call() -> None:
    each = made(0, count=256, rotate=10 * 1024)
    lap = [each.take(in_place=False) for _ in range(10)]
    assert len({x.data_ptr() for pair in lap for x in pair}) == 20
    assert len({x.numpy().tobytes() for x, _ in lap}) == 10
    again, _ = each.take(in_place=True)
    before = again.clone()
    assert again.data_ptr() == lap[0][0].data_ptr()
    each.refill()
    assert not torch.equal(before, again)


def test_large_buffers_still_alternate() -> None:
    each = made(0, count=4096, rotate=1)
    assert each.take(in_place=True)[0].data_ptr() != each.take(in_place=True)[0].data_ptr()


def test_small_sizes_have_a_buffer_for_each_call_and_no_more() -> None:
    each = made(0, count=1, rotate=1 << 20, calls=10)
    addresses = [each.take(in_place=True)[0].data_ptr() for _ in range(13)]
    assert len(set(addresses)) == 12
    assert addresses[12] == addresses[0]


@pytest.mark.parametrize("op", [Op.SUM, Op.MEAN])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_rounding_explains_is_not_outside(dtype: torch.dtype, op: Op) -> None:
    count = 100_000
    inputs = Inputs(normals, rank=0, world=WORLD, count=count, dtype=dtype, device=CPU)
    data = [normals(rank, count + SHIFTS, dtype)[:count] for rank in range(WORLD)]
    out = (data[0] + data[1]) + data[2]  # a rounding each
    if op is Op.MEAN:
        out /= WORLD
    assert inputs.outside(out, op) == 0
    limits = torch.finfo(dtype)
    magnitude = sum(x.double().abs() for x in data)[:2] / (WORLD if op is Op.MEAN else 1)  # type: ignore[index]
    out[0] += (12 * limits.eps * magnitude[0]).to(dtype)
    out[1] = math.nan
    assert inputs.outside(out, op) == 2


def test_no_shift_comes_back_within_the_calls_of_a_size() -> None:
    plan = Plan(world=2, sizes=(1024, 64 * MB))
    assert max(plan.repeats(nbytes)[0] for nbytes in plan.sizes) < SHIFTS


@pytest.mark.parametrize("op", [Op.SUM, Op.MEAN])
def test_error_is_relative_to_the_inputs(op: Op) -> None:
    """Lost bits show, cancellation does not."""
    data = [normals(rank, 100 + SHIFTS, torch.float32)[:100] for rank in range(WORLD)]
    exact = sum((x.double() for x in data), torch.zeros(100, dtype=torch.float64))
    magnitude = sum((x.double().abs() for x in data), torch.zeros(100, dtype=torch.float64))
    divisor = 1 if op is Op.SUM else WORLD
    inputs = Inputs(normals, rank=0, world=WORLD, count=100, dtype=torch.float32, device=CPU)
    assert inputs.relative_error(exact / divisor, op) < 1e-15
    assert 0 < inputs.relative_error((exact / divisor).float(), op) <= 2**-24
    assert 2**-12 < inputs.relative_error((exact / divisor).bfloat16(), op) <= 2**-8
    off = exact.clone()
    off[13] += 0.25 * magnitude[13]
    assert inputs.relative_error(off / divisor, op) == pytest.approx(0.25)
    off[14] = math.nan
    assert inputs.relative_error(off, op) == math.inf
