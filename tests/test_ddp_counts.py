"""Whose count enters a reduced backward: ranks that count 0, steps that are given up, models that share a ring."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ring_reduce as rr
from conftest import Run
from ddp_cases import (
    BLOCKS,
    WIDTH,
    Case,
    Step,
    assert_gradients,
    examples,
    make_model,
    quotient,
    summed,
    taken,
)
from ddp_helpers import group, wrap
from launch import Seat
from ring_reduce.normalization import Kind, Normalization


class Classifier(nn.Module):
    """One linear layer; its cross-entropy over ignored labels alone is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(4, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = x @ self.weights[0].T
        return outputs


IGNORED = -100


def weighted_cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """NaN over ignored labels alone. The factor, which learns, takes the NaN into the gradient too."""
    loss: torch.Tensor = nn.functional.cross_entropy(outputs, labels) * (outputs.sum() + 1)
    return loss


def ignored_labels(seat: Seat, everyone: bool) -> tuple[torch.Tensor, Step]:
    """Rank 1, or all, have no label that counts. The rank's own gradient, and the step."""
    x = examples(seat.rank, 0, 4)[:, 0]
    labels = torch.tensor([0, 1, 2, 3])
    if everyone or seat.rank == 1:
        labels = torch.full_like(labels, IGNORED)
    counted = int((labels != IGNORED).sum())
    alone = Classifier()
    weighted_cross_entropy(alone(x), labels).backward()
    with group(seat) as ring:
        model = wrap(Classifier())
        state = rr.attach(model, ring, rr.WEIGHTED_MEAN)
        state.add_count(counted)
        weighted_cross_entropy(model(x), labels).backward()
        own = alone.weights[0].grad
        assert own is not None
        return own, taken(model, state)


def test_a_rank_without_labels_leaves_the_others_right(run: Run) -> None:
    results = run(2, ignored_labels, False)
    assert [bool(own.isnan().any()) for own, _ in results] == [False, True], "rank 1 brings NaN along"
    for _, step in results:
        assert_gradients(step, [results[0][0]], "rank 0's own gradient, times 4 and divided by 4")
        assert step.last == (4.0, 4.0, 1)


def test_without_any_label_the_gradient_is_0(run: Run) -> None:
    for own, step in run(2, ignored_labels, True):
        assert own.isnan().any()
        assert_gradients(step, [torch.zeros_like(own)], "nobody counts")
        assert step.last == (0.0, 0.0, 1)


def a_count_of_0(seat: Seat, normalization: Normalization) -> Step:
    """Rank 0 counts 0 with a loss that is NaN, the others 4."""
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, normalization)
        state.add_count(0 if seat.rank == 0 else 4)
        loss = model(examples(seat.rank, 0, 4)).sum()
        divisor = 4 if normalization.kind is Kind.WEIGHTED_MEAN else 1
        (loss * (float("nan") if seat.rank == 0 else 1) / divisor).backward()
        return taken(model, state)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("normalization", [rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN], ids=repr)
def test_a_count_of_0_leaves_nan_out(run: Run, normalization: Normalization, world: int) -> None:
    sums = torch.zeros(BLOCKS, WIDTH, dtype=torch.float64)
    for rank in range(1, world):
        sums += examples(rank, 0, 4, torch.float64).sum(0)
    total = 4 * (world - 1)
    for step in run(world, a_count_of_0, normalization):
        assert step.last == (total, total, 1)
        assert_gradients(step, quotient(sums, total or 1), normalization)


@pytest.mark.parametrize("normalization", [rr.SUM, rr.MEAN], ids=repr)
def test_without_counts_nan_reaches_every_rank(run: Run, normalization: Normalization) -> None:
    for steps in run(2, nan_of_rank_0, normalization):
        assert all(gradient is not None and bool(gradient.isnan().all()) for gradient in steps.gradients)


def nan_of_rank_0(seat: Seat, normalization: Normalization) -> Step:
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, normalization)
        factor = float("nan") if seat.rank == 0 else 1
        (model(examples(seat.rank, 0, 4)).sum() * factor).backward()
        return taken(model, state)


