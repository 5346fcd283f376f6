"""DDP on a GPU with the ring's hook: the steps of one process with the whole batch, to the bit."""

from __future__ import annotations

from typing import Any

import torch
from ranks import Setting, check, run

import ring_reduce as rr
from ddp_cases import ONE_BLOCK_MB, Blocks, Case, assert_gradients, every_normalization, examples, taken
from ddp_helpers import batch_of, gradients, loss_of, make_net, wrap

STEPS = 4  # DDP rebuilds its buckets after the first
_SLEEP_CYCLES = 20_000_000  # some 10 ms


class Late(torch.autograd.Function):
    """The identity, whose gradient the device has late."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(_SLEEP_CYCLES)
        return gradient


def backward(
    case: Case, model: Any, state: rr.RingHookState, step: int, *, late: bool, on_device: bool
) -> None:
    """One step's gradients, as Case.backward makes them on the CPU. The host reads nothing of the device."""
    rank, device = state.ring.rank, state.ring.device
    size = case.sizes[rank]
    model.zero_grad()
    if case.normalization.uses_count:
        state.add_count(torch.tensor(size, device=device) if on_device else size)
    x = examples(rank, step, size, case.dtype).to(device)
    outputs = model(x)
    outputs = Late.apply(outputs) if late else outputs  # type: ignore[no-untyped-call]
    (outputs.sum() / case.loss_divisor(rank)).backward()


def train(ring: rr.Ring, case: Case, *, late: bool = False, on_device: bool = False) -> None:
    """Some steps, each against the exact gradient."""
    model = wrap(Blocks(case.dtype).to(ring.device), bucket_cap_mb=ONE_BLOCK_MB)
    state = rr.attach(model, ring, case.normalization)
    for step in range(STEPS):
        backward(case, model, state, step, late=late, on_device=on_device)
        seen = taken(model, state)
        on_host = [None if gradient is None else gradient.cpu() for gradient in seen.gradients]
        what = f"{case.normalization!r}, {case.dtype}, step {step}"
        assert_gradients(type(seen)(on_host, seen.last), case.expected(step), what)
        assert seen.last is not None, what
        assert seen.last[:2] == case.last(), what
        assert seen.last[2] > 1 or step == 0, f"{what}: one bucket overlaps nothing"


def exact_steps(ring: rr.Ring) -> str:
    """Powers of two, so that no sum rounds."""
    equal, unequal = (4,) * ring.world, tuple(2 << rank for rank in range(ring.world))
    for dtype in (torch.float32, torch.bfloat16):
        for normalization in every_normalization(sum(unequal)):
            sizes = equal if normalization in (rr.SUM, rr.MEAN) else unequal
            train(ring, Case(normalization, sizes, dtype))
    for normalization in (rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN):
        train(ring, Case(normalization, unequal), on_device=True)
    return f"{STEPS} steps each"


def side_stream(ring: rr.Ring) -> str:
    """Forward and backward on a stream of the user's, and gradients that come late: what is read early is of the step
    before, which has other values (pytorch issue 37790)."""
    case = Case(rr.DIVIDE_BY_COUNT, (4,) * ring.world)
    train(ring, case, late=True)
    mine = torch.cuda.Stream()
    mine.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(mine):
        train(ring, case, late=True)
        train(ring, case, late=True, on_device=True)
    torch.cuda.current_stream().wait_stream(mine)
    return ""


def mixed_precision(ring: rr.Ring) -> str:
    """An infinity in the gradients of one rank reaches all, and all skip the step, whose count reaches no other."""
    net = make_net(torch.float16).to(ring.device)
    master = [p.detach().float().requires_grad_() for p in net.parameters()]
    state = rr.attach(model := wrap(net), ring, rr.WEIGHTED_MEAN)
    optimizer = torch.optim.SGD(master, lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=1000)
    total = float(sum(4 + rank for rank in range(ring.world)))
    for step, expected in enumerate([(64.0, False), (64.0, True), (32.0, False)]):
        before, scale = [p.clone() for p in master], scaler.get_scale()
        state.add_count(4 + ring.rank)
        factor = 1e8 if step == 1 and ring.rank == 0 else 1.0
        outputs = model(batch_of(ring.rank, step, 4, torch.float16).to(ring.device))
        model.zero_grad()
        scaler.scale(loss_of(outputs.float(), 4) * factor).backward()
        infinite = not all(bool(gradient.isfinite().all()) for gradient in gradients(model))
        for parameter, half in zip(master, net.parameters(), strict=True):
            parameter.grad = None if half.grad is None else half.grad.float()
        scaler.step(optimizer)
        scaler.update()
        skipped = all(torch.equal(old, new) for old, new in zip(before, master, strict=True))
        assert (scale, infinite) == expected, (step, scale, infinite)
        assert skipped == infinite, step
        assert state.last is not None
        assert state.last.total_count == total, (step, state.last)
    return ""


def checks(ring: rr.Ring, setting: Setting) -> None:
    check(ring, setting, "exact DDP steps", exact_steps)
    check(ring, setting, "DDP on a side stream", side_stream)
    check(ring, setting, "DDP in float16 with GradScaler", mixed_precision)


if __name__ == "__main__":
    run(checks)
