"""The names of the demo's factors, and what it predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

import ring_reduce as rr
from ring_reduce.demo import data
from ring_reduce.demo.factors import Loss, name_factor, predict_factor


@pytest.mark.parametrize(
    ("factor", "symbol", "words"),
    [
        (1.0, "1", "right"),
        (1 / 4, "1/n", "1/n: divided twice"),
        (4.0, "n", "n: never divided"),
        (96.0, "B", "B: never divided"),
        (1 / 96, "1/B", "1/B: divided twice"),
        (24.0, "B/n", "B/n: divided by n, not by B"),
        (1 / 24, "n/B", "n/B: divided by B, not by n"),
        (3.0, None, "a factor of 3, which is no product of n and B"),
    ],
)
def test_factor_is_named(factor: float, symbol: str | None, words: str) -> None:
    verdict = name_factor(factor * (1 + 1e-6), 1e-6, world=4, global_batch=96)
    assert (verdict.right, verdict.symbol, str(verdict)) == (symbol == "1", symbol, words)


def test_a_factor_that_is_nearly_one_is_not_right() -> None:
    assert not name_factor(1.01, 0.0, world=4, global_batch=96).right


@pytest.mark.parametrize("residual", [0.02, math.nan])
def test_no_factor_fits_a_gradient_of_another_direction(residual: float) -> None:
    verdict = name_factor(1.0, residual, world=4, global_batch=96)
    assert not verdict.right
    assert "weighted wrongly" in str(verdict)


def test_all_products_that_match_are_named() -> None:
    assert name_factor(4.0, 0.0, world=4, global_batch=4).symbol == "B = n"
    assert name_factor(4.0, 0.0, world=4, global_batch=16).symbol == "n = B/n"


def test_a_world_of_one_has_no_factor_n() -> None:
    assert name_factor(1.0, 0.0, world=1, global_batch=8).right
    assert name_factor(1 / 8, 0.0, world=1, global_batch=8).symbol == "1/B"


@pytest.mark.parametrize(
    "normalization", [rr.SUM, rr.MEAN, rr.divide_by(40), rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN], ids=repr
)
@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("counts", [(10, 10, 10, 10), (4, 8, 12, 16), (40,)], ids=str)
def test_prediction_agrees_with_arithmetic(
    counts: Sequence[int], loss: Loss, normalization: rr.Normalization
) -> None:
    """The prediction against an all-reduce written out in NumPy on random per-example gradients."""
    examples = [np.random.default_rng(rank).normal(size=(count, 50)) for rank, count in enumerate(counts)]
    batch = sum(counts)
    local = [each.sum(axis=0) / loss.divisor(len(each), batch) for each in examples]
    total = sum(c * x for c, x in zip(counts, local, strict=True))
    plain = sum(local)
    reduced = {
        rr.SUM: plain,
        rr.MEAN: plain / len(counts),
        rr.divide_by(40): plain / 40,
        rr.DIVIDE_BY_COUNT: plain / batch,
        rr.WEIGHTED_MEAN: total / batch,
    }[normalization]
    reference = np.concatenate(examples).mean(axis=0)
    factor = reduced.dot(reference) / reference.dot(reference)
    residual = np.linalg.norm(reduced - factor * reference) / np.linalg.norm(reduced)

    predicted = predict_factor(loss, normalization, counts)
    if residual > 1e-9:
        assert predicted is None
    else:
        assert predicted == pytest.approx(factor)


def test_even_counts_cover_the_batch() -> None:
    assert data.even_counts(64, 4) == [16, 16, 16, 16]
    assert data.even_counts(29, 4) == [8, 7, 7, 7]
    batch = np.arange(29)
    parts = [data.split_batch(batch, [8, 7, 7, 7], rank) for rank in range(4)]
    assert np.concatenate(parts).tolist() == batch.tolist()
