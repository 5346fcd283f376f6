"""The contenders of ``bench ddp``: who reduces the gradients of a training step, and the step itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr

from .ddp_result import UNREDUCED
from .ddp_workloads import Batch

LEARNING_RATE = 1e-3  # so small that no network here diverges on random labels


@dataclass(frozen=True)
class Groups:
    """What reducers work with; the Gloo group is torch's default one."""

    ring: rr.Ring
    nccl: dist.ProcessGroup | None


class Trainer:
    """A model of its own, of which one contender reduces the gradients."""

    def __init__(self, module: nn.Module, reducer: Reducer, groups: Groups) -> None:
        self.module = module
        self._model = reducer(module, groups)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def step(self, batch: Batch) -> None:
        """A whole step: gradients dropped, forward, loss, backward, update."""
        self.backward(batch)
        self._optimizer.step()

    def backward(self, batch: Batch) -> None:
        """The step but for the update: leaves the reduced gradient of the mean loss."""
        inputs, classes = batch
        self._optimizer.zero_grad()
        loss: Tensor = F.cross_entropy(self._model(inputs), classes)
        loss.backward()


Reducer = Callable[[nn.Module, Groups], nn.Module]


def bare(module: nn.Module, groups: Groups) -> nn.Module:
    """No reduction: what a step takes when ranks share nothing but the machine."""
    return module


def ring(module: nn.Module, groups: Groups) -> nn.Module:
    """DDP with the ring's hook, as the README shows it."""
    model = DistributedDataParallel(module)
    rr.attach(model, groups.ring, rr.MEAN)
    return model


def gloo(module: nn.Module, groups: Groups) -> nn.Module:
    """DDP's own reducer over Gloo."""
    return DistributedDataParallel(module)


def nccl(module: nn.Module, groups: Groups) -> nn.Module:
    """DDP's own reducer over NCCL."""
    assert groups.nccl is not None
    return DistributedDataParallel(module, process_group=groups.nccl)


REDUCERS: dict[str, Reducer] = {UNREDUCED: bare, "ring": ring, "gloo": gloo, "nccl": nccl}
CONTENDERS = {"cpu": (UNREDUCED, "ring", "gloo"), "cuda": (UNREDUCED, "ring", "nccl")}


def why_absent(name: str, groups: Groups, device: str) -> str | None:
    """Why a contender can't run on ``device``, in one line; None if it can. All ranks ask alike."""
    if name == "ring":
        try:
            groups.ring.all_reduce(torch.ones(1, device=device))
        except TypeError as error:  # the ring refuses such a tensor, and goes on
            return f"the ring can't run on {device}: {error}"
    return None
