"""What a diagnosis says where no factor and no weighting describes the gradient, and what it takes for rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from diagnosis_cases import (
    BFLOAT16,
    FLOAT32,
    bfloat16,
    exact,
    float32_noise,
    measured_of,
    random_parts,
    sizes_of,
)
from ring_reduce.verification.diagnosis import Verdict, diagnose
from ring_reduce.verification.measured import Vector

UNEVEN = sizes_of([[3, 5, 2], [4, 1, 6]])
PARTS = random_parts(UNEVEN, 40)  # of parameters p0, 27 elements, and p1, 13
P1 = slice(27, 40)
RIGHT = PARTS.sum(axis=0) / 21


def changed(values: Vector, where: slice, factor: float) -> Vector:
    result: Vector = values.copy()
    result[..., where] *= factor
    return result


# Rounding


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rounding", ["float32", "bfloat16"])
def test_rounding_is_right(seed: int, rounding: str) -> None:
    parts = random_parts(UNEVEN, 300, seed)
    how, tolerance = (float32_noise, FLOAT32) if rounding == "float32" else (bfloat16, BFLOAT16)
    found = diagnose(
        measured_of(UNEVEN, parts.sum(axis=0) / 21, parts=parts, rounding=how, tolerance=tolerance)
    )
    assert found.verdict is Verdict.RIGHT
    assert tolerance / 1000 < found.difference < tolerance


@pytest.mark.parametrize(("tolerance", "right"), [(FLOAT32, None), (BFLOAT16, True)])
def test_the_tolerance_is_that_of_the_type(tolerance: float, right: bool | None) -> None:
    """Noise of bfloat16 in float32 looks like autocast."""
    measured = measured_of(UNEVEN, RIGHT, parts=PARTS, rounding=bfloat16, tolerance=tolerance)
    assert diagnose(measured).right is right


def test_one_wrong_element_is_wrong() -> None:
    for element in (0, 26, 39):
        gradient = changed(RIGHT, slice(element, element + 1), 1.01)
        found = diagnose(measured_of(UNEVEN, gradient, parts=PARTS))
        assert (found.verdict, found.right) == (Verdict.UNKNOWN, False)
        wrong = "p0" if element < 27 else "p1"
        assert f"wrong for {wrong}, and right for the others" in found.text
        assert {line.name: line.verdict for line in found.parameters}[wrong] is Verdict.UNKNOWN


def test_what_cancels_between_micro_batches_is_no_alarm() -> None:
    """Rank 1's part is minus rank 0's but for a millionth: the noise of both is as large as what is left."""
    sizes, one = sizes_of([[3], [4]]), random_parts(sizes_of([[3]]), 40)[0]
    parts = np.array([1e3 * one, -1e3 * one + random_parts(sizes_of([[1]]), 40, seed=2)[0]])
    noisy = np.array([float32_noise(part, 5 + index) for index, part in enumerate(parts)]).sum(axis=0) / 7
    right = parts.sum(axis=0) / 7
    assert np.max(np.abs(noisy / right - 1)) > 3 * FLOAT32
    assert diagnose(measured_of(sizes, noisy, parts=parts)).verdict is Verdict.RIGHT
    assert diagnose(measured_of(sizes, 2 * noisy, parts=parts)).names == ("n (n = 2)",)


@pytest.mark.parametrize("size", [1e-7, 1e-5])
def test_what_cancels_within_a_micro_batch_is_no_alarm(size: float) -> None:
    """The gradient of a bias that the softmax ignores is noise: another one on each way to it."""
    noise = np.random.default_rng(6).normal(size=(3, 13)) * size
    parts, gradient, whole = PARTS.copy(), RIGHT.copy(), RIGHT.copy()
    parts[:, P1], gradient[P1], whole[P1] = noise[0] / 6, noise[1], noise[2]
    assert diagnose(measured_of(UNEVEN, gradient, parts=parts, whole=whole)).verdict is Verdict.RIGHT
    gradient[P1] *= 100 * FLOAT32 / size
    assert diagnose(measured_of(UNEVEN, gradient, parts=parts, whole=whole)).verdict is not Verdict.RIGHT


def test_a_factor_within_the_tolerance_of_one_is_right_and_said() -> None:
    """Off by 0.9 tolerances everywhere and by 1.9 or 2.5 in one element: the bound of one part is 2."""
    sizes = sizes_of([[6]])
    parts = random_parts(sizes, 40)
    gradient = changed(parts[0] / 6 * (1 + 0.9 * FLOAT32), slice(5, 6), 1 + FLOAT32)
    found = diagnose(measured_of(sizes, gradient, parts=parts, rounding=exact))
    assert found.verdict is Verdict.RIGHT
    assert any("fits better than 1" in note for note in found.notes)
    gradient = changed(gradient, slice(5, 6), 1 + 0.6 * FLOAT32)
    assert diagnose(measured_of(sizes, gradient, parts=parts, rounding=exact)).right is False


def test_a_small_parameter_is_not_taken_for_noise() -> None:
    """A thousandth of the others, and twice what is right."""
    parts = changed(PARTS, P1, 1e-3)
    found = diagnose(measured_of(UNEVEN, changed(parts.sum(axis=0) / 21, P1, 2.0), parts=parts))
    assert found.verdict is Verdict.PER_PARAMETER


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_no_scale_of_the_loss_matters(scale: float) -> None:
    found = diagnose(measured_of(UNEVEN, scale * RIGHT / 2, parts=scale * PARTS))
    assert found.names == ("1/n (n = 2)",)
    weighted = diagnose(measured_of(UNEVEN, weight=lambda r, i: (0.3, 0.4)[r], parts=scale * PARTS))
    assert weighted.verdict is Verdict.WEIGHTING
    assert "0.3 and 0.4" in weighted.text


# Parameters


def test_a_factor_for_each_parameter() -> None:
    found = diagnose(measured_of(UNEVEN, changed(RIGHT, P1, 2.0), parts=PARTS))
    assert (found.verdict, found.right, found.factor, found.names) == (Verdict.PER_PARAMETER, False, None, ())
    assert "no single factor, but one for each parameter: 1 for p0; 2 = n (n = 2) for p1;" in found.text
    assert [(line.verdict, round(line.factor or 0, 3)) for line in found.parameters] == [
        (Verdict.RIGHT, 1.0),
        (Verdict.FACTOR, 2.0),
    ]


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(2.0, Verdict.PER_PARAMETER), (1 / 3, Verdict.PER_PARAMETER), (1.7, Verdict.UNKNOWN)],
)
def test_a_parameter_of_one_element_needs_a_name(factor: float, verdict: Verdict) -> None:
    """Any number is a factor of any other, so 1.7 is no evidence, and n is."""
    gradient = changed(RIGHT, slice(0, 1), factor)
    assert diagnose(measured_of(UNEVEN, gradient, parts=PARTS, parameters=[1, 39])).verdict is verdict


def test_a_parameter_whose_reference_is_zero_has_no_factor() -> None:
    """So it has to be right, or the others' factors are not all that is wrong."""
    lengths, parts = [20, 10, 10], changed(PARTS, slice(30, 40), 0.0)
    gradient = changed(parts.sum(axis=0) / 21, slice(20, 30), 2.0)
    assert (
        diagnose(measured_of(UNEVEN, gradient, parts=parts, parameters=lengths)).verdict
        is Verdict.PER_PARAMETER
    )
    gradient[35] = 1.0
    assert diagnose(measured_of(UNEVEN, gradient, parts=parts, parameters=lengths)).verdict is Verdict.UNKNOWN


