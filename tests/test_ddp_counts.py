"""Whose count enters a reduced backward: ranks that have left join(), ranks that count 0, models that share a ring."""

from __future__ import annotations

from typing import Any

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

JOIN_STEPS = [0, 2, 4]  # of each rank: one never trains, one leaves after the buckets were rebuilt
JOIN_SIZES = (4, 2, 8)


def join_uneven(seat: Seat, normalization: Normalization, sizes: tuple[int, ...]) -> list[Step]:
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, normalization)
        case = Case(normalization, sizes)
        with model.join():
            return [case.backward(model, state, seat.rank, step) for step in range(JOIN_STEPS[seat.rank])]


def still_training(step: int) -> list[int]:
    return [rank for rank, steps in enumerate(JOIN_STEPS) if step < steps]


@pytest.mark.parametrize("normalization", [rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN], ids=repr)
def test_join_divides_by_what_still_trains(run: Run, normalization: Normalization) -> None:
    for rank, steps in enumerate(run(3, join_uneven, normalization, JOIN_SIZES)):
        assert len(steps) == JOIN_STEPS[rank]
        for step, seen in enumerate(steps):
            active = still_training(step)
            sums = summed(examples(r, step, JOIN_SIZES[r], torch.float64).sum(0) for r in active)
            total = sum(JOIN_SIZES[r] for r in active)
            assert_gradients(seen, quotient(sums, total), f"rank {rank}, step {step}, {total} examples")
            assert seen.last is not None
            assert seen.last[:2] == (total, total)


def test_join_and_mean_divides_by_the_initial_world(run: Run) -> None:
    for rank, steps in enumerate(run(3, join_uneven, rr.MEAN, JOIN_SIZES)):
        for step, seen in enumerate(steps):
            means = [examples(r, step, JOIN_SIZES[r], torch.float64).mean(0) for r in still_training(step)]
            assert_gradients(seen, quotient(summed(means), 3), f"rank {rank}, step {step}")
            assert seen.last is not None
            assert seen.last[:2] == (0.0, 3.0)


def mean_over_active(seat: Seat) -> list[Step]:
    """Local means, and a count of 1 for each rank that trains."""
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
        seen = []
        with model.join():
            for step in range(JOIN_STEPS[seat.rank]):
                model.zero_grad()
                state.add_count(1)
                model(examples(seat.rank, step, JOIN_SIZES[seat.rank])).mean().backward()
                seen.append(taken(model, state))
        return seen


def test_join_and_a_count_of_1_gives_the_mean_over_active_ranks(run: Run) -> None:
    for rank, steps in enumerate(run(3, mean_over_active)):
        for step, seen in enumerate(steps):
            active = still_training(step)
            means = [examples(r, step, JOIN_SIZES[r], torch.float64).mean(0) for r in active]
            assert_gradients(seen, quotient(summed(means), len(active)), f"rank {rank}, step {step}")


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


def ignored_labels(seat: Seat, everyone: bool) -> tuple[bool, list[torch.Tensor], Any]:
    """Rank 1, or all, have no label that counts. Whether the own gradient is NaN, the gradient, and ``last``."""
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
        gradient = [w.grad.clone() for w in model.module.weights]
        own = alone.weights[0].grad
        assert own is not None
        return bool(own.isnan().any()), [own, *gradient], state.last


def test_a_rank_without_labels_leaves_the_others_right(run: Run) -> None:
    results = run(2, ignored_labels, False)
    assert [nan for nan, _, _ in results] == [False, True], "rank 1 brings NaN along"
    own = results[0][1][0]
    for _, (_, reduced), last in results:
        assert torch.equal(reduced, own), "rank 0's own gradient, times 4 and divided by 4"
        assert last == rr.ddp.Reduction(4.0, 4.0, 1)


def test_without_any_label_the_gradient_is_0(run: Run) -> None:
    for nan, (_, reduced), last in run(2, ignored_labels, True):
        assert nan
        assert torch.equal(reduced, torch.zeros_like(reduced))
        assert last == rr.ddp.Reduction(0.0, 0.0, 1)


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


def two_models(seat: Seat, two_rings: bool) -> list[list[Step]]:
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
            for loss in losses:
                loss.backward()
            seen.append([taken(m, s) for m, s in zip(models, states, strict=True)])
    return seen


@pytest.mark.parametrize("two_rings", [False, True], ids=["one ring", "two rings"])
def test_counts_of_two_models_stay_apart(run: Run, two_rings: bool) -> None:
    for seen in run(2, two_models, two_rings):
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
