"""Gradients whose counts do not weigh alike: known mistakes, fitted weights, and what cannot be told."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis_cases import (
    BFLOAT16,
    FLOAT32,
    Weight,
    bfloat16,
    exact,
    float32_noise,
    measured_of,
    random_parts,
    sizes_of,
)
from ring_reduce.verification.diagnosis import Diagnosis, Verdict, diagnose

T51 = sizes_of([[5], [1]], samples=[[1], [1]])  # two ranks with 5 and 1 tokens
UNEVEN = sizes_of([[3, 5, 2], [4, 1, 6]])
C, C_R = UNEVEN.counts, UNEVEN.rank_counts
WEIGHTINGS: dict[str, tuple[Weight, str, str]] = {
    "1/(n C_r)": (lambda r, i: 1 / (2 * C_R[r]), "the mean of the ranks' means", "WEIGHTED_MEAN"),
    "1/C_r": (lambda r, i: 1 / C_R[r], "the sum of the ranks' means", "WEIGHTED_MEAN"),
    "1/(n N c)": (lambda r, i: 1 / (6 * C[r][i]), "the mean of the micro-batches' means", "DIVIDE_BY_COUNT"),
    "1/(n c)": (
        lambda r, i: 1 / (2 * C[r][i]),
        "added up on each rank, and the mean over",
        "DIVIDE_BY_COUNT",
    ),
    "1/c": (lambda r, i: 1 / C[r][i], "the sum of the micro-batches' means", "DIVIDE_BY_COUNT"),
    "C_r/(T N c)": (
        lambda r, i: C_R[r] / (21 * 3 * C[r][i]),
        "the mean of each rank's micro-batches' means, and WEIGHTED_MEAN",
        "DIVIDE_BY_COUNT",
    ),
    "C_r/(T c)": (
        lambda r, i: C_R[r] / (21 * C[r][i]),
        "added up on each rank, and WEIGHTED_MEAN",
        "DIVIDE_BY_COUNT",
    ),
}


@pytest.mark.parametrize("formula", WEIGHTINGS)
@pytest.mark.parametrize("elements", [3, 40])
def test_known_weightings(formula: str, elements: int) -> None:
    """A known mistake leaves nothing to fit, so three elements are enough for six weights."""
    weight, words, remedy = WEIGHTINGS[formula]
    found = diagnose(measured_of(UNEVEN, weight=weight, elements=elements))
    assert (found.verdict, found.factor, found.right) == (Verdict.WEIGHTING, None, False)
    assert found.text.count(formula) == 1
    assert words in found.text
    assert remedy in found.remedy
    assert "over tokens" not in found.text
    assert not any(f", {other}" in found.text for other in WEIGHTINGS if other != formula)
    assert told(found, [[weight(r, i) for i in range(3)] for r in range(2)], rtol=1e-9)


def told(found: Diagnosis, weights: list[list[float]], rtol: float = 1e-4) -> bool:
    assert found.weights is not None
    return np.allclose(np.array(found.weights), np.array(weights), rtol=rtol, atol=1e-9)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([[0.0, 0.0, 1 / 21]] * 2, "all but the last micro-batch of each rank, so only the last one counts"),
        ([[0.0] * 3, [1 / 21] * 3], "left out (weight 0): rank 0;"),
        ([[1 / 21, 0.0, 1 / 21], [1 / 21] * 3], "left out (weight 0): micro-batch 1 of rank 0;"),
        ([[0.1] * 3, [0.3] * 3], "per-sample weights 0.1 and 0.3, right is 1/21;"),
        (
            [[0.1, 0.2, 0.3], [0.3, 0.1, 0.7]],
            "0.1, 0.2, 0.3 (rank 0) and 0.3, 0.1, 0.7 (rank 1), right is 1/21;",
        ),
        ([[0.05, 0.0005, 0.05], [0.05] * 3], "0.05, 0.0005, 0.05 (rank 0)"),
    ],
)
def test_other_weightings_are_fitted(weights: list[list[float]], says: str) -> None:
    """A small weight is not a weight of 0."""
    found = diagnose(measured_of(UNEVEN, weight=lambda r, i: weights[r][i]))
    assert found.verdict is Verdict.WEIGHTING
    assert told(found, weights)
    assert says in found.text
    assert ("left out" in found.text) == (0.0 in weights[0])
    assert "means" not in found.text


@pytest.mark.parametrize("left_out", [(0, 1), (1, 2)])
def test_a_micro_batch_that_is_left_out_in_bfloat16(left_out: tuple[int, int]) -> None:
    """Noise moves a weight of 0 off 0."""
    measured = measured_of(
        UNEVEN,
        weight=lambda r, i: 0.0 if (r, i) == left_out else 1 / 21,
        rounding=bfloat16,
        tolerance=BFLOAT16,
        elements=2000,
    )
    found = diagnose(measured)
    assert f"left out (weight 0): micro-batch {left_out[1]} of rank {left_out[0]};" in found.text


@pytest.mark.parametrize("by_rank", [True, False])
def test_what_counts_nothing_has_no_weight(by_rank: bool) -> None:
    """Nor is it left out."""
    sizes, weights = sizes_of([[3, 0, 2], [4, 1, 6]]), [[0.3, 9.0, 0.3 if by_rank else 0.7], [0.4] * 3]
    found = diagnose(measured_of(sizes, weight=lambda r, i: weights[r][i]))
    assert found.verdict is Verdict.WEIGHTING
    flat = [weight for of_rank in found.weights or () for weight in of_rank]
    assert [index for index, weight in enumerate(flat) if math.isnan(weight)] == [1]
    assert "left out" not in found.text
    assert ("0.3 and 0.4," if by_rank else "0.3, 0.7 (rank 0) and 0.4, 0.4, 0.4 (rank 1)") in found.text


def test_a_parameter_of_noise_hides_no_weighting() -> None:
    """The bias that the softmax ignores."""
    noise = np.random.default_rng(6).normal(size=(3, 13)) * 1e-6
    parts = random_parts(UNEVEN, 40)
    gradient = sum(part / (6 * count) for part, count in zip(parts, [3, 5, 2, 4, 1, 6], strict=True))
    whole = parts.sum(axis=0) / 21
    parts[:, 27:], gradient[27:], whole[27:] = noise[0] / 6, noise[1], noise[2]
    found = diagnose(measured_of(UNEVEN, gradient, parts=parts, whole=whole))
    assert found.verdict is Verdict.WEIGHTING
    assert "1/(n N c)" in found.text


def test_a_known_weighting_times_a_factor() -> None:
    found = diagnose(measured_of(T51, weight=lambda r, i: 1 / (4 * T51.counts[r][i])))
    assert found.verdict is Verdict.WEIGHTING
    assert "the mean of the ranks' means, 1/(n C_r), times 0.5 = 1/n (n = 2);" in found.text
    assert told(found, [[0.05], [0.25]])


def test_all_known_weightings_that_fit_are_named() -> None:
    """Ranks with equal counts: WEIGHTED_MEAN is MEAN then, and nothing here can tell them apart."""
    sizes = sizes_of([[2, 4], [3, 3]])
    found = diagnose(measured_of(sizes, weight=lambda r, i: 1 / (4 * sizes.counts[r][i])))
    assert "the mean of the micro-batches' means, 1/(n N c) or the mean of each rank's" in found.text
    assert "C_r/(T N c)" in found.text
    assert "1/(n C_r)" not in found.text


def test_what_cancels_in_a_weighting_is_no_alarm() -> None:
    """Means of 1000 and -1000: their mean is small, and as noisy as they are."""
    sizes, one = sizes_of([[3], [4]]), random_parts(sizes_of([[1]]), 40)[0]
    parts = np.array([3e3 * one, -4e3 * one + random_parts(sizes_of([[1]]), 40, seed=2)[0]])
    noisy = (float32_noise(parts[0], 5) / 3 + float32_noise(parts[1], 6) / 4) / 2
    assert np.max(np.abs(noisy / (parts[0] / 6 + parts[1] / 8) - 1)) > 3 * FLOAT32
    found = diagnose(measured_of(sizes, noisy, parts=parts, rounding=exact))
    assert found.verdict is Verdict.WEIGHTING
    assert "the mean of the ranks' means" in found.text


def test_a_weighting_comes_before_a_factor_for_each_parameter() -> None:
    """Each parameter with data on one rank only: both describe it."""
    parts = random_parts(T51, 40)
    parts[0, 27:] = parts[1, :27] = 0
    found = diagnose(measured_of(T51, weight=lambda r, i: (0.1, 0.5)[r], parts=parts))
    assert found.verdict is Verdict.WEIGHTING
    assert "per-token weights 0.1 and 0.5" in found.text


def test_samples_instead_of_tokens() -> None:
    sizes = sizes_of([[6, 1], [2, 4]], samples=[[1, 1], [3, 2]])
    found = diagnose(measured_of(sizes, weight=lambda r, i: [2, 5][r] / (7 * sizes.rank_counts[r])))
    assert "the ranks' means over tokens, weighted by samples, B_r/(B C_r)" in found.text
    assert found.remedy == "let the count be the tokens that are not ignored, not the samples"
    assert "the mean of the ranks' means" not in found.text


def test_a_short_group_of_unequal_ranks() -> None:
    """Ranks with 4 and 3 micro-batches: their means averaged is no factor, the planned number is one."""
    sizes = sizes_of([[4] * 4, [4] * 3], planned=4)
    means = diagnose(measured_of(sizes, weight=lambda r, i: 1 / (2 * sizes.rank_counts[r])))
    assert means.verdict is Verdict.WEIGHTING
    assert (
        "1/(n C_r) or the mean over the ranks of the mean of each one's micro-batches' means, 1/(n k_r c)"
        in means.text
    )
    planned = diagnose(measured_of(sizes, weight=lambda r, i: 1 / (2 * 4 * 4)))
    assert planned.names == ("K/(n N) = 7/8 (K = 7 micro-batches of n N = 8 planned)",)
    assert "or drop the remainder" in planned.remedy


def test_the_mean_of_what_ran_of_a_short_group() -> None:
    sizes = sizes_of([[2, 4, 1], [3, 5]])
    found = diagnose(measured_of(sizes, weight=lambda r, i: 1 / (5 * sizes.counts[r][i])))
    assert "the mean of all micro-batches' means, 1/(K c)" in found.text
    assert "1/(n N c)" not in found.text


@pytest.mark.parametrize(("elements", "verdict"), [(2, Verdict.UNKNOWN), (3, Verdict.WEIGHTING)])
def test_a_weighting_needs_more_elements_than_weights(elements: int, verdict: Verdict) -> None:
    """0.3 and 0.4 are no known mistake: two elements are fitted by any two weights."""
    found = diagnose(measured_of(T51, weight=lambda r, i: (0.3, 0.4)[r], elements=elements))
    assert (found.verdict, found.right) == (verdict, False)
    assert ("too few (2) to tell 2 weights" in found.text) == (elements == 2)


def test_alike_micro_batches_hide_their_weights() -> None:
    """Gradients that differ by less than rounding: no weight of each can be told."""
    sizes, random = sizes_of([[3], [4]]), np.random.default_rng(4)
    one = random.normal(size=40)
    parts = np.array([one, one * (1 + 2e-4 * random.normal(size=40))])
    gradient = parts[0] * 0.1 + one * 0.2 * (1 + 8e-4 * random.normal(size=40))
    found = diagnose(measured_of(sizes, gradient, parts=parts))
    assert found.verdict is Verdict.UNKNOWN
    assert "too much alike" in found.text


def test_one_element_tells_a_factor_and_no_weighting() -> None:
    """prime-rl PR 1957 with one weight: any number is a factor; that a weighting gives it too is said."""
    factor = diagnose(measured_of(T51, weight=lambda r, i: 1 / 12, elements=1))
    assert (factor.verdict, factor.names) == (Verdict.FACTOR, ("1/n (n = 2)",))
    found = diagnose(measured_of(T51, weight=lambda r, i: (0.1, 0.5)[r], elements=1))
    assert (found.verdict, found.names, found.weights) == (Verdict.FACTOR, (), None)
    assert "no product of the sizes" in found.text
    assert any(
        note.startswith("As a weighting it would be the mean of the ranks' means") for note in found.notes
    )
    other = diagnose(measured_of(T51, weight=lambda r, i: (0.3, 0.4)[r], elements=1))
    assert any("cannot tell" in note for note in other.notes)
    assert not any("As a weighting" in note for note in other.notes)