def test_a_parameter_without_a_gradient_on_one_rank() -> None:
    gradient = np.array([RIGHT, RIGHT])
    gradient[1, P1] = 0
    found = diagnose(measured_of(UNEVEN, gradient, parts=PARTS, missing=((), ("p1",))))
    assert (found.verdict, found.right) == (Verdict.MISSING, False)
    assert "no gradient on rank 1 for p1, so the ranks drift apart" in found.text
    assert "p0" not in found.text
    assert "find_unused_parameters" in found.remedy
    assert [line.verdict for line in found.parameters] == [Verdict.RIGHT, Verdict.MISSING]


def test_a_parameter_without_a_gradient_on_any_rank() -> None:
    found = diagnose(measured_of(UNEVEN, changed(RIGHT, P1, 0.0), parts=PARTS, missing=(("p1",),) * 2))
    assert (found.verdict, found.right) == (Verdict.MISSING, False)
    assert "no rank has a gradient for p1, and the reference does" in found.text


def test_a_parameter_that_nothing_uses_is_no_loss() -> None:
    parts = changed(PARTS, P1, 0.0)
    found = diagnose(measured_of(UNEVEN, parts.sum(axis=0) / 21, parts=parts, missing=(("p1",),) * 2))
    assert found.verdict is Verdict.RIGHT


