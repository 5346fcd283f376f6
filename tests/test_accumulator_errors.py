"""What an accumulator refuses, and that it can go on after it."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ring_reduce as rr


def model_with_gradient() -> nn.Linear:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model


@pytest.mark.parametrize("count", [-1, math.nan, math.inf, "3", True, torch.ones(2), 2**54])
@pytest.mark.parametrize("normalization", [rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN], ids=repr)
def test_counts_that_are_none(normalization: Any, count: Any) -> None:
    accumulator = rr.Accumulator(model_with_gradient(), normalization)
    with pytest.raises(rr.CountError, match="count is"):
        accumulator.add(count=count)


@pytest.mark.parametrize("normalization", [rr.SUM, rr.MEAN, rr.divide_by(3)], ids=repr)
def test_a_count_that_is_not_used(normalization: Any) -> None:
    accumulator = rr.Accumulator(model_with_gradient(), normalization)
    with pytest.raises(rr.CountError, match="does not use count=3; DIVIDE_BY_COUNT and WEIGHTED_MEAN do"):
        accumulator.add(count=3)
    with pytest.raises(rr.CountError, match="takes no count afterwards"):
        accumulator.add_count(3)


def test_a_count_that_is_missing() -> None:
    model = model_with_gradient()
    accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT)
    accumulator.add()
    with pytest.raises(rr.CountError, match="1 micro-batches under DIVIDE_BY_COUNT have no count"):
        accumulator.reduce()
    accumulator.add_count(2)
    accumulator.reduce()
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [0.5, 0.5], "nothing was lost"
    with pytest.raises(rr.CountError, match="WEIGHTED_MEAN divides by counts: pass count="):
        rr.Accumulator(model_with_gradient(), rr.WEIGHTED_MEAN).add()
    with pytest.raises(rr.CountError, match="WEIGHTED_MEAN takes no count afterwards"):
        rr.Accumulator(model_with_gradient(), rr.WEIGHTED_MEAN).add_count(3)


def test_gradients_that_were_not_zeroed() -> None:
    model = model_with_gradient()
    accumulator = rr.Accumulator(model, rr.SUM)
    accumulator.add()
    accumulator.reduce()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="were not set to None, and this micro-batch was added to them"):
        accumulator.add()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    accumulator.add()
    accumulator.reduce()
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [1, 1]


def test_a_gradient_that_was_not_added() -> None:
    """It would be lost, and in an empty group the result would be zeros."""
    model = model_with_gradient()
    accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT)
    text = r"a gradient was not added \({} micro-batches were\): call accumulator.add\(\) after each backward"
    with pytest.raises(RuntimeError, match=text.format(0)), accumulator:
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=text.format(1)):
        add_one_of_two(model, accumulator)
    accumulator.reset()
    accumulator.add(count=1)
    accumulator.reduce()
    assert accumulator.last is not None


def add_one_of_two(model: nn.Module, accumulator: rr.Accumulator) -> None:
    with accumulator:
        model(torch.ones(1, 2)).sum().backward()
        accumulator.add(count=1)
        model(torch.ones(1, 2)).sum().backward()


def test_with_reduces_by_itself() -> None:
    accumulator = rr.Accumulator(model_with_gradient(), rr.SUM)
    with accumulator:
        with pytest.raises(RuntimeError, match="reduces when it is left; leave reduce\\(\\) out"):
            accumulator.reduce()
        with pytest.raises(RuntimeError, match="inside itself"):
            accumulator.__enter__()
    accumulator.reduce()


def test_a_total_that_float32_does_not_hold() -> None:
    with pytest.raises(ValueError, match=r"divide_by\(1e-40\) on float32: it is divided in float32"):
        rr.Accumulator(nn.Linear(2, 2), rr.divide_by(1e-40))
    rr.Accumulator(nn.Linear(2, 2).double(), rr.divide_by(1e-40))


def test_a_group_that_is_given_up() -> None:
    model = model_with_gradient()
    accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT)
    with contextlib.suppress(ZeroDivisionError), accumulator:
        model(torch.ones(1, 2)).sum().backward()
        accumulator.add(count=5)
        raise ZeroDivisionError
    assert accumulator.last is None
    accumulator.add(count=7)
    accumulator.reset()
    with accumulator:
        model(torch.ones(1, 2)).sum().backward()
        accumulator.add(count=2)
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [0.5, 0.5]


def test_what_can_not_be_accumulated() -> None:
    with pytest.raises(TypeError, match="takes a module or its parameters, not a str"):
        rr.Accumulator("model", rr.SUM)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs at least one parameter that requires a gradient"):
        rr.Accumulator(nn.Linear(2, 2).requires_grad_(False), rr.SUM)
    with pytest.raises(TypeError, match="normalization is 'sum'; use one of ring_reduce"):
        rr.Accumulator(nn.Linear(2, 2), "sum")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="a parameter is on meta; an accumulator takes those on the CPU and on CUDA"
    ):
        rr.Accumulator(nn.Linear(2, 2, device="meta"), rr.SUM)
    ring: Any = SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(TypeError, match="a parameter is on cpu, and this ring's tensors lie on cuda:1; make"):
        rr.Accumulator(nn.Linear(2, 2), rr.SUM, ring=ring)
    embedding = nn.Embedding(4, 2, sparse=True)
    accumulator = rr.Accumulator(embedding, rr.SUM)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"a gradient is torch.sparse_coo"):
        accumulator.add()


def test_a_parameter_that_is_shared_is_added_once() -> None:
    model = nn.Linear(2, 2, bias=False)
    accumulator = rr.Accumulator([*model.parameters(), *model.parameters()], rr.SUM)
    model(torch.ones(1, 2)).sum().backward()
    accumulator.add()
    accumulator.reduce()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1, 1], [1, 1]]


def test_a_parameter_that_has_changed() -> None:
    """The core trusts type and size of a gradient."""
    for change in (lambda p: p.data.double(), lambda p: torch.zeros(9), lambda p: torch.zeros(4)):
        model = nn.Linear(2, 2, bias=False)
        accumulator = rr.Accumulator(model, rr.SUM)
        model.weight.data = change(model.weight)
        model.weight.grad = torch.ones_like(model.weight)
        with pytest.raises(RuntimeError, match="the parameter has changed since the accumulator was made"):
            accumulator.add()


def test_a_parameter_that_was_unfrozen() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    accumulator = rr.Accumulator(model, rr.SUM)
    model.weight.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="make a new accumulator after unfreezing"):
        accumulator.add()


def test_a_parameter_that_is_new() -> None:
    model = nn.Linear(2, 2)
    accumulator = rr.Accumulator(model, rr.SUM)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="parameters that it did not have when the accumulator was made"):
        accumulator.reduce()


def test_counts_of_some_micro_batches_only() -> None:
    accumulator = rr.Accumulator(model_with_gradient(), rr.DIVIDE_BY_COUNT)
    accumulator.add(count=3)
    accumulator.add()
    with pytest.raises(rr.CountError, match="1 micro-batches under DIVIDE_BY_COUNT have no count"):
        accumulator.reduce()


def test_reset_drops_a_gradient_that_was_not_added() -> None:
    model = model_with_gradient()
    accumulator = rr.Accumulator(model, rr.SUM)
    accumulator.reset()
    assert model.bias.grad is None


def test_an_accumulator_is_not_copied() -> None:
    accumulator = rr.Accumulator(nn.Linear(2, 2), rr.SUM)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make a new one for the copy of the model"):
            duplicate(accumulator)


def test_parameters_of_other_kinds() -> None:
    eighth = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(
        TypeError, match=r"a parameter is torch.float8_e4m3fn; an accumulator takes float64, float32"
    ):
        rr.Accumulator([eighth], rr.SUM)
