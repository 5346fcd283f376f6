"""A network that trains under DDP takes the steps of one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_cases import Case, every_normalization
from ddp_helpers import (
    Net,
    batch_of,
    gradients,
    group,
    largest_difference,
    loss_of,
    make_net,
    whole_batch_gradients,
    wrap,
)
from launch import Seat

EXACT = 1e-12  # relative, in float64: some roundings


def train_net(ring: rr.Ring, case: Case) -> tuple[list[float], Net]:
    """The largest relative difference from the whole batch's gradient in each of four steps, and the network."""
    net, alone = make_net(), make_net()
    model = wrap(net)
    state = rr.attach(model, ring, case.normalization)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    differences = []
    for step in range(4):
        alone.load_state_dict(net.state_dict())
        batches = [batch_of(rank, step, size) for rank, size in enumerate(case.sizes)]
        if case.normalization.uses_count:
            state.add_count(case.sizes[ring.rank])
        loss_of(model(batches[ring.rank]), case.loss_divisor(ring.rank)).backward()
        differences.append(largest_difference(gradients(net), whole_batch_gradients(alone, batches)))
        optimizer.step()
        optimizer.zero_grad()
    assert state.last is not None
    assert state.last.buckets > 1
    return differences, net


def train_nets(seat: Seat, sizes: tuple[int, ...]) -> dict[str, tuple[list[float], dict[str, Any]]]:
    """By normalization: the differences, and the parameters in the end."""
    trained = {}
    with group(seat) as ring:
        for normalization in every_normalization(sum(sizes)):
            differences, net = train_net(ring, Case(normalization, sizes))
            trained[repr(normalization)] = differences, net.state_dict()
    return trained


@pytest.mark.parametrize("sizes", [(6, 6), (2, 5), (6, 6, 6, 6), (2, 5, 8, 11)], ids=str)
def test_every_step_is_that_of_the_whole_batch_on_every_rank(run: Run, sizes: tuple[int, ...]) -> None:
    ranks = run(len(sizes), train_nets, sizes)
    for name, (differences, parameters) in ranks[0].items():
        if name == "MEAN" and len({*sizes}) > 1:  # a mean of means of unequal batches: the test can tell
            assert min(differences) > 1e-3
        else:
            assert max(differences) < EXACT, name
        for others in ranks[1:]:
            for key, value in others[name][1].items():
                assert torch.equal(value, parameters[key]), f"{name}: ranks drift apart in {key}"


def scaled_step(
    rank: int, step: int, model: Any, master: list[torch.Tensor], scaler: torch.amp.GradScaler
) -> bool:
    """A backward of the scaled loss, which overflows in step 1 of rank 0; whether a gradient is infinite."""
    factor = 1e8 if step == 1 and rank == 0 else 1.0
    loss = loss_of(model(batch_of(rank, step, 4, torch.float16)).float(), 4) * factor
    model.zero_grad()
    scaler.scale(loss).backward()
    for parameter, half in zip(master, model.parameters(), strict=True):
        parameter.grad = half.grad.float()
    return not all(bool(gradient.isfinite().all()) for gradient in gradients(model))


def scale_of_losses(seat: Seat) -> list[tuple[float, bool, bool, float]]:
    """Of each step: scale before, infinite gradients, skipped, total count."""
    seen = []
    with group(seat) as ring:
        net = make_net(torch.float16)
        master = [p.detach().float().requires_grad_() for p in net.parameters()]
        state = rr.attach(model := wrap(net), ring, rr.WEIGHTED_MEAN)
        optimizer = torch.optim.SGD(master, lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        for step in range(3):
            before, scale = [p.clone() for p in master], scaler.get_scale()
            state.add_count(4 + seat.rank)
            infinite = scaled_step(seat.rank, step, model, master, scaler)
            scaler.step(optimizer)
            scaler.update()
            skipped = all(torch.equal(a, b) for a, b in zip(before, master, strict=True))
            assert state.last is not None
            seen.append((scale, infinite, skipped, state.last.total_count))
    return seen


def test_an_infinity_of_one_rank_makes_all_skip_the_step(run: Run) -> None:
    """It reaches all in float16 gradients; the skipped step's count does not reach the next."""
    for seen in run(2, scale_of_losses):
        assert seen == [(64.0, False, False, 9.0), (64.0, True, True, 9.0), (32.0, False, False, 9.0)]
