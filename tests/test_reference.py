"""The reference itself: against torch, against plain sums, and that its bound is tight enough to refuse a mistake."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
import ring_reduce as rr
from cases import Case, from_tensor, to_tensor
from reference import FLOATS, TYPES

NORMALIZATIONS = [rr.SUM, rr.MEAN, rr.divide_by(7), rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN]
COUNTS = (5.0, 0.0, 3.0, 4.0)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
        assert reference.same_bits(reference.round_to_bfloat16(values), expected)


@pytest.mark.parametrize("name", TYPES)
def test_values_survive_the_way_to_a_tensor_and_back(name: str) -> None:
    x = Case(name, 1000).input(0)
    assert reference.same_bits(from_tensor(to_tensor(x, TYPES[name]), TYPES[name]), x)


@pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=repr)
@pytest.mark.parametrize("name", FLOATS)
def test_the_reference_is_within_its_bound_and_mistakes_are_not(name: str, normalization: object) -> None:
    assert isinstance(normalization, rr.Normalization)
    element = TYPES[name]
    # Of like magnitude, so that none can hide in the rounding of the others.
    inputs = [element.store(1 + np.abs(x) / (1 + np.abs(x))) for x in Case(name, 5000, seed=3).inputs(4)]
    got = reference.all_reduce(inputs, element, normalization, COUNTS)
    true = reference.true_result(inputs, normalization, COUNTS)
    bound = reference.error_bound(inputs, element, normalization, COUNTS)
    assert (np.abs(got - true) <= bound).all()
    largest = np.max(np.abs(got - true) / bound)
    assert largest > 0.1  # the bound is no wider than ten times what happens
    factor = 1 + 8 * 4 * element.unit
    assert (np.abs(got * factor - true) > bound).any()
    missing = reference.all_reduce([*inputs[:3], 0 * inputs[3]], element, normalization, COUNTS)
    assert (np.abs(missing - true) > bound).all()


def test_same_bits_tells_what_equality_does_not() -> None:
    zero, nan = np.zeros(1), np.full(1, np.nan)
    assert not reference.same_bits(zero, -zero)
    assert reference.same_bits(nan, -nan)
    assert not reference.same_bits(nan, zero)
    assert not reference.same_bits(zero, zero.astype(np.float32))


@pytest.mark.parametrize(
    ("k", "exponent"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (0.3, -1), (2.0**60, 60)]
)
def test_exponent_above(k: float, exponent: int) -> None:
    assert reference.exponent_above(k) == exponent
