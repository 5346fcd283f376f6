"""What a check changes in a model and puts back: dropout, buffers, hooks of parameters, random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SEED = 0


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Dropout off inside; afterwards parameters, buffers, modes and random state are as before, gradients None.

    Gives copies of the parameters by name. Dropout is off by its probability, not by ``eval()``, since a step may call
    ``train()``.
    """
    copies = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters())
    modes = [(module, module.training) for module in model.modules()]
    probabilities = [(module, name, getattr(module, name)) for module, name in _dropouts(model)]
    buffers = _Buffers(model)
    devices = sorted({p.device.index or 0 for p in parameters.values() if p.device.type == "cuda"})
    try:
        for module, name, _ in probabilities:
            setattr(module, name, 0.0)
        clear_gradients(model)
        with torch.random.fork_rng(devices=devices):
            yield copies
    finally:
        clear_gradients(model)
        buffers.restore()
        for module, name, probability in probabilities:
            setattr(module, name, probability)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for name, parameter in parameters.items():
                if not same(parameter, copies[name]):
                    parameter.copy_(copies[name])


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all elements are equal; NaN is equal to NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def clear_gradients(model: nn.Module) -> None:
    """Sets all to None."""
    for parameter in model.parameters():
        parameter.grad = None


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules of torch that drop, with the name of their probability."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, "p"
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            yield module, "dropout"


class _Buffers:
    """The buffers of a model, such as a batch norm's running statistics, and their content."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for module, name, buffer, content in self._saved:
                if buffer is not None and content is not None and not same(buffer, content):
                    buffer.copy_(content)
                module._buffers[name] = buffer


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """The model as of one process: no hook of a parameter and no batch norm that would wait for other ranks.

    Restores the buffers, so that each forward starts from the same.
    """
    buffers = _Buffers(model)
    hooked: list[tuple[Any, Any]] = []
    synchronized = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    try:
        for parameter in model.parameters():
            if parameter._backward_hooks:
                hooked.append((parameter, parameter._backward_hooks))
                parameter._backward_hooks = None
        for module in synchronized:
            module.__dict__["forward"] = lambda x, module=module: nn.BatchNorm1d.forward(module, x)
        torch.manual_seed(SEED)
        with torch.enable_grad():
            yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks
        for module in synchronized:
            del module.__dict__["forward"]
        buffers.restore()
