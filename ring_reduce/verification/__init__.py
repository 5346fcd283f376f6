"""One step of the user's way against one process with the whole batch, and the name of what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ring_reduce.errors import VerifyError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from .report import Report

__all__ = ["Job", "VerifyError", "verify"]


@dataclass(frozen=True)
class Job:
    """What a step is told: who takes it, and how many micro-batches a rank's group is planned to have.

    A short group has fewer.
    """

    rank: int
    world: int
    micro_batches: int


def verify(
    model: torch.nn.Module,
    batches: Sequence[Any],
    losses: Callable[[torch.nn.Module, Any], torch.Tensor],
    step: Callable[[torch.nn.Module, Sequence[Any], Job], Any],
    *,
    group: dist.ProcessGroup | None = None,
    micro_batches: int | None = None,
    sample: int | None = None,
    tolerance: float | None = None,
) -> Report:
    """Checks the divisor of one training step: its gradients against those of one process with the whole batch.

    Every rank of ``group`` calls it with its own micro-batches; a process without a process group checks alone. Right
    is the gradient of the mean of all losses of all ranks. Rank 0 computes it from the batches of all, which travel to
    it, in one forward; and that of each micro-batch alone, to tell a wrong weighting from a wrong factor. It does so
    alone, so that nothing which is under test (ranks, group, hooks) has a part in the reference.

    ::

        def step(model, batches, job):
            ddp = DistributedDataParallel(model)
            for batch in batches:
                with contextlib.nullcontext() if batch is batches[-1] else ddp.no_sync():
                    (losses(ddp, batch).mean() / job.micro_batches).backward()

        report = rr.verify(model, batches, losses, step)
        print(report)

    Dropout of torch's modules is off inside; parameters, buffers, modes and random numbers are afterwards what they
    were, and all gradients None. The mode (``train``, ``eval``) is as given. A hook of a parameter is part of the step,
    not of the reference.

    Args:
        model: not wrapped in DistributedDataParallel, with the same parameters on every rank, and on rank 0 small
            enough for a batch of all ranks.
        batches: this rank's micro-batches: tensors, or tuples, lists and dicts of them. Dim 0 of each tensor is the
            sample; the other dims are the same in all micro-batches of all ranks, and so is what is no tensor.
        losses: ``losses(model, batch)``, a 1-D tensor with the loss of each sample or token that counts. Those that
            are ignored (labels of -100) are left out, and an empty tensor is fine. It must not communicate.
        step: ``step(model, batches, job)`` does forward, backward and reduction as the training does, and leaves the
            gradients that the optimizer would step with (before clipping) in the model's parameters. They are None at
            first. Returns the loss that the training logs, or None. ``job`` has ``rank``, ``world`` and the planned
            ``micro_batches``.
        group: default: all processes, if torch.distributed is in use.
        micro_batches: how many a group is planned to have, where this one is short; default: the most of any rank.
        sample: compare as many elements of each parameter, the same on all ranks, not all of them.
        tolerance: relative; default: the square root of the epsilon of the parameters' type (3e-4 for float32, 0.09 for
            bfloat16; the coarsest, if there are several). Under autocast, give that of the type that it computes in.

    Returns:
        A :class:`~ring_reduce.verification.report.Report`, the same on every rank; ``print(report)``. Its ``right`` is
        None where nothing can be told, as from a reference of zeros, or from ranks that have the same data.

    Raises:
        VerifyError: the check can't be made. On every rank, with one text: the step raised, changed a parameter or left
            no gradient; losses that are not 1-D or have no gradient; batches that don't fit together; parameters that
            differ between ranks; a model of which not every element can be compared (see ``sample``).
        ValueError: this process is not in ``group``.

    With several ranks ``step`` runs in a thread of its own, so that a rank that waits for one which has failed can be
    told. After an error in ``step`` ranks may still be in its collectives: use the process group no more.
    """
    from .collect import Request, verify_step

    return verify_step(Request(model, batches, losses, step, micro_batches, sample, tolerance), group)