# What is no number, and what is zero


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_what_is_not_finite_is_named_and_never_right(value: float, factor: float) -> None:
    gradient = np.array([RIGHT, RIGHT]) * factor
    gradient[1, 30] = value
    found = diagnose(measured_of(UNEVEN, gradient, parts=PARTS))
    assert (found.verdict, found.right, found.factor) == (Verdict.NOT_FINITE, False, None)
    assert found.text.startswith("gradient is NaN or infinite on rank 1: p1;")
    assert "rank 0" not in found.text
    assert "p0" not in found.text
    assert found.difference == math.inf
    assert [line.verdict for line in found.parameters] == [
        Verdict.RIGHT if factor == 1 else Verdict.FACTOR,
        Verdict.NOT_FINITE,
    ]


def test_a_reference_that_is_not_finite_tells_nothing() -> None:
    measured = measured_of(UNEVEN, RIGHT, parts=PARTS)
    measured.whole[0] = math.nan
    found = diagnose(measured)
    assert (found.verdict, found.right) == (Verdict.NOT_FINITE, None)
    assert "in the reference: p0;" in found.text


def test_a_mean_over_nothing_is_explained() -> None:
    sizes = sizes_of([[3, 2], [1, 0]], samples=[[1, 1], [1, 1]])
    found = diagnose(measured_of(sizes, np.full(40, math.nan)))
    assert any("0/0" in note for note in found.notes)
    assert not diagnose(measured_of(UNEVEN, np.full(40, math.nan))).notes


@pytest.mark.parametrize("gradient", [0 * RIGHT, RIGHT])
def test_a_reference_of_zeros_tells_nothing(gradient: Vector) -> None:
    found = diagnose(measured_of(UNEVEN, gradient, parts=0 * PARTS))
    assert (found.verdict, found.right, found.factor) == (Verdict.ZERO, None, None)
    assert found.text.startswith("the reference gradient is zero, so no factor can be told")
    assert ("another loss" in found.text) == bool(gradient.any())
    assert [line.verdict for line in found.parameters] == [Verdict.ZERO, Verdict.ZERO]


def test_a_reference_that_cancels() -> None:
    """Twice nothing is nothing, but a mean of means does not cancel."""
    sizes = sizes_of([[5], [1]], samples=[[1], [1]])
    parts = np.array([PARTS[0], -PARTS[0]])
    assert diagnose(measured_of(sizes, 0 * RIGHT, parts=parts, rounding=exact)).verdict is Verdict.ZERO
    found = diagnose(measured_of(sizes, parts[0] * 0.1 + parts[1] * 0.5, parts=parts, rounding=exact))
    assert found.verdict is Verdict.WEIGHTING
    assert "0.1 and 0.5" in found.text


