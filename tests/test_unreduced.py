"""Ranks that step with different gradients."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis_cases import equal, float32_noise, measured_of, random_parts, sizes_of
from ring_reduce.verification.diagnosis import Verdict, diagnose
from ring_reduce.verification.measured import Vector

UNEVEN = sizes_of([[3, 5, 2], [4, 1, 6]])
PARTS = random_parts(UNEVEN, 40)  # of parameters p0, 27 elements, and p1, 13
P1 = slice(27, 40)
RIGHT = PARTS.sum(axis=0) / 21
OWN = np.array([PARTS[:3].sum(axis=0), PARTS[3:].sum(axis=0)])
COUNTS = np.array([[10], [11]])


@pytest.mark.parametrize(
    ("own", "says", "repair"),
    [
        (
            OWN / COUNTS,
            "each has its own mean (weight 1/C_r)",
            "WEIGHTED_MEAN with the ranks' counts would be right",
        ),
        (OWN, "each has its own sum (weight 1)", "reduce them: DIVIDE_BY_COUNT would be right"),
        (
            OWN / 21,
            "each has its own sum over the total count (weight 1/T)",
            "reduce them: SUM would be right",
        ),
        (
            np.array([PARTS[0] * 0.3 + PARTS[1], PARTS[3] * 0.2]),
            "each has a weighting of its own micro-batches",
            "reduce them over the ranks",
        ),
    ],
)
def test_ranks_that_were_not_reduced(own: Vector, says: str, repair: str) -> None:
    found = diagnose(measured_of(UNEVEN, own, parts=PARTS))
    assert (found.verdict, found.right, found.factor) == (Verdict.NOT_REDUCED, False, None)
    assert f"the ranks step with different gradients: {says}, and nothing was reduced" in found.text
    assert repair in found.remedy
    assert all(line.verdict is Verdict.NOT_REDUCED for line in found.parameters)


def test_equal_ranks_that_were_not_reduced_are_repaired_by_mean() -> None:
    sizes = equal(2, 3, 5)
    parts = random_parts(sizes, 40)
    own = np.array([parts[:3].sum(axis=0), parts[3:].sum(axis=0)]) / 15
    assert "MEAN or WEIGHTED_MEAN" in diagnose(measured_of(sizes, own, parts=parts)).remedy


def test_one_element_that_was_not_reduced() -> None:
    """A known mistake needs no more."""
    found = diagnose(measured_of(UNEVEN, OWN[:, :1] / COUNTS, parts=PARTS[:, :1]))
    assert found.verdict is Verdict.NOT_REDUCED
    assert "its own mean" in found.text


@pytest.mark.parametrize(
    ("own", "says", "repair"),
    [
        (OWN / COUNTS, "its own mean", "WEIGHTED_MEAN"),
        (OWN, "its own sum", ": DIVIDE_BY_COUNT would be right"),
    ],
)
def test_one_parameter_that_was_not_reduced(own: Vector, says: str, repair: str) -> None:
    """What the others have does not matter to it."""
    gradient = np.array([RIGHT, RIGHT])
    gradient[:, P1] = own[:, P1]
    found = diagnose(measured_of(UNEVEN, gradient, parts=PARTS))
    assert found.verdict is Verdict.NOT_REDUCED
    assert f"different gradients for p1: each has {says}" in found.text
    assert repair in found.remedy
    assert "whether DDP ignores these parameters" in found.remedy
    assert [line.verdict for line in found.parameters] == [Verdict.RIGHT, Verdict.NOT_REDUCED]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_was_not_reduced(rank: int) -> None:
    gradient = np.array([RIGHT, RIGHT])
    gradient[rank] = (OWN / COUNTS)[rank]
    found = diagnose(measured_of(UNEVEN, gradient, parts=PARTS))
    assert found.verdict is Verdict.NOT_REDUCED
    assert f"rank {rank} has its own micro-batches only, and the others do not" in found.text


def test_ranks_that_differ_in_what_is_not_theirs() -> None:
    """One scaled its gradient after the reduction; or they have nothing to do with the micro-batches."""
    noise = np.random.default_rng(3).normal(size=(2, 40))
    for own in (np.array([RIGHT, RIGHT / 2]), noise):
        found = diagnose(measured_of(UNEVEN, own, parts=PARTS))
        assert (found.verdict, found.right) == (Verdict.UNKNOWN, False)
        assert "own micro-batches do not explain it" in found.text


def test_ranks_that_differ_by_rounding_do_not_differ() -> None:
    gradient = np.array([RIGHT, float32_noise(RIGHT, 8)])
    assert diagnose(measured_of(UNEVEN, gradient, parts=PARTS)).verdict is Verdict.RIGHT
