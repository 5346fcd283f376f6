"""A backward on gradients that were reduced and not zeroed: a sum would be summed over the ranks again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_helpers import batch_of, group, loss_of, make_net, wrap
from launch import Seat, caught

SUMS = [rr.SUM, rr.divide_by(6), rr.DIVIDE_BY_COUNT]


class Step:
    """A model under the ring's hook, and what a training loop does with it."""

    def __init__(self, seat: Seat, ring: rr.Ring, normalization: Any) -> None:
        self.seat = seat
        self.net = make_net()
        self.model = wrap(self.net)
        self.state = rr.attach(self.model, ring, normalization)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def forward(self) -> torch.Tensor:
        return loss_of(self.model(batch_of(self.seat.rank, 0, 3)), 3)

    def backward(self, loss: torch.Tensor) -> None:
        if self.state.normalization.uses_count:
            self.state.add_count(3)
        loss.backward()


def forget_to_zero(seat: Seat, normalization: Any, under_no_sync: bool) -> tuple[str, str]:
    with group(seat) as ring:
        step = Step(seat, ring, normalization)
        step.backward(step.forward())
        step.optimizer.step()
        if under_no_sync:
            with step.model.no_sync():
                return str(caught(lambda: step.forward().backward())), str(ring.failure)
        return str(caught(lambda: step.backward(step.forward()))), str(ring.failure)


@pytest.mark.parametrize("under_no_sync", [False, True])
@pytest.mark.parametrize("normalization", SUMS, ids=repr)
def test_gradients_that_were_not_zeroed(run: Run, normalization: Any, under_no_sync: bool) -> None:
    for rank, (error, failure) in enumerate(run(2, forget_to_zero, normalization, under_no_sync)):
        assert "the gradient of first.weight was reduced by the last backward and not zeroed" in error
        assert f"under {normalization!r} this one would sum it over the ranks again" in error
        assert f"rank {rank}: the gradient" in error or "aborted the ring" in error
        assert "aborted the ring: RuntimeError" in failure


def two_forwards_then_two_backwards(seat: Seat) -> str:
    with group(seat) as ring:
        step = Step(seat, ring, rr.SUM)
        first, second = step.forward(), step.forward()
        step.backward(first)
        return str(caught(lambda: step.backward(second)))


def test_a_backward_whose_forward_came_before_the_reduction(run: Run) -> None:
    for error in run(2, two_forwards_then_two_backwards):
        assert "was reduced by the last backward and not zeroed" in error


def loops_that_are_right(seat: Seat, normalization: Any) -> int:
    """Every usual order of zero_grad, forward, backward and step, with micro-batches between."""
    with group(seat) as ring:
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
        return step.state.reductions


@pytest.mark.parametrize("normalization", SUMS, ids=repr)
def test_loops_that_zero_their_gradients(run: Run, normalization: Any) -> None:
    assert run(2, loops_that_are_right, normalization) == [6, 6]


def add_up(seat: Seat, normalization: Any) -> float:
    """Two losses of one step, each with a synchronised backward of its own."""
    with group(seat) as ring:
        step = Step(seat, ring, normalization)
        step.backward(step.forward())
        once = [p.grad.clone() for p in step.net.parameters() if p.grad is not None]
        step.backward(step.forward())
        twice = [p.grad for p in step.net.parameters() if p.grad is not None]
        return max(float((t - 2 * o).abs().max()) for t, o in zip(twice, once, strict=True))


@pytest.mark.parametrize("normalization", [rr.MEAN, rr.WEIGHTED_MEAN], ids=repr)
def test_means_add_up(run: Run, normalization: Any) -> None:
    assert max(run(2, add_up, normalization)) < 1e-12
