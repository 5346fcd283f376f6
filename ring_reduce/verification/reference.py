"""The right gradient of a step, computed in one process: of the whole batch, and of each micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ring_reduce.errors import VerifyError, text_of

from .batches import concatenate, constant_tensors, copied, digest
from .layout import Layout
from .measured import Vector
from .state import SEED, alone
from .suspects import find_suspects
from .wording import joined_in_words

Losses = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one rank."""

    rank: int
    index: int
    batch: Any
    samples: int

    @property
    def label(self) -> str:
        """For errors."""
        return f"micro-batch {self.index} of rank {self.rank}"


@dataclass(frozen=True)
class Part:
    """A gradient of a mean loss, and what the mean is over."""

    gradient: Vector
    count: int
    loss: float


@dataclass(frozen=True)
class Reference:
    """What one process makes of the data of all ranks."""

    whole: Part
    parts: Vector  # [K, P] gradients of the summed losses of the micro-batches
    counts: tuple[int, ...]  # of the micro-batches
    suspects: tuple[str, ...]
    twins: tuple[int, int] | None  # ranks with the same data
    constant: tuple[str, ...]  # tensors that are the same in all micro-batches


def compute_reference(
    model: nn.Module, losses: Losses, micro_batches: Sequence[MicroBatch], layout: Layout, tolerance: float
) -> Reference:
    """Forward and backward of the concatenated batch, then of each micro-batch alone, in the model's own types.

    ``torch.autograd.grad`` leaves ``p.grad`` alone, and with it the hooks of a DistributedDataParallel that holds the
    same parameters. Raises VerifyError for losses that verify can't use.
    """
    batch = concatenate([each.batch for each in micro_batches], [each.label for each in micro_batches])
    _check_repeatable(model, losses, micro_batches, tolerance)
    parts = np.zeros((len(micro_batches), layout.length))
    counts = tuple(
        _write_part(row, model, losses, each, layout) for row, each in zip(parts, micro_batches, strict=True)
    )
    constant = constant_tensors([each.batch for each in micro_batches if each.samples])
    whole = _whole_gradient(model, losses, batch, layout, constant)
    if sum(counts) != whole.count:
        raise VerifyError(
            f"losses() returned {whole.count} losses for the whole batch, but {' + '.join(map(str, counts))} = "
            f"{sum(counts)} for its micro-batches; it has to return one loss for each counted sample or token, not a "
            f"mean or a sum over them"
        )
    suspects: tuple[str, ...] = ()
    if not _adds_up(whole, parts, tolerance):
        batches = [each.batch for each in micro_batches if each.samples]
        with contextlib.suppress(Exception):  # the verdict can do without them
            suspects = find_suspects(model, losses, batch, batches, tolerance)
    return Reference(whole, parts, counts, suspects, _twins(micro_batches), constant)


def _twins(micro_batches: Sequence[MicroBatch]) -> tuple[int, int] | None:
    """Two ranks whose data has the same bytes."""
    by_rank: dict[int, list[Any]] = {}
    for each in micro_batches:
        if each.samples:
            by_rank.setdefault(each.rank, []).append(each.batch)
    seen: dict[bytes, int] = {}
    for rank, batches in by_rank.items():
        first = seen.setdefault(digest(batches), rank)
        if first != rank:
            return first, rank
    return None


def _whole_gradient(
    model: nn.Module, losses: Losses, batch: Any, layout: Layout, constant: tuple[str, ...]
) -> Part:
    """Of all micro-batches as one. A tensor that is no sample data does not fit it."""
    try:
        return _mean_gradient(model, losses, batch, layout, "the whole batch")
    except VerifyError:
        raise
    except Exception as error:
        if not constant:
            raise
        raise VerifyError(
            f"losses() raised {text_of(error)} for the whole batch. {joined_in_words(constant)}"
        ) from error


def _write_part(row: Vector, model: nn.Module, losses: Losses, each: MicroBatch, layout: Layout) -> int:
    """The gradient of the micro-batch's summed loss, into ``row`` of zeros. Returns the count."""
    if each.samples == 0:  # many modules refuse it
        return 0
    part = _mean_gradient(model, losses, each.batch, layout, each.label)
    np.multiply(part.gradient, part.count, out=row)
    return part.count


def _mean_gradient(model: nn.Module, losses: Losses, batch: Any, layout: Layout, label: str) -> Part:
    """Of a mean rather than a sum, whose gradient may be out of range in 16 bits."""
    with alone(model):
        values = losses(model, copied(batch))
        _check_losses(values, label)
        if values.numel() == 0:
            return Part(np.zeros(layout.length), 0, 0.0)
        gradients = torch.autograd.grad(values.mean(), layout.parameters, allow_unused=True)
    return Part(layout.vector(gradients), values.numel(), float(values.detach().double().mean()))


def _check_losses(values: Any, label: str) -> None:
    if not isinstance(values, Tensor):
        raise VerifyError(
            f"losses() returned a {type(values).__name__} for {label}; it has to return a 1-D tensor"
        )
    if values.ndim != 1:
        raise VerifyError(
            f"losses() returned a tensor of shape {tuple(values.shape)} for {label}; it has to be 1-D, with one loss "
            f'for each counted sample or token: reduction="none", then flatten() and leave out the ignored ones'
        )
    if values.numel() and not values.is_floating_point():
        raise VerifyError(f"losses() returned {values.dtype} for {label}; losses are floating-point numbers")
    if values.numel() and not values.requires_grad:
        raise VerifyError(
            f"losses() returned a tensor without gradient for {label}: it does not depend on a trainable parameter, or "
            f"was detached, taken through item() or numpy(), or computed under no_grad()"
        )


def _check_repeatable(
    model: nn.Module, losses: Losses, micro_batches: Sequence[MicroBatch], tolerance: float
) -> None:
    """Raises VerifyError if a second forward with other random numbers gives other losses."""
    first = next((each for each in micro_batches if each.samples), None)
    if first is None:
        raise VerifyError("no rank has a sample: every micro-batch is empty")
    values = []
    for seed in (SEED, SEED + 1):
        with alone(model), torch.no_grad():
            torch.manual_seed(seed)
            values.append(losses(model, copied(first.batch)))
    if not all(isinstance(each, Tensor) and each.numel() for each in values):
        return  # said where the losses are used
    difference = float((values[0] - values[1]).abs().max())
    if difference > tolerance * float(values[0].abs().max()):
        raise VerifyError(
            f"losses() gave other values for {first.label} with other random numbers (up to {difference:.3g} apart), "
            f"so that no gradient is the right one; verify switches torch's dropout modules off, and functional ones "
            f"and your own are yours to switch off"
        )


def _adds_up(whole: Part, parts: Vector, tolerance: float) -> bool:
    """Whether no element of the gradient of the whole batch is more than the sum of its parts."""
    if whole.count == 0:
        return True
    gap, size = -whole.gradient, np.abs(whole.gradient)
    for part in parts:  # one after the other, for the sake of memory
        gap += part / whole.count
        size += np.abs(part) / whole.count
    return not np.any(np.abs(gap) > tolerance * size)