def test_what_rounding_leaves_of_zero_has_no_factor() -> None:
    """-0.4 is a number of times 1e-7 too, with one element."""
    sizes, parts = sizes_of([[5], [1]], samples=[[1], [1]]), np.array([[1.0], [-1.0 + 6e-7]])
    found = diagnose(measured_of(sizes, parts[0] * 0.1 + parts[1] * 0.5, parts=parts, rounding=exact))
    assert found.verdict is Verdict.WEIGHTING


# Batches whose samples act on each other


OTHER = RIGHT + np.random.default_rng(3).normal(size=40)  # of the whole batch
NORM = ("norm1 (BatchNorm2d)",)


@pytest.mark.parametrize(
    ("gradient", "factor", "says"),
    [
        (RIGHT, 1.0, "right for the micro-batches by themselves, not for the whole batch"),
        (RIGHT / 2, 0.5, "for the micro-batches by themselves the gradient is 0.5 = 1/n (n = 2): "),
        (RIGHT + 1, None, "neither the whole batch nor the micro-batches by themselves give the gradient"),
    ],
)
def test_batch_norm_is_no_factor(gradient: Vector, factor: float | None, says: str) -> None:
    found = diagnose(measured_of(UNEVEN, gradient, parts=PARTS, whole=OTHER, suspects=NORM))
    assert (found.verdict, found.right) == (Verdict.BATCH_DEPENDENT, False)
    assert found.factor == (None if factor is None else pytest.approx(factor, rel=1e-5))
    begin = "no single factor: look for something that depends on the batch inside the forward pass: "
    assert found.text.startswith(f"{begin}norm1 (BatchNorm2d); ")
    assert says in found.text
    assert "weight" not in found.text
    assert all(line.verdict is Verdict.BATCH_DEPENDENT for line in found.parameters)


def test_batch_norm_with_one_element() -> None:
    """1.27 times the whole batch's is no factor that anybody would know, and 1 times the parts' is."""
    found = diagnose(measured_of(UNEVEN, RIGHT[:1], parts=PARTS[:, :1], whole=RIGHT[:1] / 1.27))
    assert (found.verdict, found.factor) == (Verdict.BATCH_DEPENDENT, 1.0)


def test_batch_norm_and_a_weighting() -> None:
    found = diagnose(
        measured_of(UNEVEN, weight=lambda r, i: 1 / (6 * UNEVEN.counts[r][i]), parts=PARTS, whole=OTHER)
    )
    assert found.verdict is Verdict.BATCH_DEPENDENT
    assert (
        "forward pass (batch norm, in-batch negatives); the micro-batches by themselves are not weighted"
        in found.text
    )
    assert "the mean of the micro-batches' means, 1/(n N c)" in found.text
    assert found.weights is not None


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.RIGHT), (2.0, Verdict.FACTOR)])
def test_a_step_that_allows_for_batch_norm(factor: float, verdict: Verdict) -> None:
    """Synchronized statistics: the whole batch's gradient, which the micro-batches alone do not give."""
    found = diagnose(measured_of(UNEVEN, factor * OTHER, parts=PARTS, whole=OTHER, suspects=NORM))
    assert found.verdict is verdict
    assert any("by themselves give another gradient than as one batch (norm1" in note for note in found.notes)
    assert "forward pass" not in found.text


def test_what_fits_nothing_is_unknown() -> None:
    measured = measured_of(UNEVEN, RIGHT + 1, parts=PARTS)
    found = diagnose(measured)
    assert (found.verdict, found.right, found.factor, found.weights) == (Verdict.UNKNOWN, False, None, None)
    assert "it is no factor, and no weighting of the micro-batches" in found.text
    assert "depends on the batch" not in found.text
    assert "norm1 (BatchNorm2d)" in diagnose(replace(measured, suspects=NORM)).text
