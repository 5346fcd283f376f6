"""A diagnosis of all that is right, and of every factor; the public reports are in test_verify_reports.py."""

from __future__ import annotations

import numpy as np
import pytest

import ring_reduce as rr
from diagnosis_cases import BFLOAT16, FLOAT32, Weight, bfloat16, equal, exact, measured_of, sizes_of
from ring_reduce.normalization import Kind, Normalization
from ring_reduce.verification.diagnosis import Verdict, diagnose
from ring_reduce.verification.measured import Sizes


def test_a_sum_of_losses_under_ddp() -> None:
    """pytorch/pytorch PR 42471: x = -1, 2, -3, 4, w = 1, loss = sum (w x)^2: 30 where 60 is right.

    verify's right gradient is of a mean, so what is summed is 4 (w x)^2. Two ranks with two samples each: n and the
    local batch are both 2, and both are named.
    """
    parts = np.array([[4 * 2.0 * (1 + 4)], [4 * 2.0 * (9 + 16)]])
    found = diagnose(measured_of(equal(2, 1, 2), np.array([30.0]), parts=parts, rounding=exact))
    assert (found.verdict, found.factor) == (Verdict.FACTOR, 0.5)
    assert found.names == ("1/n (n = 2)", "n/B (n = 2, B = 4)")
    assert found.text.startswith("gradient is 0.5 = 1/n (n = 2) = n/B (n = 2, B = 4): either ")
    assert any("2 products come to this number" in note for note in found.notes)
    assert any("cannot tell a factor from a weighting" in note for note in found.notes)


def test_the_sentence_of_the_issue() -> None:
    found = diagnose(measured_of(equal(8, 1, 5), weight=lambda r, i: 1 / 320))
    assert found.text == (
        "gradient is 0.125 = 1/n (n = 8): the loss is already divided by the global batch and the reduction averaged "
        "again; use SUM"
    )
    assert found.remedy == "use SUM"
    assert [line.factor for line in found.parameters] == pytest.approx([0.125, 0.125])
    assert all(line.names == ("1/n (n = 8)",) for line in found.parameters)


# All of it right, and every wrong pair of a loss and a normalization


def weight_of(sizes: Sizes, loss: str, normalization: Normalization) -> Weight:
    """What a count weighs, from the definitions."""
    divisor = normalization.divisor(sizes.world, sizes.total_count)

    def weight(r: int, i: int) -> float:
        entering = sizes.rank_counts[r] if normalization.kind is Kind.WEIGHTED_MEAN else 1
        return (
            entering / divisor / {"global": sizes.total_count, "mean": sizes.rank_counts[r], "sum": 1}[loss]
        )

    return weight


EQUAL = [equal(n, N, 5) for n in (1, 2, 4) for N in (1, 3)]
UNEQUAL = [
    sizes_of([[7]]),
    sizes_of([[2, 9, 4]]),
    sizes_of([[7], [2]]),
    sizes_of([[2, 9, 4], [3, 1, 1]], samples=[[1, 2, 1], [2, 1, 1]]),
    sizes_of([[3, 1], [5, 4], [2, 2], [6, 1]]),
    sizes_of([[3, 1], [5, 0], [0, 0], [6, 1]]),
    sizes_of([[4, 4, 4], [4, 4]], planned=4),
]
BY_TOTAL = rr.divide_by(1.0)  # stands for divide_by(T)


@pytest.mark.parametrize("sizes", EQUAL + UNEQUAL, ids=lambda sizes: str(sizes.counts))
@pytest.mark.parametrize(
    ("loss", "normalization"),
    [
        ("global", rr.SUM),
        ("mean", rr.MEAN),
        ("mean", rr.WEIGHTED_MEAN),
        ("sum", rr.DIVIDE_BY_COUNT),
        ("sum", BY_TOTAL),
    ],
)
def test_all_of_it_right(sizes: Sizes, loss: str, normalization: Normalization) -> None:
    """Each normalization, n = 1, 2, 4, equal and unequal; MEAN of means is right only where ranks are equal."""
    if normalization is BY_TOTAL:
        normalization = rr.divide_by(sizes.total_count)
    if (loss, normalization) == ("mean", rr.MEAN) and len(set(sizes.rank_counts)) > 1:
        found = diagnose(measured_of(sizes, weight=guarded(sizes, weight_of(sizes, loss, normalization))))
        assert (found.verdict, found.right) == (Verdict.WEIGHTING, False)
        assert "the mean of the ranks' means, 1/(n C_r)" in found.text
        return
    found = diagnose(measured_of(sizes, weight=guarded(sizes, weight_of(sizes, loss, normalization))))
    assert (found.verdict, found.right, found.factor, found.effects) == (Verdict.RIGHT, True, 1.0, ())
    assert (found.remedy, found.weights) == ("", None)
    assert found.difference < FLOAT32
    assert all(line.verdict is Verdict.RIGHT for line in found.parameters)
    alike = len({count for counts in sizes.counts for count in counts}) == 1
    assert any("a mean of means is right too" in note for note in found.notes) == (
        alike and (sizes.world > 1 or sizes.micro_batches > 1)
    )
    assert not any("cannot be told" in note for note in found.notes)


