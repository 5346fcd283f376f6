"""The DDP hook: the gradient is that of one process with the whole batch, whatever DDP does with its buckets."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import ring_reduce as rr
from conftest import Run
from ddp_helpers import (
    FEATURES,
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
from ring_reduce.normalization import Normalization

EXACT = 1e-12  # relative, in float64: some roundings

# Each with what a rank divides its sum of losses by: "global" batch, "local" batch, or nothing.
CONVENTIONS = {
    "global loss, SUM": (rr.SUM, "global"),
    "local mean, MEAN": (rr.MEAN, "local"),
    "local sum, divide_by": (None, "nothing"),
    "local sum, DIVIDE_BY_COUNT": (rr.DIVIDE_BY_COUNT, "nothing"),
    "local mean, WEIGHTED_MEAN": (rr.WEIGHTED_MEAN, "local"),
}


def train(
    seat: Seat, convention: str, sizes: list[int], options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> list[float]:
    """The largest relative difference from the whole batch's gradient, in each of four steps."""
    normalization, loss_divisor = CONVENTIONS[convention]
    total = sum(sizes)
    with group(seat) as ring:
        net, alone = make_net(dtype), make_net()
        model = wrap(net, **options)
        state = rr.attach(model, ring, normalization or rr.divide_by(total))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        differences = []
        for step in range(4):
            alone.load_state_dict({k: v.double() for k, v in net.state_dict().items()})
            batches = [batch_of(rank, step, size, dtype) for rank, size in enumerate(sizes)]
            expected = whole_batch_gradients(alone, [b.double() for b in batches], total)
            if state.normalization.uses_count:
                state.add_count(sizes[seat.rank])
            divisor = {"global": total, "local": sizes[seat.rank], "nothing": 1}[loss_divisor]
            loss_of(model(batches[seat.rank]), divisor).backward()
            differences.append(largest_difference(gradients(net), expected))
            assert state.last is not None
            if step == 3 and "bucket_cap_mb" not in options:  # rebuilt in the steps before
                assert state.last.buckets > 1
            optimizer.step()
            optimizer.zero_grad()
        return differences


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_gradient_is_that_of_the_whole_batch(run: Run, world: int, convention: str, equal: bool) -> None:
    sizes = [6] * world if equal else [3 * rank + 2 for rank in range(world)]
    right = equal or world == 1 or "local mean, MEAN" not in convention
    for differences in run(world, train, convention, sizes, {}):
        if right:
            assert max(differences) < EXACT
        else:  # a mean of means of unequal batches: the test can tell
            assert min(differences) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 25, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
    ],
    ids=repr,
)
def test_every_way_of_making_buckets(run: Run, options: dict[str, Any]) -> None:
    for differences in run(2, train, "local mean, WEIGHTED_MEAN", [3, 7], options):
        assert max(differences) < EXACT


@pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_gradients_of_every_float(run: Run, dtype: torch.dtype, unit: float) -> None:
    """Near those of float64: what the model itself rounds is some 50 units, a wrong divisor would be a factor of 2."""
    for convention in ("local mean, WEIGHTED_MEAN", "local sum, DIVIDE_BY_COUNT"):
        for differences in run(2, train, convention, [4, 4], {}, dtype):
            assert max(differences) < 50 * unit


def unused_parameters(seat: Seat) -> list[float]:
    """In odd steps only rank 0 uses a layer, in even ones none: its gradient is the weighted one, or none at all."""
    differences = []
    sizes = [4, 8]
    with group(seat) as ring:
        net, alone = make_net(), make_net()
        model = wrap(net, find_unused_parameters=True)
        state = rr.attach(model, ring, rr.WEIGHTED_MEAN)
        for step in range(4):
            uses = [step % 2 == 1, False]
            batches = [batch_of(rank, step, size) for rank, size in enumerate(sizes)]
            alone.zero_grad()
            outputs = torch.cat([alone(b, use) for b, use in zip(batches, uses, strict=True)])
            loss_of(outputs, sum(sizes)).backward()
            model.zero_grad()
            state.add_count(sizes[seat.rank])
            loss_of(model(batches[seat.rank], uses[seat.rank]), sizes[seat.rank]).backward()
            assert (net.sometimes.weight.grad is None) == (alone.sometimes.weight.grad is None)
            differences.append(largest_difference(gradients(net), gradients(alone)))
    return differences


