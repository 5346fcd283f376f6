"""What a factor means, what it does to an optimizer, and the scale of the logged loss."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis_cases import equal, measured_of
from ring_reduce.verification.effects import effects, logged_loss, meaning
from ring_reduce.verification.measured import Sizes

COPRIME = equal(2, 3, 5)


@pytest.mark.parametrize(
    ("symbol", "mistake", "remedy"),
    [
        ("1/n", "already divided by the global batch and the reduction averaged again", "use SUM"),
        ("n", "added up", "use MEAN"),
        ("1/N", "twice", "divide by N once"),
        ("N", "never divided", "divide each loss by N"),
        ("m", "summed", "mean of each micro-batch"),
        ("1/m", "again", "divide by m once"),
        ("k/N", "short", "drop the remainder"),
        ("K/(n N)", "short", "drop the remainder"),
        ("B/(n N m)", "short", "drop the remainder"),
        ("B", "never divided", "divide_by(B)"),
        ("1/B", "twice", "use SUM"),
        ("B/n", "averaged over n", "divide_by(B)"),
        ("n/B", "where their number n belongs", "use MEAN"),
        ("T", "never divided", "divide_by(T)"),
        ("T/B", "number of samples", "not ignored"),
        ("-1/n", "sign is flipped, and the loss is already divided", "use SUM"),
        ("n m/N", "a product of several divisions", "divide exactly once"),
    ],
)
def test_every_name_has_a_mistake_and_a_remedy(symbol: str, mistake: str, remedy: str) -> None:
    said = meaning(symbol)
    assert mistake in said[0]
    assert remedy in said[1]


def test_a_short_group_has_both_remedies() -> None:
    assert meaning("k/N")[1] == (
        "divide by the k that ran (DIVIDE_BY_COUNT counts them), or drop the remainder, which loses its data"
    )


# What a factor does


def adam(gradients: list[float], eps: float, lr: float = 0.1) -> float:
    """How far Adam goes (Kingma and Ba 2015, algorithm 1)."""
    m = v = moved = 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        moved += lr * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + eps)
    return moved


def clipped(gradient: np.ndarray, threshold: float) -> np.ndarray:
    return gradient * min(1.0, threshold / float(np.linalg.norm(gradient)))


@pytest.mark.parametrize("f", [1 / 8, 3.0])
def test_what_the_sentences_say_is_so(f: float) -> None:
    """eps acts as eps / f, and a threshold c as c / f."""
    gradients = [0.3, -0.1, 0.7]
    assert adam([f * g for g in gradients], 1e-3) == pytest.approx(adam(gradients, 1e-3 / f), rel=1e-12)
    assert adam([f * g for g in gradients], 1e-8) == pytest.approx(adam(gradients, 1e-8), rel=1e-5)
    gradient = np.array([6.0, 8.0])
    for c in (1.0, 2.0, 100.0):
        np.testing.assert_allclose(clipped(f * gradient, c), f * clipped(gradient, c / f), rtol=1e-12)
    size, inverse = f"{f:.4g}", f"{1 / f:.4g}"
    of_adam, of_decay, of_clipping = effects(f)
    assert f"a constant factor of {size} cancels" in of_adam
    assert f"eps acts as if it were {inverse} times as large" in of_adam
    assert f"SGD's step is {size} times as large" in of_decay
    assert f"{inverse} times as strong" in of_decay
    assert f"as c / {size} = {inverse} c would" in of_clipping


def test_a_small_factor_weakens_the_clip_and_a_large_one_hides_in_it() -> None:
    assert "cuts less often, and the guard against spikes is weaker" in effects(0.5)[2]
    assert "cuts more often, and a step that it cuts hides the factor" in effects(2.0)[2]


def test_a_flipped_sign_does_not_cancel() -> None:
    assert "The sign does not cancel" in effects(-0.5)[0]
    assert "sign" not in effects(0.5)[0]
    assert "c / 0.5 = 2 c" in effects(-0.5)[2]


@pytest.mark.parametrize("f", [0.0, math.nan, math.inf])
def test_no_number_has_no_size(f: float) -> None:
    assert not any(character.isdigit() for sentence in effects(f) for character in sentence)


def test_one_does_nothing() -> None:
    assert all(sentence.endswith("as it should be.") for sentence in effects(1.0))


# The logged loss


def logged(values: tuple[float | None, ...], loss: float = 6.0, sizes: Sizes = COPRIME) -> str:
    return logged_loss(measured_of(sizes, weight=lambda r, i: 1.0, logged=values, loss=loss))


@pytest.mark.parametrize(
    ("values", "says", "says_not"),
    [
        ((6.0, 6.0), "The logged loss is right: 6,", "times"),
        ((6.0, None), "The logged loss is right", "times"),
        ((3.0, 3.0), "is 0.5 = 1/n (n = 2) times the mean over the whole batch, 6.", "right"),
        ((18.0, None), "is 3 = N (N = 3) times", "right"),
        ((6.6, None), "is 1.1 times", "right"),
        ((6.6, None), "is it the loss of one rank or micro-batch?", "="),
        (
            (5.0, 7.0),
            "different losses, 5 to 7: each its own. The mean of the ranks' logged losses is right",
            "times",
        ),
        ((2.0, 4.0), "The mean of the ranks' logged losses is 0.5 = 1/n (n = 2) times", "right"),
        ((math.nan, 6.0), "cannot be compared", "right"),
    ],
)
def test_the_scale_of_the_logged_loss(values: tuple[float | None, ...], says: str, says_not: str) -> None:
    sentence = logged(values)
    assert says in sentence
    assert says_not not in sentence


@pytest.mark.parametrize("loss", [0.0, math.nan])
def test_a_loss_that_nothing_compares_with(loss: float) -> None:
    assert "cannot be compared" in logged((6.0, 6.0), loss)


@pytest.mark.parametrize("values", [(), (None, None)])
def test_a_step_that_logs_nothing(values: tuple[None, ...]) -> None:
    assert logged(values) == ""
