"""Modules whose output for a sample depends on what else is in the batch: no divisor makes up for those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batches import copied, map_tensors, tensors_of
from .state import SEED, alone

THE_LOSS = "the loss itself"

Call = tuple[tuple[Any, ...], dict[str, Any]]  # of a module: its arguments


def find_suspects(
    model: nn.Module,
    losses: Callable[[nn.Module, Any], Tensor],
    whole: Any,
    parts: Sequence[Any],
    tolerance: float,
) -> tuple[str, ...]:
    """Names with classes, such as ``layers.1: BatchNorm1d``; the innermost modules only.

    Each module is given the input that it has for the whole batch, once whole and once cut at the micro-batches, so
    that one behind another is found as well. If none depends on the batch but the losses do, it is the loss itself.
    """
    values, calls = _record(model, losses, whole)
    recorded = [_record(model, losses, part) for part in parts]
    suspects: list[str] = []
    found: list[str] = []
    for name, module in reversed(list(model.named_modules())):  # what is inside a module comes before it
        inside = f"{name}." if name else ""
        if any(each.startswith(inside) for each in found) or module not in calls:
            continue
        parts_calls = [part_calls[module] for _, part_calls in recorded if module in part_calls]
        if len(parts_calls) == len(parts) and _depends(model, module, calls[module], parts_calls, tolerance):
            found.append(name)
            suspects.append(f"{name or 'the model itself'}: {type(module).__name__}")
    if not suspects and _differ(values, torch.cat([each for each, _ in recorded]), tolerance):
        suspects.append(THE_LOSS)
    return tuple(reversed(suspects))


def _record(
    model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], batch: Any
) -> tuple[Tensor, dict[nn.Module, Call]]:
    """The losses, and each module's arguments in its first call. Copies: what follows may work in place."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module not in calls:
            calls[module] = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        with alone(model), torch.no_grad():
            return losses(model, copied(batch)).detach(), calls
    finally:
        for handle in handles:
            handle.remove()


def _depends(
    model: nn.Module, module: nn.Module, call: Call, parts_calls: Sequence[Call], tolerance: float
) -> bool:
    """Whether the module's outputs for the pieces are other than the pieces of its output."""
    pieces = _cut(call, parts_calls)
    if pieces is None:
        return False
    try:
        outputs = [_outputs(model, module, each) for each in (*pieces, call)]
    except Exception:  # some modules can't be called but by their model
        return False
    whole = outputs.pop()
    for index, expected in enumerate(whole):
        joined = _join([each[index] for each in outputs if index < len(each)], expected)
        if joined is not None and _differ(joined, expected, tolerance):
            return True
    return False


def _outputs(model: nn.Module, module: nn.Module, call: Call) -> list[Tensor]:
    args, kwargs = map_tensors(call, Tensor.clone)
    with alone(model), torch.no_grad():
        torch.manual_seed(SEED)
        return [tensor.detach().clone() for _, tensor in tensors_of(module(*args, **kwargs))]


def _cut(call: Call, parts_calls: Sequence[Call]) -> list[Call] | None:
    """The arguments, cut where the micro-batches meet; None if the shapes don't tell where."""
    whole = [tensor for _, tensor in tensors_of(call)]
    parts = [[tensor for _, tensor in tensors_of(each)] for each in parts_calls]
    if any(len(each) != len(whole) for each in parts):
        return None
    cut: list[tuple[Tensor, ...]] = []
    for index, tensor in enumerate(whole):
        sizes = [each[index].shape for each in parts]
        if len(parts) > 1 and all(size == tensor.shape for size in sizes):
            cut.append((tensor,) * len(parts))  # a mask, say
            continue
        dim = _meeting_dim(sizes, tensor.shape)
        if dim is None:
            return None
        cut.append(tensor.split([size[dim] for size in sizes], dim))
    result: list[Call] = []
    for piece in range(len(parts)):
        result.append(_replaced(call, [pieces[piece] for pieces in cut]))
    return result


def _replaced(call: Call, tensors: Sequence[Tensor]) -> Call:
    """The same call with other tensors."""
    following = iter(tensors)
    result: Call = map_tensors(call, lambda _: next(following))
    return result


def _join(parts: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """The parts along the dim in which they add up to ``like``; None if there is none."""
    dim = _meeting_dim([part.shape for part in parts], like.shape)
    return None if dim is None else torch.cat(list(parts), dim)


def _meeting_dim(parts: Sequence[torch.Size], whole: torch.Size) -> int | None:
    """The dim along which tensors of these shapes, put together, have the whole shape."""
    if any(len(part) != len(whole) for part in parts):
        return None
    for dim in range(len(whole)):
        others = [size for index, size in enumerate(whole) if index != dim]
        fits = all([s for i, s in enumerate(part) if i != dim] == others for part in parts)
        if fits and sum(part[dim] for part in parts) == whole[dim]:
            return dim
    return None


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or not one.is_floating_point() or not one.numel():
        return False
    scale = float(other.double().abs().max())
    return float((one.double() - other.double()).abs().max()) > tolerance * scale
