"""A backward on gradients that were reduced and not zeroed: a sum would be summed over the ranks again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_helpers import FEATURES, batch_of, group, loss_of, make_net, wrap
from launch import Seat

SUMS = [rr.SUM, rr.divide_by(6), rr.DIVIDE_BY_COUNT]


class Step:
    """A model under the ring's hook, and what a training loop does with it. Keeps the watch's warnings."""

    def __init__(self, seat: Seat, ring: rr.Ring, normalization: Any, **options: Any) -> None:
        self.seat = seat
        self.net = make_net()
        self.model = wrap(self.net, **options)
        self.state = rr.attach(self.model, ring, normalization)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def forward(self) -> torch.Tensor:
        return loss_of(self.model(batch_of(self.seat.rank, 0, 3)), 3)

    def backward(self, loss: torch.Tensor) -> None:
        if self.state.normalization.uses_count:
            self.state.add_count(3)
        loss.backward()


class Warnings(warnings.catch_warnings):
    """Those of gradients that were not zeroed."""

    def __init__(self) -> None:
        super().__init__(record=True)

    def __enter__(self) -> list[str]:  # type: ignore[override]
        self._seen = super().__enter__()
        warnings.simplefilter("always")
        self.texts: list[str] = []
        return self.texts

    def __exit__(self, *details: Any) -> None:
        self.texts += [str(w.message) for w in self._seen or () if "not zeroed" in str(w.message)]
        super().__exit__(*details)


def forget_to_zero(seat: Seat, normalization: Any, under_no_sync: bool) -> list[str]:
    with group(seat) as ring:
        step = Step(seat, ring, normalization)
        step.backward(step.forward())
        step.optimizer.step()
        with Warnings() as texts:
            if under_no_sync:
                with step.model.no_sync():
                    step.backward(step.forward())
            step.backward(step.forward())
        return texts


@pytest.mark.parametrize("under_no_sync", [False, True])
@pytest.mark.parametrize("normalization", SUMS, ids=repr)
def test_gradients_that_were_not_zeroed(run: Run, normalization: Any, under_no_sync: bool) -> None:
    for rank, texts in enumerate(run(2, forget_to_zero, normalization, under_no_sync)):
        assert len(texts) == 1, "once a backward, not once a parameter"
        assert f"rank {rank}: the gradient of " in texts[0]
        assert "was reduced by the last backward and not zeroed" in texts[0]
        assert f"under {normalization!r} it will be summed over the ranks again" in texts[0]


def two_forwards_then_two_backwards(seat: Seat) -> int:
    with group(seat) as ring:
        step = Step(seat, ring, rr.SUM)
        first, second = step.forward(), step.forward()
        step.backward(first)
        with Warnings() as texts:
            step.backward(second)
        return len(texts)


def test_a_backward_whose_forward_came_before_the_reduction(run: Run) -> None:
    assert run(2, two_forwards_then_two_backwards) == [1, 1]


def loops_that_are_right(seat: Seat, normalization: Any) -> tuple[list[str], int]:
    """Every usual order of zero_grad, forward, backward and step, with micro-batches between."""
    with group(seat) as ring, Warnings() as texts:
        step = Step(seat, ring, normalization)
        for set_to_none in (True, False, False):
            step.optimizer.zero_grad(set_to_none=set_to_none)
            step.backward(step.forward())
            step.optimizer.step()
        for set_to_none in (True, False):
            loss = step.forward()  # before the gradients of the last step are zeroed
            step.optimizer.zero_grad(set_to_none=set_to_none)
            step.backward(loss)
            step.optimizer.step()
        step.optimizer.zero_grad()
        for _ in range(2):  # gradients of this step's own micro-batches are not zero, and should not be
            with step.model.no_sync():
                step.backward(step.forward())
        step.backward(step.forward())
        with torch.no_grad():
            step.forward()
        saliency = torch.ones(2, FEATURES, dtype=torch.float64, requires_grad=True)
        with step.model.no_sync():  # touches no gradient of a parameter
            torch.autograd.grad(loss_of(step.model(saliency), 1), saliency)
    return texts, step.state.reductions


@pytest.mark.parametrize("normalization", SUMS, ids=repr)
def test_loops_that_zero_their_gradients(run: Run, normalization: Any) -> None:
    assert run(2, loops_that_are_right, normalization) == [([], 6), ([], 6)]


def frozen_with_an_old_gradient(seat: Seat) -> list[str]:
    with group(seat) as ring:
        net = make_net()
        net.first.bias.requires_grad_(False)
        net.first.bias.grad = torch.ones_like(net.first.bias)
        model = wrap(net)
        rr.attach(model, ring, rr.SUM)
        with Warnings() as texts:
            for _ in range(2):
                loss_of(model(batch_of(seat.rank, 0, 3)), 3).backward()
                for parameter in net.parameters():
                    if parameter.requires_grad:
                        parameter.grad = None
        return texts


def test_a_frozen_parameter_may_keep_its_gradient(run: Run) -> None:
    assert run(2, frozen_with_an_old_gradient) == [[], []]


def add_up(seat: Seat, normalization: Any) -> tuple[float, list[str]]:
    """Two losses of one step, each with a synchronised backward of its own."""
    with group(seat) as ring, Warnings() as texts:
        step = Step(seat, ring, normalization)
        step.backward(step.forward())
        once = [p.grad.clone() for p in step.net.parameters() if p.grad is not None]
        step.backward(step.forward())
        twice = [p.grad for p in step.net.parameters() if p.grad is not None]
    return max(float((t - 2 * o).abs().max()) for t, o in zip(twice, once, strict=True)), texts


@pytest.mark.parametrize("normalization", [rr.MEAN, rr.WEIGHTED_MEAN], ids=repr)
def test_means_add_up(run: Run, normalization: Any) -> None:
    for difference, texts in run(2, add_up, normalization):
        assert difference < 1e-12
        assert texts == []
