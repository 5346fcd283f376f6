"""``rr.verify`` on several ranks: one report for all, and an error of one rank reaches all, without a hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ring_reduce as rr
from conftest import Run
from ddp_helpers import wrap
from launch import Seat, caught
from ring_reduce.verification import Job
from ring_reduce.verification.ranks import ranks_of
from ring_reduce.verification.verdict import Verdict
from verify_helpers import (
    Batch,
    Scaled,
    batches_of,
    check,
    losses_of,
    make_model,
    ranks,
    right_step,
)

COUNTS = [[5, 3], [2, 4]]


# One report


def verify_nan_parameter(seat: Seat) -> Any:
    with ranks(seat):
        model: Any = make_model()
        with torch.no_grad():
            model[0].bias[1] = torch.nan
        return rr.verify(model, batches_of(COUNTS, seat.rank), losses_of, right_step)


def test_a_parameter_that_is_nan_alike_on_all_ranks_does_not_differ(run: Run) -> None:
    report = run(2, verify_nan_parameter)[0]
    assert (report.verdict, report.right, report.exit_status) == (Verdict.NOT_FINITE, None, 2)
    assert "0.bias" in report.text


def verify_group_of_two(seat: Seat) -> Any:
    """Ranks 1 and 3 of four are ranks 0 and 1 of a group; the others are not in it."""
    with ranks(seat):
        group = dist.new_group([1, 3])
        if seat.rank not in (1, 3):
            return caught(lambda: rr.verify(make_model(), [], losses_of, right_step, group=group))
        jobs = []

        def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
            jobs.append(job)
            for batch in batches:
                losses_of(model, batch).sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= 14

        own = dist.get_rank(group)
        report = rr.verify(
            make_model(), batches_of(COUNTS, own), losses_of, step, group=group, micro_batches=3
        )
        return report, jobs


def test_a_group_of_some_ranks(run: Run) -> None:
    zeroth, (report, jobs), second, (other, other_jobs) = run(4, verify_group_of_two)
    assert report.right
    assert report == other
    assert report.sizes.counts == ((5, 3), (2, 4))
    assert (jobs, other_jobs) == ([Job(0, 2, 3)], [Job(1, 2, 3)])
    assert all(isinstance(error, ValueError) and "not a member" in str(error) for error in (zeroth, second))


def verify_uneven(seat: Seat) -> Any:
    """Rank 0 has no micro-batch."""
    with ranks(seat):
        return check([[], [5, 3]], right_step, seat)


def test_a_rank_without_micro_batches(run: Run) -> None:
    report = run(2, verify_uneven)[1]
    assert report.right
    assert report.sizes.counts == ((), (5, 3))


def verify_under_a_ddp_from_before(seat: Seat) -> Any:
    """DDP's hooks are on the parameters all the while; the reference must not start a reduction."""
    with ranks(seat):
        model = make_model()
        ddp = wrap(model)

        def step(_: nn.Module, batches: Sequence[Batch], job: Job) -> None:
            with ddp.no_sync():
                losses_of(ddp, batches[0]).sum().div(14 / 2).backward()
            losses_of(ddp, batches[1]).sum().div(14 / 2).backward()

        return rr.verify(model, batches_of(COUNTS, seat.rank), losses_of, step)


def test_a_ddp_from_before(run: Run) -> None:
    assert all(report.right for report in run(2, verify_under_a_ddp_from_before))


def verify_dropout(seat: Seat) -> Any:
    with ranks(seat):
        model = nn.Sequential(nn.Dropout(0.5), *make_model())
        return rr.verify(model, batches_of(COUNTS, seat.rank), losses_of, right_step)


def test_dropout_is_off_on_all_ranks(run: Run) -> None:
    assert run(2, verify_dropout)[0].right


def not_reduced(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    for batch in batches:
        losses_of(model, batch).sum().div(14).backward()


def missing_on_rank_1(model: Any, batches: Sequence[Batch], job: Job) -> None:
    right_step(model, batches, job)
    if job.rank == 1:
        model[0].bias.grad = None


def nan_on_rank_1(model: Any, batches: Sequence[Batch], job: Job) -> None:
    right_step(model, batches, job)
    if job.rank == 1:
        model[0].bias.grad[2] = torch.nan


def local_loss(model: nn.Module, batches: Sequence[Batch], job: Job) -> float:
    right_step(model, batches, job)
    return float(job.rank)


STEPS = {step.__name__: step for step in (not_reduced, missing_on_rank_1, nan_on_rank_1, local_loss)}


def verify_step(seat: Seat, name: str, options: dict[str, Any]) -> Any:
    with ranks(seat):
        return check(COUNTS, STEPS[name], seat, **options)


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("not_reduced", Verdict.NOT_REDUCED, "SUM would be right"),
        ("missing_on_rank_1", Verdict.MISSING, "no gradient on rank 1 for 0.bias"),
        ("nan_on_rank_1", Verdict.NOT_FINITE, "on rank 1: 0.bias"),
    ],
)
def test_ranks_that_differ(name: str, verdict: Verdict, words: str, run: Run) -> None:
    report = run(2, verify_step, name, {})[0]
    assert (report.verdict, report.exit_status) == (verdict, 1)
    assert words in report.text


def test_ranks_that_log_their_own_loss(run: Run) -> None:
    report = run(2, verify_step, "local_loss", {"sample": 3})[1]
    assert report.right
    assert report.compared == 3 + 3 + 3 + 1
    assert "The ranks log different losses, 0 to 1" in report.logged


def thread_settings(seat: Seat) -> Any:
    """What a step sees of torch's settings, from the thread that it runs in."""
    with ranks(seat), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        group = ranks_of(None)
        return group.run(
            lambda: (
                torch.get_default_device().type,
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_enabled("cpu"),
            ),
            "step()",
        )


def test_a_step_has_the_settings_of_the_thread_that_called(run: Run) -> None:
    assert run(2, thread_settings) == [("meta", torch.bfloat16, True)] * 2


def test_a_factor_on_one_process() -> None:
    """The same function with and without a group."""
    report = rr.verify(make_model(), batches_of(COUNTS, 0), losses_of, Scaled(lambda count, job: 2 * 8))
    assert report.factor == pytest.approx(1 / 2)