def steps_given_up(seat: Seat, case: Case) -> list[Step | None]:
    """Steps 0 and 3, before and after DDP rebuilds its buckets, end after the forward: None."""
    seen: list[Step | None] = []
    with group(seat) as ring:
        model = case.model()
        state = rr.attach(model, ring, case.normalization)
        for step in range(5):
            if step in (0, 3):
                state.add_count(100)
                model(examples(seat.rank, step, 4))
                state.reset()
                seen.append(None)
            else:
                seen.append(case.backward(model, state, seat.rank, step))
    return seen


@pytest.mark.parametrize("normalization", [rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN], ids=repr)
def test_a_step_that_all_ranks_skip_leaves_the_next_right(run: Run, normalization: Normalization) -> None:
    case = Case(normalization, (8, 2))
    for steps in run(2, steps_given_up, case):
        for step, seen in enumerate(steps):
            if seen is not None:
                assert_gradients(seen, case.expected(step), f"step {step}")
                assert seen.last is not None
                assert seen.last[:2] == case.last()


def two_models(seat: Seat, two_rings: bool, one_backward: bool) -> list[list[Step]]:
    """Counts added in one order, forwards and backwards made in others, over three steps."""
    seen: list[list[Step]] = []
    with group(seat) as ring, rr.Ring.from_group(name="second") as second:
        models = [make_model(), make_model()]
        rings = [ring, second if two_rings else ring]
        normalizations = [rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN]
        states = [rr.attach(m, r, n) for m, r, n in zip(models, rings, normalizations, strict=True)]
        for step in range(3):
            for model in models:
                model.zero_grad()
            states[0].add_count(2)
            states[1].add_count(4 + 4 * seat.rank)
            losses = [
                models[1](examples(seat.rank, step, 4 + 4 * seat.rank)).mean(),
                models[0](examples(seat.rank, 10 + step, 2)).sum(),
            ]
            for loss in [losses[0] + losses[1]] if one_backward else losses:
                loss.backward()
            seen.append([taken(m, s) for m, s in zip(models, states, strict=True)])
    return seen


@pytest.mark.parametrize(
    ("two_rings", "one_backward"),
    [(False, False), (True, False), (True, True)],
    ids=["one ring", "two rings", "two rings in one backward"],
)
def test_counts_of_two_models_stay_apart(run: Run, two_rings: bool, one_backward: bool) -> None:
    for seen in run(2, two_models, two_rings, one_backward):
        for step, (first, second) in enumerate(seen):
            sums = summed(examples(rank, 10 + step, 2, torch.float64).sum(0) for rank in range(2))
            assert_gradients(first, quotient(sums, 4), f"first model, step {step}")
            sums = summed(examples(rank, step, 4 + 4 * rank, torch.float64).sum(0) for rank in range(2))
            assert_gradients(second, quotient(sums, 12), f"second model, step {step}")
            assert first.last is not None
            assert second.last is not None
            assert (first.last[:2], second.last[:2]) == ((4.0, 4.0), (12.0, 12.0))


def two_groups(seat: Seat) -> list[Step]:
    """Ranks 0 and 1 train one model and 2 and 3 another, each over the ring of its own group."""
    import torch.distributed as dist

    with group(seat):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[seat.rank // 2]
        with rr.Ring.from_group(mine) as ring:
            steps = []
            for normalization in (rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN):
                model = make_model(process_group=mine)
                state = rr.attach(model, ring, normalization)
                state.add_count(4)
                loss = model(examples(seat.rank, 0, 4)).sum()
                (loss / (4 if normalization.kind is Kind.WEIGHTED_MEAN else 1)).backward()
                steps.append(taken(model, state))
            return steps


def test_groups_of_a_world_each_with_its_ring(run: Run) -> None:
    for rank, steps in enumerate(run(4, two_groups)):
        members = [0, 1] if rank < 2 else [2, 3]
        sums = summed(examples(member, 0, 4, torch.float64).sum(0) for member in members)
        for step in steps:
            assert_gradients(step, quotient(sums, 8), f"rank {rank}")
            assert step.last == (8.0, 8.0, 1)