def guarded(sizes: Sizes, weight: Weight) -> Weight:
    """0 where nothing is counted, and a mean would be 0/0."""
    return lambda r, i: weight(r, i) if sizes.counts[r][i] else 0.0


@pytest.mark.parametrize(
    ("loss", "normalization", "symbol"),
    [
        ("global", rr.MEAN, "1/n"),
        ("global", rr.divide_by(32), "1/B"),
        ("global", rr.DIVIDE_BY_COUNT, "1/B"),
        ("global", rr.WEIGHTED_MEAN, "1/n"),
        ("mean", rr.SUM, "n"),
        ("mean", rr.divide_by(32), "n/B"),
        ("mean", rr.DIVIDE_BY_COUNT, "n/B"),
        ("sum", rr.SUM, "B"),
        ("sum", rr.MEAN, "B/n"),
        ("sum", rr.WEIGHTED_MEAN, "B/n"),
    ],
)
def test_every_wrong_pair_of_the_guide(loss: str, normalization: Normalization, symbol: str) -> None:
    """The table of docs/normalization.md, n = 4 and B = 32."""
    sizes = equal(4, 1, 8)
    found = diagnose(measured_of(sizes, weight=weight_of(sizes, loss, normalization)))
    assert found.verdict is Verdict.FACTOR
    assert [name.split(" (")[0] for name in found.names] == [symbol]
    rough = {"rounding": bfloat16, "tolerance": BFLOAT16, "elements": 600}
    found = diagnose(measured_of(sizes, weight=weight_of(sizes, loss, normalization), **rough))  # type: ignore[arg-type]
    assert found.verdict is Verdict.FACTOR
    assert symbol in [name.split(" (")[0] for name in found.names]  # if among others


def test_names_that_cannot_be_told_apart_are_all_named() -> None:
    found = diagnose(measured_of(equal(4, 4, 5), weight=lambda r, i: 1 / 4 / 80))
    assert found.names == ("1/n (n = 4)", "1/N (N = 4)")
    assert "use SUM; or " in found.text
    assert "divide by N once" in found.text
    assert any("2 products come to this number" in note for note in found.notes)
    assert diagnose(measured_of(equal(2, 3, 5), weight=lambda r, i: 1 / 60)).notes == ()


def test_a_size_is_simpler_than_a_divisor_of_the_world() -> None:
    assert diagnose(measured_of(equal(4, 2, 5), weight=lambda r, i: 2 / 40)).names == ("N (N = 2)",)
    names = diagnose(measured_of(equal(4, 1, 2), weight=lambda r, i: 1 / 16)).names
    assert names == ("n/B (n = 4, B = 8)",)
    products = diagnose(measured_of(equal(8, 4, 3), weight=lambda r, i: 2 / 96)).names
    assert products == ("n/N (n = 8, N = 4)", "a divisor of n = 8")


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (7.0, "7 times the right one, and no product of the sizes; return before clip_grad_norm_, if"),
        (2.0**16, "65536 times the right one, and no product of the sizes; look for a power of two"),
        (1.01, "1.01 times the right one"),
        (1.0004, "1.0004 times the right one"),
        (-1.0, "-1: the sign is flipped; step against"),
        (-0.5, "-0.5 = -1/n (n = 2): the sign is flipped, and the loss is already divided"),
        (0.0, "zero, and should not be"),
    ],
)
def test_factors_without_a_plain_name(factor: float, says: str) -> None:
    found = diagnose(measured_of(equal(2, 3, 5), weight=lambda r, i: factor / 30))
    assert (found.verdict, found.right) == (Verdict.FACTOR, False)
    assert found.text.startswith(f"gradient is {says}")
    assert found.factor == pytest.approx(factor, rel=1e-5)
