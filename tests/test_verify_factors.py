"""Factors that every element allows for and all of them together do not, in 16 bits; and rounding that is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ring_reduce as rr
from conftest import Run
from diagnosis_cases import bfloat16, equal, exact, measured_of, random_parts
from launch import Seat
from ring_reduce.verification.diagnosis import Verdict, diagnose
from ring_reduce.verification.report import Report
from verify_helpers import Scaled, losses_of, make_batch, make_model, ranks

WORDS = 23
SIXTEEN = (torch.bfloat16, torch.float16)
BOUND = 2**-3.5  # the tolerance of bfloat16
EPSILON = 2**-7


class Attention(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.norm, self.end = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens)
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True))
        logits: Tensor = self.head(self.end(x))
        return logits


def token_losses(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="none")


def language(dtype: torch.dtype, seed: int, micro_batches: int) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(seed)
    model = Attention().to(dtype)
    return model, [torch.randint(0, WORDS, (5, 9)) for _ in range(micro_batches)]


def step_of(divisor: int) -> Any:
    def step(model: nn.Module, batches: Any, job: Any) -> None:
        for batch in batches:
            (token_losses(model, batch).mean() / divisor).backward()

    return step


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ran", "planned"), [(7, 8), (15, 16)])
def test_a_short_group_in_16_bits(dtype: torch.dtype, seed: int, ran: int, planned: int) -> None:
    """7/8 and 15/16 are within the tolerance of each element; right ones stay right."""
    model, batches = language(dtype, seed, ran)
    report = rr.verify(model, batches, token_losses, step_of(planned), micro_batches=planned)
    assert (report.verdict, report.right) == (Verdict.FACTOR, False), report
    assert report.names == (f"k/N = {ran}/{planned} (k = {ran} micro-batches of N = {planned} planned)",)
    report = rr.verify(model, batches, token_losses, step_of(ran), micro_batches=planned)
    assert report.right, report
    assert not any("fits better" in note for note in report.notes)


def under_ddp(seat: Seat, dtype: torch.dtype, seed: int, spoilt: float) -> Report:
    """Right but for rank 1, which multiplies its gradient by ``spoilt`` after the reduction."""
    counts = [5, 3, 4]
    batches = [make_batch(seat.rank + 2 * seed, i, n, dtype=dtype) for i, n in enumerate(counts)]

    def step(model: nn.Module, batches: Any, job: Any) -> None:
        Scaled(lambda count, job: sum(counts))(model, batches, job)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= spoilt if job.rank else 1

    with ranks(seat):
        return rr.verify(make_model(dtype), batches, losses_of, step)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_ddp_in_16_bits_is_right_and_every_rank_is_asked(dtype: torch.dtype, run: Run) -> None:
    for seed in range(3):
        report = run(2, under_ddp, dtype, seed, 1.0)[0]
        assert report.right, report
        assert not any("fits better" in note for note in report.notes)
    report = run(2, under_ddp, dtype, 0, 0.75)[0]
    assert report.right is False


# Without torch


def rough(factor: float, *, elements: int = 600, **others: Any) -> Any:
    sizes = equal(2, 7, 5, planned=8)
    parts = random_parts(sizes, elements)
    fields = {"rounding": bfloat16, "tolerance": BOUND, "epsilon": EPSILON, **others}
    return measured_of(sizes, factor * parts.sum(axis=0) / 70, parts=parts, **fields)


def test_a_factor_that_is_near_a_name_is_not_it() -> None:
    """0.53 is 1/2 within the tolerance of an element, and not of all."""
    found = diagnose(rough(0.53))
    assert (found.verdict, found.names) == (Verdict.FACTOR, ())
    assert diagnose(rough(0.5)).names == ("1/n (n = 2)",)


def test_a_factor_without_a_name_within_the_tolerance_is_a_note() -> None:
    found = diagnose(rough(0.95))
    assert (found.verdict, found.right) == (Verdict.RIGHT, True)
    assert any("f = 0.95" in note for note in found.notes), found.notes
    assert all(line.verdict is Verdict.RIGHT for line in found.parameters)


@pytest.mark.parametrize("factor", [1.0, 0.875])
def test_one_large_element_is_not_taken_for_many(factor: float) -> None:
    """What it is off by is what the factor is off by."""
    sizes = equal(2, 7, 5, planned=8)
    parts = random_parts(sizes, 1000)
    parts[:, 0] *= 1e4
    gradient = factor * parts.sum(axis=0) / 70
    gradient[0] *= 1.03 / factor
    measured = measured_of(sizes, gradient, parts=parts, rounding=exact, tolerance=BOUND, epsilon=EPSILON)
    found = diagnose(measured)
    assert found.verdict is not Verdict.FACTOR
    assert not any("fits better" in note for note in found.notes)


def test_a_gradient_that_nearly_cancels_and_was_averaged_twice() -> None:
    """Half of it is within what its parts allow for."""
    sizes = equal(2, 3, 3)
    row = np.linspace(1, 2, 40)
    parts = np.array([9 * row] * 3 + [-7 * row] * 3) * 3
    measured = measured_of(
        sizes, parts.sum(axis=0) / 36, parts=parts, rounding=exact, tolerance=BOUND, epsilon=EPSILON
    )
    found = diagnose(measured)
    assert (found.verdict, found.names) == (Verdict.FACTOR, ("1/n (n = 2)",))
    assert all(line.verdict is Verdict.FACTOR for line in found.parameters)


def test_right_holds_for_every_rank() -> None:
    """Rank 1's factor is within the bound of every element, and another than rank 0's."""
    sizes = equal(2, 3, 5)
    right = random_parts(sizes, 600).sum(axis=0) / 30
    for gradient in ([right, 0.75 * right], [0.75 * right, right], [right, 0.93 * right]):
        measured = measured_of(
            sizes, np.array(gradient), elements=600, rounding=bfloat16, tolerance=BOUND, epsilon=EPSILON
        )
        found = diagnose(measured)
        assert (found.verdict, found.right) in ((Verdict.UNKNOWN, False), (Verdict.NOT_REDUCED, False))
        assert "ranks step with different gradients" in found.text