def test_unused_parameters(run: Run) -> None:
    for differences in run(2, unused_parameters):
        assert max(differences) < EXACT


def accumulate(seat: Seat, normalization: Normalization, gradient_as_bucket_view: bool) -> list[float]:
    """Three micro-batches of local sums, the first two under no_sync."""
    sizes = [[2, 3, 4], [5, 1, 2]]
    differences = []
    with group(seat) as ring:
        net, alone = make_net(), make_net()
        model = wrap(net, gradient_as_bucket_view=gradient_as_bucket_view)
        state = rr.attach(model, ring, normalization)
        total = sum(map(sum, sizes))
        for step in range(3):
            model.zero_grad()
            batches = [
                [batch_of(rank, 10 * step + i, size) for i, size in enumerate(mine)]
                for rank, mine in enumerate(sizes)
            ]
            for i, batch in enumerate(batches[seat.rank]):
                # no_sync has to wrap the forward, where DDP decides whether to reduce.
                with model.no_sync() if i < 2 else contextlib.nullcontext():
                    if normalization.uses_count:
                        state.add_count(len(batch))
                    loss_of(model(batch), total if normalization == rr.SUM else 1).backward()
            expected = whole_batch_gradients(alone, [b for mine in batches for b in mine], total)
            differences.append(largest_difference(gradients(net), expected))
            assert state.last is not None
            assert state.last.divisor == (1 if normalization == rr.SUM else total)
    return differences


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@pytest.mark.parametrize("normalization", [rr.SUM, rr.DIVIDE_BY_COUNT], ids=repr)
def test_micro_batches_under_no_sync(
    run: Run, normalization: Normalization, gradient_as_bucket_view: bool
) -> None:
    for differences in run(2, accumulate, normalization, gradient_as_bucket_view):
        assert max(differences) < EXACT


def uneven_inputs(seat: Seat, normalization: Normalization) -> list[tuple[float, float]]:
    """Rank r has 2 + 2r batches. The difference from what the ranks that still train make, and the total count."""
    steps = [2 + 2 * rank for rank in range(seat.world)]
    sizes = [3 + rank for rank in range(seat.world)]
    seen = []
    with group(seat) as ring:
        net, alone = make_net(), make_net()
        model = wrap(net)
        state = rr.attach(model, ring, normalization)
        with model.join():
            for step in range(steps[seat.rank]):
                model.zero_grad()
                active = [rank for rank in range(seat.world) if step < steps[rank]]
                batches = [batch_of(rank, step, sizes[rank]) for rank in active]
                counted = sum(len(b) for b in batches)
                expected = whole_batch_gradients(alone, batches, counted)
                if normalization.uses_count:
                    state.add_count(sizes[seat.rank])
                divisor = counted if normalization == rr.SUM else sizes[seat.rank]
                loss_of(model(batch_of(seat.rank, step, sizes[seat.rank])), divisor).backward()
                assert state.last is not None
                seen.append((largest_difference(gradients(net), expected), state.last.total_count))
    return seen


@pytest.mark.parametrize("normalization", [rr.SUM, rr.WEIGHTED_MEAN], ids=repr)
def test_a_joined_rank_counts_0(run: Run, normalization: Normalization) -> None:
    results = run(3, uneven_inputs, normalization)
    for rank, seen in enumerate(results):
        assert len(seen) == 2 + 2 * rank
        assert max(difference for difference, _ in seen) < EXACT
        if normalization.uses_count:
            assert [total for _, total in seen] == [12.0, 12.0, 9.0, 9.0, 5.0, 5.0][: len(seen)]


