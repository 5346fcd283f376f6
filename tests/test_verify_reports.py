"""Every public report of the issue's table through verify, with its numbers; and all of it right."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from torch import nn

import ring_reduce as rr
from conftest import Run
from ddp_helpers import wrap
from launch import Seat
from ring_reduce.normalization import Kind
from ring_reduce.verification import Job
from ring_reduce.verification.report import Report
from ring_reduce.verification.verdict import Verdict
from verify_cases import CASES
from verify_helpers import Batch, Counts, check, losses_of, ranks


def verify_case(seat: Seat, name: str) -> Report:
    case = CASES[name]
    with contextlib.nullcontext() if seat.world == 1 else ranks(seat):
        return rr.verify(
            case.model(), case.batches_of(seat.rank), case.losses, case.step, micro_batches=case.planned
        )


def reported(run: Run, name: str) -> Report:
    reports = run(len(CASES[name].counts), verify_case, name)
    assert all(report.to_dict() == reports[0].to_dict() for report in reports)
    first: Report = reports[0]
    assert not first.right
    assert first.exit_status == 1
    return first


@pytest.mark.parametrize(
    ("name", "factor", "symbols"),
    [
        ("pytorch/pytorch PR 42471", 1 / 2, ["1/n (n = 2)", "n/B (n = 2, B = 4)"]),
        ("OpenNMT-py #2451", 1 / 2, ["1/n (n = 2)"]),
        ("sparseml PR 135", 4, ["n (n = 4)"]),
        ("torchtune PR 2172", 1 / 2, ["1/n (n = 2)"]),
        ("torchtune PR 2436", 2, ["a divisor of n = 4"]),
        ("Arctic-Platform PR 119", 1 / 4, ["1/n (n = 4)"]),
        ("DeepSpeed #4662", 1 / 2, ["1/n (n = 2)"]),
        ("transformers PR 47261", 8, ["N (N = 8)"]),
        ("ms-swift #10117", 1 / 4, ["1/N (N = 4)"]),
        ("DeepSpeed #7773", 4, ["N (N = 4)"]),
        ("accelerate docs recipe, short group", 0.875, ["k/N = 7/8 (k = 7 micro-batches of N = 8 planned)"]),
        ("VeOmni PR 338", 1 / 8, ["1/n (n = 8)"]),
        ("eight micro-batches of four", 4, ["m (m = 4)"]),
    ],
)
def test_a_factor_is_named(name: str, factor: float, symbols: list[str], run: Run) -> None:
    """By this name, and by no other."""
    report = reported(run, name)
    assert (report.verdict, report.weights, len(report.effects)) == (Verdict.FACTOR, None, 3)
    assert report.factor == pytest.approx(factor)
    assert list(report.names) == symbols
    assert f"gradient is {factor:.4g} = {' = '.join(symbols)}: " in report.text
    assert all(line.factor == pytest.approx(factor) for line in report.parameters)
    assert report.norm == pytest.approx(factor * report.right_norm)


def test_a_sum_under_ddp_has_the_numbers_of_the_report(run: Run) -> None:
    report = reported(run, "pytorch/pytorch PR 42471")
    assert (report.norm, report.right_norm) == (30, 60)
    assert "Norm of the gradient: 30, where 60 is right" in str(report)


RANKS, BATCHES = "the mean of the ranks' means", "the mean of the micro-batches' means"


@pytest.mark.parametrize(
    ("name", "weights", "says"),
    [
        ("prime-rl PR 1957", [[0.1], [0.5]], f"weights 0.1 and 0.5, right is 1/6: {RANKS}"),
        ("speculators PR 942", [[1 / 2], [1 / 18]], f"weights 0.5 and 0.05556, right is 1/10: {RANKS}"),
        ("transformers #34242", [[0.1, 0.1], [0.5, math.nan]], f"weights 0.1 and 0.5, right is 1/6: {RANKS}"),
        ("Megatron-DeepSpeed PR 169", [[1 / 2, 1 / 18]], f"0.5 and 0.05556, right is 1/10: {BATCHES}"),
    ],
)
def test_a_weighting_is_told_from_a_factor(name: str, weights: Counts, says: str, run: Run) -> None:
    report = reported(run, name)
    assert report.verdict is Verdict.WEIGHTING
    assert (report.factor, report.names, report.effects) == (None, (), ())
    assert report.weights is not None
    for of_rank, expected in zip(report.weights, weights, strict=True):
        assert of_rank == pytest.approx(expected, nan_ok=True)
    assert "weighting, not a factor" in report.text
    assert says in report.text


def test_batch_norm_has_no_factor_and_is_named(run: Run) -> None:
    report = reported(run, "batch norm")
    assert report.verdict is Verdict.BATCH_DEPENDENT
    assert "no single factor" in report.text
    assert "1: BatchNorm1d" in report.text


# All of it right: each normalization, by hand, under DDP's hook and by the Accumulator

EQUAL: dict[int, Counts] = {n: [[5, 5, 5]] * n for n in (1, 2, 4)}
UNEQUAL: dict[int, Counts] = {1: [[7, 2]], 2: [[7, 2], [1, 4]], 4: [[7, 2], [1, 4], [3, 3], [0, 6]]}


def divisor_of(normalization: rr.Normalization, own: int, total: int) -> int:
    """What the loss has divided by, so that the reduction need not: ``own`` for means."""
    match normalization.kind:
        case Kind.SUM:
            return total
        case Kind.MEAN | Kind.WEIGHTED_MEAN:
            return own
        case Kind.DIVIDE_BY | Kind.DIVIDE_BY_COUNT:
            return 1


@dataclass
class RightStep:
    """A step that is right with each normalization, if MEAN has equal batches."""

    normalization: rr.Normalization
    ring: rr.Ring
    total: int

    def by_hand(self, model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        own = self.backward(model, batches)
        count = own if self.normalization.uses_count else None
        for parameter in model.parameters():
            self.ring.all_reduce(parameter.grad, self.normalization, count=count)

    def under_ddp(self, model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        ddp = wrap(model)
        state = rr.attach(ddp, self.ring, self.normalization)
        if self.normalization.uses_count:
            state.add_count(sum(len(inputs) for inputs, _ in batches))
        with ddp.no_sync():
            self.backward(ddp, batches[:-1], own=sum(len(inputs) for inputs, _ in batches))
        self.backward(ddp, batches[-1:], own=sum(len(inputs) for inputs, _ in batches))

    def accumulated(self, model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        with rr.Accumulator(model, self.normalization, ring=self.ring) as accumulator:
            for batch in batches:
                self.backward(model, [batch])
                accumulator.add(count=len(batch[0]) if self.normalization.uses_count else None)

    def backward(self, model: nn.Module, batches: Sequence[Batch], own: int | None = None) -> int:
        own = sum(len(inputs) for inputs, _ in batches) if own is None else own
        for batch in batches:
            losses_of(model, batch).sum().div(divisor_of(self.normalization, own, self.total)).backward()
        return own


def verify_right(seat: Seat, counts: Counts) -> dict[str, Report]:
    total = sum(map(sum, counts))
    normalizations = [rr.SUM, rr.divide_by(total), rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN]
    equal = len({count for of_rank in counts for count in of_rank}) == 1
    reports = {}
    with ranks(seat) as ring:
        for normalization in [*normalizations, rr.MEAN] if equal else normalizations:
            step = RightStep(normalization, ring, total)
            ways = [step.by_hand, step.accumulated, *([step.under_ddp] if seat.world > 1 else [])]
            for way in ways:
                reports[f"{normalization} {way.__name__}"] = check(counts, way, seat)
    return reports


@pytest.mark.parametrize("counts", [*EQUAL.values(), *UNEQUAL.values()], ids=str)
def test_what_is_right_is_right(counts: Counts, run: Run) -> None:
    found = run(len(counts), verify_right, counts)[0]
    wrong = {way: report.text for way, report in found.items() if not report.right}
    assert not wrong
    assert len(found) == (4 + (counts[0] == [5, 5, 5])) * (2 + (len(counts) > 1))
    assert all(report.exit_status == 0 and report.factor == 1 for report in found.values())


def verify_mean_of_unequal(seat: Seat) -> Report:
    with ranks(seat) as ring:
        return check(UNEQUAL[2], RightStep(rr.MEAN, ring, 14).by_hand, seat)


def test_mean_of_unequal_batches_is_a_weighting(run: Run) -> None:
    """The same steps can be wrong."""
    report = run(2, verify_mean_of_unequal)[0]
    assert report.verdict is Verdict.WEIGHTING
    assert report.weights == ((pytest.approx(1 / 18),) * 2, (pytest.approx(1 / 10),) * 2)
