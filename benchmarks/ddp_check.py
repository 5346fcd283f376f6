"""Whether a contender reduced right: a benchmark of a wrong result is worthless.

In one more backward each rank keeps the gradients that it puts in, as autograd hands them over. They then travel as
they are, in broadcasts, which add nothing, and their mean in float64 is what each element is compared with. The bound
is of rounding alone (rounding.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ddp_result import UNREDUCED, Check
from .ddp_trainer import Trainer
from .ddp_workloads import Batch
from .rounding import rounding


def check(trainers: dict[str, Trainer], start: nn.Module, batch: Batch) -> dict[str, Check]:
    """What is wrong with each contender that reduces; all ranks call it, after the timed steps.

    All models then get the parameters of ``start`` and reduce the gradients of ``batch`` once more.
    """
    differing = {name: bits_unlike_rank_0(trainer.module.parameters()) for name, trainer in trainers.items()}
    found = {}
    own: list[Tensor] = []
    for name in sorted(trainers, key=lambda name: name != UNREDUCED):
        trainer = trainers[name]
        trainer.module.load_state_dict(start.state_dict())
        local = _contributions(trainer, batch)
        own = own or local
        if name == UNREDUCED:
            continue
        gradients = [parameter.grad for parameter in trainer.module.parameters()]
        outside = sum(_outside(g, x) for g, x in zip(gradients, local, strict=True))
        found[name] = Check(
            outside=_sum_over_ranks(outside),
            differing=differing[name] + bits_unlike_rank_0(g for g in gradients if g is not None),
            strayed=_distance(local, own),
        )
    return found


def _contributions(trainer: Trainer, batch: Batch) -> list[Tensor]:
    """Each parameter's gradient on this rank, copied before anything reduces it; one backward."""
    parameters = list(trainer.module.parameters())
    copies = [torch.full_like(parameter, math.nan) for parameter in parameters]
    hooks = [p.register_hook(_keep_in(copy)) for p, copy in zip(parameters, copies, strict=True)]
    trainer.backward(batch)
    for hook in hooks:
        hook.remove()
    return copies


def _keep_in(copy: Tensor) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:  # what a hook returns would replace the gradient
        copy.copy_(gradient)

    return hook


def _outside(got: Tensor | None, local: Tensor) -> int:
    """How many elements are farther from the mean of the ranks' ``local`` than rounding explains, NaN included."""
    world = dist.get_world_size()
    total, magnitude = (torch.zeros_like(local, dtype=torch.float64) for _ in range(2))
    for rank in range(world):
        part = local.clone()
        dist.broadcast(part, src=rank)
        total += part
        magnitude += part.double().abs()
    if got is None:
        return local.numel()
    return int((~((got - total / world).abs() <= rounding(magnitude / world, world, local.dtype))).sum())


def bits_unlike_rank_0(tensors: Iterable[Tensor]) -> int:
    """How many elements have other bits than on rank 0, those of all ranks together."""
    differing = 0
    for x in tensors:
        bits = x.detach().reshape(-1, 1).view(torch.uint8)  # a row an element
        of_rank_0 = bits.clone()
        dist.broadcast(of_rank_0, src=0)
        differing += int((bits != of_rank_0).any(dim=1).sum())
    return _sum_over_ranks(differing)


def _distance(local: list[Tensor], reference: list[Tensor]) -> float:
    """The norm of the difference over that of ``reference``, the largest of all ranks; infinity for a NaN."""
    squares = [
        (float((x - y).double().square().sum()), float(y.double().square().sum()))
        for x, y in zip(local, reference, strict=True)
    ]
    distance = math.sqrt(sum(part for part, _ in squares) / max(sum(part for _, part in squares), 1e-300))
    largest = torch.tensor([math.inf if math.isnan(distance) else distance], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _sum_over_ranks(value: int) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total)
