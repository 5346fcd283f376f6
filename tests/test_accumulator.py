"""Accumulation in one process: the gradient of a group is that of one batch that holds all of its samples.

Inputs are small integers, so that every sum is exact and only the one division rounds: results are compared bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ring_reduce as rr
from ring_reduce.normalization import Normalization

IN, OUT = 7, 3
SIZES = [5, 3, 1, 4]  # unequal, and their sum is no power of two
GROUPS = [[5, 5, 5], [5, 3, 1, 4], [7], [2, 0, 3]]


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Linear(IN, OUT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape).float())
    return model.to(dtype)


def batch(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-2, 3, (size, IN)).to(dtype)


def summed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is of small integers."""
    weights = torch.arange(1, OUT + 1).to(x.dtype)
    loss: torch.Tensor = (model(x) * weights).sum()
    return loss


def gradient_of_one_batch(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """In float64: the gradient of the summed loss over all samples."""
    wide = linear().double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    if any(len(x) for x in batches):
        summed(wide, torch.cat(batches).double()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in wide.parameters()]


def grads(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


def accumulate(
    accumulator: rr.Accumulator,
    model: nn.Module,
    batches: list[torch.Tensor],
    loss: Callable[[torch.Tensor], Any],
) -> None:
    with accumulator:
        for x in batches:
            if len(x):
                loss(x).backward()
            accumulator.add(count=len(x) if accumulator.normalization.uses_count else None)


# What each normalization wants of a micro-batch, in units of its summed loss, and what divides the sum of a group.
# MEAN is right for equal micro-batches only. Weights and means are exact for sizes that are powers of two.
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("normalization", [rr.SUM, rr.divide_by(11), rr.DIVIDE_BY_COUNT], ids=repr)
def test_sums_to_the_bit(normalization: Normalization, sizes: list[int]) -> None:
    torch.manual_seed(len(sizes))
    model, batches = linear(), [batch(size) for size in sizes]
    accumulator = rr.Accumulator(model, normalization)
    for _ in range(2):  # the second group meets what the first one left
        accumulate(accumulator, model, batches, lambda x: summed(model, x))
        divisor = {"SUM": 1, "divide_by(11)": 11, "DIVIDE_BY_COUNT": sum(sizes)}[repr(normalization)]
        for gradient, right in zip(grads(model), gradient_of_one_batch(model, batches), strict=True):
            assert torch.equal(gradient, right.float() / divisor)
        count = sum(sizes) if normalization.uses_count else 0
        assert accumulator.last == rr.Reduction(count, divisor, (1 / divisor,))


@pytest.mark.parametrize("sizes", [[4, 4, 4], [8, 2, 1, 4], [2, 0, 4]], ids=str)
def test_means_weighted_by_their_counts(sizes: list[int]) -> None:
    torch.manual_seed(1)
    model, batches = linear(), [batch(size) for size in sizes]
    accumulator = rr.Accumulator(model.parameters(), rr.WEIGHTED_MEAN)
    accumulate(accumulator, model, batches, lambda x: summed(model, x) / len(x))
    for gradient, right in zip(grads(model), gradient_of_one_batch(model, batches), strict=True):
        assert torch.equal(gradient, right.float() / sum(sizes))


def test_mean_divides_by_the_micro_batches_that_there_were() -> None:
    model = linear()
    accumulator = rr.Accumulator(model, rr.MEAN)
    for number in (4, 4, 3):  # the last group is short
        batches = [batch(4) for _ in range(number)]
        accumulate(accumulator, model, batches, lambda x: summed(model, x) / 4)
        for gradient, right in zip(grads(model), gradient_of_one_batch(model, batches), strict=True):
            assert torch.equal(gradient, (right / 4).float() / number)
        assert accumulator.last == rr.Reduction(0.0, number, (1 / number,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_wider_than_16_bits(dtype: torch.dtype) -> None:
    """1000 times 1 and then 2048: in float16 and bfloat16 sums of so many ones stand still."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT)
    with accumulator:
        for value in [2048.0] + [1.0] * 1000:
            model.weight.grad = torch.full((1, 1), value, dtype=dtype)
            accumulator.add(count=1)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == dtype
    assert model.weight.grad.item() == torch.tensor(3048 / 1001, dtype=dtype).item()


def test_parameters_of_several_types() -> None:
    model = nn.ModuleList(
        [nn.Linear(2, 2).to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    )
    accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT)
    with accumulator:
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 2)
            accumulator.add(count=1)
    assert all(torch.equal(gradient, torch.full_like(gradient, 2)) for gradient in grads(model))


def test_a_count_of_zero_leaves_out_even_nan() -> None:
    for normalization in (rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN):
        model = linear()
        accumulator = rr.Accumulator(model, normalization)
        with accumulator:
            for value, count in [(math.nan, 0), (3.0, 1), (math.nan, 0)]:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, value)
                accumulator.add(count=count)
        assert all(torch.equal(gradient, torch.full_like(gradient, 3)) for gradient in grads(model))
        with accumulator:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
            accumulator.add(count=0)
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in grads(model))
        assert accumulator.last == rr.Reduction(0.0, 0.0, (0.0,))


def test_nan_of_what_counts_passes() -> None:
    model: Any = linear()
    with rr.Accumulator(model, rr.DIVIDE_BY_COUNT) as accumulator:
        summed(model, batch(3)).backward()
        assert model.bias.grad is not None
        model.bias.grad[1] = math.nan
        accumulator.add(count=3)
    assert model.bias.grad.isnan().tolist() == [False, True, False]


def test_parameters_without_a_gradient() -> None:
    model: Any = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    model[2].requires_grad_(False)
    accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT)
    for used in (1, 0):  # what one group left in the sums is not in the next
        with accumulator:
            model[used](torch.ones(1, 2)).sum().backward()
            accumulator.add(count=1)
            accumulator.add(count=1)
        assert torch.equal(model[used].bias.grad, torch.full((2,), 0.5))
        assert model[1 - used].bias.grad is None
        assert model[2].bias.grad is None


def test_a_count_that_is_known_at_the_end() -> None:
    model, x = linear(), batch(6)
    accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT)
    with accumulator:
        for part in x.split(2):
            summed(model, part).backward()
            accumulator.add()
        accumulator.add_count(torch.tensor(5))
    for gradient, right in zip(grads(model), gradient_of_one_batch(model, [x]), strict=True):
        assert torch.equal(gradient, right.float() / 5)


def test_a_loop_without_with() -> None:
    torch.manual_seed(2)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT)
    batches = [batch(size) for size in (3, 4, 5, 6, 7)]
    for index, x in enumerate(batches):
        summed(model, x).backward()
        accumulator.add(count=len(x))
        if index % 2 == 1 or index == len(batches) - 1:
            accumulator.reduce()
            assert accumulator.last is not None
            assert accumulator.last.total_count == [None, 7, None, 11, 7][index]
            group = batches[index - index % 2 : index + 1] if index % 2 else [x]
            for gradient, right in zip(grads(model), gradient_of_one_batch(model, group), strict=True):
                assert torch.equal(gradient, right.float() / sum(map(len, group)))
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_that_are_views_transposed_or_kept() -> None:
    model = nn.Linear(3, 4, bias=False)
    accumulator = rr.Accumulator(model, rr.divide_by(2))
    x = torch.arange(12.0).view(3, 4)
    kept = torch.zeros(4, 3)
    with accumulator:
        model.weight.grad = x.t()
        accumulator.add()
        model.weight.grad = kept
        accumulator.add()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, x.t() / 2)
    assert torch.equal(kept, torch.zeros(4, 3)), "a gradient that was added is not written to"
    with accumulator:
        model.weight.grad = torch.tensor(2.0).expand(4, 3)  # one number, as the backward of a sum gives
        accumulator.add()
        model.weight.grad = torch.tensor([[3j]]).conj().imag.expand(4, 3)  # -3, negated when it is read
        accumulator.add()
    assert torch.equal(model.weight.grad, torch.full((4, 3), -0.5))


def test_clipping_sees_the_divided_gradient() -> None:
    model = nn.Linear(2, 2, bias=False)
    with rr.Accumulator(model, rr.DIVIDE_BY_COUNT) as accumulator:
        for _ in range(4):
            model.weight.grad = torch.full((2, 2), 8.0)
            accumulator.add(count=4)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0).item() == 4.0  # 2 in each of 4 elements


def one_group(accumulator: rr.Accumulator, model: Any, value: float) -> None:
    with accumulator:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        accumulator.add()


@pytest.mark.parametrize("keep", ["gradient", "graph"])
def test_a_gradient_that_is_kept_stays(keep: str) -> None:
    model: Any = nn.Linear(2, 2, bias=False)
    accumulator = rr.Accumulator(model, rr.SUM)
    one_group(accumulator, model, 3)
    kept = model.weight.grad
    x = torch.ones(2, 2, requires_grad=True)
    loss = (x * kept).sum() if keep == "graph" else None
    if keep == "graph":
        del kept
    one_group(accumulator, model, 5)
    assert model.weight.grad.tolist() == [[5, 5], [5, 5]]
    if loss is not None:
        loss.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[3, 3], [3, 3]]
    else:
        assert kept.tolist() == [[3, 3], [3, 3]]


def test_sums_are_used_again_if_nothing_is_kept() -> None:
    model: Any = nn.Linear(2, 2, bias=False)
    accumulator = rr.Accumulator(model, rr.SUM)
    addresses = set()
    for value in range(5):
        one_group(accumulator, model, value)
        addresses.add(model.weight.grad.data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_strides_of_their_parameters(dtype: torch.dtype) -> None:
    """Fused optimizers read the memory of both side by side."""
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last).to(dtype)  # type: ignore[call-overload]
    transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t().to(dtype))
    parameters = [*convolution.parameters(), transposed]
    values = [torch.randn(p.shape, dtype=torch.float32).to(dtype) for p in parameters]
    accumulator = rr.Accumulator(parameters, rr.divide_by(2))
    with accumulator:
        for _ in range(2):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = value
            accumulator.add()
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("counts", [[2**24, 1], [70_000, 3], [2**52, 1]], ids=str)
def test_counts_that_the_gradients_type_does_not_hold(dtype: torch.dtype, counts: list[int]) -> None:
    """float16 ends at 65504, and float32 has no 2**24 + 1."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    with rr.Accumulator(model, rr.DIVIDE_BY_COUNT) as accumulator:
        for count in counts:
            model.weight.grad = torch.full_like(model.weight, 3)
            accumulator.add(count=torch.tensor(count))
    assert accumulator.last is not None
    assert accumulator.last.total_count == sum(counts)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == torch.tensor(6 / sum(counts), dtype=dtype).item()