def several_models(seat: Seat) -> list[float]:
    """Two models with a state each over one ring, and one over a ring of its own, in one step."""
    sizes = [3, 6]
    total = sum(sizes)
    with group(seat) as ring, rr.Ring.from_group(name="third") as third:
        nets = [make_net(seed=seed) for seed in range(3)]
        models = [wrap(net) for net in nets]
        rings = [ring, ring, third]
        normalizations = [rr.WEIGHTED_MEAN, rr.DIVIDE_BY_COUNT, rr.divide_by(total)]
        states = [rr.attach(m, r, n) for m, r, n in zip(models, rings, normalizations, strict=True)]
        mine = batch_of(seat.rank, 0, sizes[seat.rank])
        states[0].add_count(len(mine))
        states[1].add_count(len(mine))
        losses = [loss_of(model(mine), 1) for model in models]
        (losses[0] / len(mine)).backward()
        (losses[1] + losses[2]).backward()
        batches = [batch_of(rank, 0, size) for rank, size in enumerate(sizes)]
        return [
            largest_difference(gradients(net), whole_batch_gradients(make_net(seed=seed), batches, total))
            for seed, net in enumerate(nets)
        ]


def test_several_models(run: Run) -> None:
    for differences in run(2, several_models):
        assert max(differences) < EXACT


def scale_of_losses(seat: Seat) -> list[tuple[float, bool, bool, float]]:
    """Step 1 overflows on rank 0 alone. Each step: scale before, infinite gradients, skipped, total count."""
    seen = []
    with group(seat) as ring:
        net = make_net(torch.float16)
        master = [p.detach().float().requires_grad_() for p in net.parameters()]
        state = rr.attach(model := wrap(net), ring, rr.WEIGHTED_MEAN)
        optimizer = torch.optim.SGD(master, lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        for step in range(3):
            before = [p.clone() for p in master]
            state.add_count(4 + seat.rank)
            factor = 1e8 if step == 1 and seat.rank == 0 else 1.0
            loss = loss_of(model(batch_of(seat.rank, step, 4, torch.float16)).float(), 4) * factor
            model.zero_grad()
            scaler.scale(loss).backward()
            for p, half in zip(master, net.parameters(), strict=True):
                assert half.grad is not None
                p.grad = half.grad.float()
            infinite = not all(bool(torch.isfinite(p.grad).all()) for p in master if p.grad is not None)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = all(torch.equal(a, b) for a, b in zip(before, master, strict=True))
            assert state.last is not None
            seen.append((scale, infinite, skipped, state.last.total_count))
    return seen


def test_all_ranks_skip_a_step_together(run: Run) -> None:
    """An infinity of one rank's float16 gradients reaches all; the skipped step's count does not reach the next."""
    results = run(2, scale_of_losses)
    assert results[0] == results[1]
    assert results[0] == [(64.0, False, False, 9.0), (64.0, True, True, 9.0), (32.0, False, False, 9.0)]


def frozen_layers(seat: Seat) -> float:
    with group(seat) as ring:
        net, alone = make_net(), make_net()
        for module in (net, alone):
            module.second.requires_grad_(False)
        model = wrap(net)
        rr.attach(model, ring, rr.MEAN)
        loss_of(model(batch_of(seat.rank, 0, 4)), 4).backward()
        batches = [batch_of(rank, 0, 4) for rank in range(seat.world)]
        return largest_difference(gradients(net), whole_batch_gradients(alone, batches, 4 * seat.world))


def test_frozen_layers(run: Run) -> None:
    assert max(run(2, frozen_layers)) < EXACT


def registered_by_hand(seat: Seat) -> list[float]:
    """As torch's documentation registers a hook; the bits are those of Ring.all_reduce."""
    with group(seat) as ring:
        model = wrap(nn.Linear(FEATURES, 1, bias=False, dtype=torch.float32), bucket_cap_mb=25)
        state = rr.RingHookState(ring, rr.MEAN)
        model.register_comm_hook(state, rr.ring_hook)
        x = batch_of(seat.rank, 0, 5, torch.float32)
        alone = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float32)
        alone.load_state_dict(model.module.state_dict())
        alone(x).sum().backward()
        model(x).sum().backward()
        assert model.module.weight.grad is not None
        assert alone.weight.grad is not None
        assert torch.equal(ring.all_reduce(alone.weight.grad, rr.MEAN), model.module.weight.grad)
        assert state.last is not None
        assert (state.last.total_count, state.last.divisor, state.last.buckets) == (0.0, 2.0, 1)
        bits: list[float] = model.module.weight.grad[0].tolist()
        return bits


def test_a_hook_registered_by_hand(run: Run) -> None:
    first, second = run(2, registered_by_hand)
    assert first == second
