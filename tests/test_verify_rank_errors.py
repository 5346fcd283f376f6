"""An error of one rank reaches all that call ``rr.verify``, with one text and without a hang."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ring_reduce as rr
from conftest import Run
from ddp_helpers import wrap
from launch import Seat, caught, spawn
from ring_reduce.verification import Job, VerifyError
from verify_helpers import Batch, batches_of, check, losses_of, make_model, ranks, right_step, sum_gradients

COUNTS = [[5, 3], [2, 4]]
HANG_S = 20.0  # what nothing here takes


def error_on_all(run: Run, function: Any, *arguments: Any, world: int = 2) -> str:
    """The text of the VerifyError that every rank raises."""
    started = time.monotonic()
    errors = run(world, function, *arguments)
    assert time.monotonic() - started < HANG_S
    assert all(isinstance(error, VerifyError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


def verify_other_weights(seat: Seat) -> Any:
    with ranks(seat):
        model: Any = make_model()
        if seat.rank == 1:
            with torch.no_grad():
                model[2].weight[0, 3] += 1e-6
        return caught(lambda: rr.verify(model, batches_of(COUNTS, seat.rank), losses_of, right_step))


def test_parameters_that_differ_are_named(run: Run) -> None:
    text = error_on_all(run, verify_other_weights)
    assert "parameter 2.weight differs: (1, 8) float64, norm" in text
    assert "on rank 0 and" in text
    assert "on rank 1; start every rank from the same weights" in text


def verify_other_model(seat: Seat) -> Any:
    with ranks(seat):
        model: Any = make_model()
        model[0].bias.requires_grad_(seat.rank == 0)
        return caught(lambda: rr.verify(model, batches_of(COUNTS, seat.rank), losses_of, right_step))


def test_models_that_differ_are_named(run: Run) -> None:
    assert "the model of rank 1 has other trainable parameters than that of rank 0: 0.bias" in error_on_all(
        run, verify_other_model
    )


def verify_other_options(seat: Seat) -> Any:
    with ranks(seat):
        return caught(lambda: check(COUNTS, right_step, seat, tolerance=0.1 if seat.rank else None))


def test_options_that_differ(run: Run) -> None:
    text = error_on_all(run, verify_other_options)
    assert "tolerance is None on rank 0 and 0.1 on rank 1" in text


def verify_other_shapes(seat: Seat) -> Any:
    with ranks(seat):
        batch = torch.ones(3, 6 + seat.rank, dtype=torch.float64)
        return caught(lambda: rr.verify(make_model(), [batch], lambda model, x: model(x), right_step))


def test_batches_that_do_not_fit(run: Run) -> None:
    text = error_on_all(run, verify_other_shapes)
    assert "batch has shape (3, 6) in micro-batch 0 of rank 0 and (3, 7) in micro-batch 0 of rank 1" in text


class OneRaises:
    """A step that raises on a rank while the others wait for it: in Gloo, in DDP, or in a ring."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank = rank
        self.where = where

    def __call__(self, model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        match self.where:
            case "gloo":
                self.raise_or_not(job)
                sum_gradients(model)
            case "ddp":
                ddp = wrap(model)
                self.raise_or_not(job)
                losses_of(ddp, batches[0]).sum().backward()
            case "ring":
                with rr.Ring.from_group() as ring:
                    self.raise_or_not(job)
                    ring.all_reduce(torch.ones(3))
            case "exit":
                if job.rank == self.rank:
                    raise SystemExit(3)
                sum_gradients(model)

    def raise_or_not(self, job: Job) -> None:
        if job.rank == self.rank:
            raise ValueError("no such thing")


def verify_one_raises(seat: Seat, rank: int, where: str) -> BaseException | None:
    with ranks(seat):
        try:
            check(COUNTS, OneRaises(rank, where), seat)
        except (SystemExit, VerifyError) as error:
            return error.with_traceback(None)
    return None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["gloo", "ddp", "ring"])
def test_a_step_that_raises_on_one_rank(rank: int, where: str, run: Run) -> None:
    assert (
        error_on_all(run, verify_one_raises, rank, where)
        == f"rank {rank}: step() raised ValueError: no such thing"
    )


def test_a_step_that_leaves_on_one_rank(run: Run) -> None:
    first, second = run(2, verify_one_raises, 1, "exit")
    assert str(first) == "rank 1: step() raised SystemExit: 3"
    assert isinstance(second, SystemExit)


def verify_losses_that_raise(seat: Seat) -> Any:
    def losses(model: nn.Module, batch: Batch) -> Tensor:
        raise KeyError("labels")

    with ranks(seat):
        return caught(lambda: rr.verify(make_model(), batches_of(COUNTS, seat.rank), losses, right_step))


def test_losses_that_raise_on_rank_0(run: Run) -> None:
    assert error_on_all(run, verify_losses_that_raise) == "rank 0: the reference raised KeyError: 'labels'"


def verify_over_tcp(seat: Seat) -> BaseException | None:
    """Rank 0 waits in the store, whose connection serves one wait at a time."""
    store = dist.TCPStore(
        "127.0.0.1",
        0 if seat.rank == 0 else int(seat.store.get("port")),
        seat.world,
        is_master=seat.rank == 0,
        wait_for_workers=False,
    )
    if seat.rank == 0:
        seat.store.set("port", str(store.port).encode())
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world)

    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        if job.rank == 1:
            raise ValueError("no such thing")
        store.get("never set")

    error = caught(lambda: check(COUNTS, step, seat))
    seat.meet("the end")  # or the store would go with rank 0
    return error


def test_a_rank_that_waits_in_the_store() -> None:
    first, second = spawn(2, verify_over_tcp)
    assert str(first) == str(second) == "rank 1: step() raised ValueError: no such thing"
