"""The DDP hook on exact data: gradients and state.last to the bit, for every normalization."""

from __future__ import annotations

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_cases import BLOCKS, WIDTH, Case, assert_trained, every_normalization
from ddp_helpers import group
from launch import Seat
from ring_reduce.normalization import Kind, Normalization

# Powers of two, whose local means are exact; for SUM the total has to be one as well.
SIZES: dict[int, list[tuple[int, ...]]] = {
    1: [(8,)],
    2: [(4, 4), (8, 2)],
    4: [(2, 2, 2, 2), (1, 2, 4, 1), (8, 1, 2, 2)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", SIZES)
def test_every_normalization_to_the_bit(run: Run, world: int, dtype: torch.dtype) -> None:
    cases = [
        Case(normalization, sizes, dtype)
        for sizes in SIZES[world]
        for normalization in every_normalization(sum(sizes))
        if normalization.kind is not Kind.SUM or sum(sizes) & (sum(sizes) - 1) == 0
    ]
    assert_trained(run, world, cases)


def random_steps(
    seat: Seat, normalizations: list[Normalization], sizes: list[int]
) -> list[tuple[float, float]]:
    """The largest error of each normalization, in units of its bound; and of the same gradient divided twice."""
    total, seen = sum(sizes), []
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(size, BLOCKS, WIDTH, generator=generator) for size in sizes]
    exact = torch.cat(batches).double().sum(0) / total
    # Of sum |x| / total: additions of examples and ranks, and what a mean, a weight, a loss's divisor and the last
    # division round; (1 + u)^k - 1 < 1.01 k u for these k. The same for any order of additions.
    roundings = total + len(sizes) + 6
    bound = 1.01 * roundings * 2**-24 * torch.cat(batches).double().abs().sum(0) / total
    with group(seat) as ring:
        for normalization in normalizations:
            case = Case(normalization, tuple(sizes))
            model = case.model()
            state = rr.attach(model, ring, normalization)
            if normalization.uses_count:
                state.add_count(sizes[seat.rank])
            (model(batches[seat.rank]).sum() / case.loss_divisor(seat.rank)).backward()
            got = torch.stack([w.grad for w in model.module.weights]).double()
            wrong = float(((got / 2 - exact).abs() / bound).max())
            seen.append((float(((got - exact).abs() / bound).max()), wrong))
    return seen


@pytest.mark.parametrize(
    ("world", "sizes"), [(1, [7]), (2, [5, 5]), (2, [3, 11]), (4, [3, 3, 3, 3]), (4, [1, 9, 4, 6])]
)
def test_random_data_within_what_float32_rounds(run: Run, world: int, sizes: list[int]) -> None:
    normalizations = [
        n for n in every_normalization(sum(sizes)) if n.kind is not Kind.MEAN or len({*sizes}) == 1
    ]
    for errors in run(world, random_steps, normalizations, sizes):
        for normalization, (error, divided_twice) in zip(normalizations, errors, strict=True):
            assert error <= 1, normalization
            assert divided_twice > 1000  # the bound is tight enough to tell
