"""One step the user's way on every rank, and beside it what one process makes of the same data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ring_reduce.errors import VerifyError

from . import Job
from .batches import count_samples, pack, unpack
from .diagnosis import diagnose
from .layout import Fingerprint, Layout, compare_fingerprints
from .measured import Measured, Sizes, Vector
from .ranks import ranks_of
from .reference import MicroBatch, Reference, compute_reference
from .report import Report, make_report
from .state import SEED, clear_gradients, kept, same

if TYPE_CHECKING:
    import torch.distributed as dist

# On rank 0, beside the model.
MOST_BYTES = 1_500_000_000

Step = Callable[[nn.Module, Sequence[Any], Job], Any]


@dataclass(frozen=True)
class Request:
    """What a rank was asked to check."""

    model: nn.Module
    batches: Sequence[Any]
    losses: Callable[[nn.Module, Any], Tensor]
    step: Step
    micro_batches: int | None
    sample: int | None
    tolerance: float | None


@dataclass(frozen=True)
class _Hello:
    """What rank 0 has to know of a rank before anything is computed."""

    samples: tuple[int, ...]
    options: dict[str, Any]
    fingerprints: list[Fingerprint]


@dataclass(frozen=True)
class _Stepped:
    """What a step left on one rank."""

    gradient: Vector
    missing: tuple[str, ...]
    logged: float | None


def verify_step(
    request: Request, group: dist.ProcessGroup | None, say: Callable[[str], None] = lambda text: None
) -> Report:
    """See :func:`ring_reduce.verify`; ``say`` is told what is being done."""
    ranks = ranks_of(group)
    say("comparing the models")
    with ranks.together("the check of arguments"):
        _check_request(request)
        layout = Layout(request.model, request.sample)
        _check_tolerance(request.tolerance, layout)
        hello = _hello(request, layout, ranks.rank)
        packed = pack(request.batches)
    hellos = ranks.gather(hello)
    with ranks.together("the comparison of ranks"):
        planned = _compare(hellos, layout) if ranks.rank == 0 else 0
    planned = ranks.broadcast(planned)
    packs = ranks.gather(packed)
    tolerance = layout.tolerance if request.tolerance is None else request.tolerance
    with kept(request.model) as copies:
        say("the reference: one process with the whole batch")
        reference = None
        with ranks.together("the reference"):
            if ranks.rank == 0:
                micro_batches = _unpack(packs, hellos, layout.parameters[0].device)
                reference = compute_reference(request.model, request.losses, micro_batches, layout, tolerance)
        say("the step")
        job = Job(ranks.rank, ranks.world, planned)
        stepped = ranks.run(lambda: _run_step(request, job, layout, copies, ranks.rank), "step()")
    say("the diagnosis")
    gathered = ranks.gather(stepped)
    report = None
    with ranks.together("the diagnosis"):
        if reference is not None:
            measured = _measured(reference, gathered, hellos, layout, planned=planned, tolerance=tolerance)
            gathered.clear()
            report = make_report(measured, diagnose(measured), layout.elements)
    told: Report = ranks.broadcast(report)
    return told


def _check_request(request: Request) -> None:
    if not isinstance(request.model, nn.Module):
        raise VerifyError(f"model is a {type(request.model).__name__}; verify takes a torch.nn.Module")
    if isinstance(request.model, nn.parallel.DistributedDataParallel):
        raise VerifyError("model is a DistributedDataParallel; give verify its module, and wrap it in step()")
    if not isinstance(request.batches, (list, tuple)):
        raise VerifyError(
            f"batches is a {type(request.batches).__name__}; it has to be a list of this rank's micro-batches"
        )
    for name in ("losses", "step"):
        if not callable(getattr(request, name)):
            raise VerifyError(f"{name} is {getattr(request, name)!r}; it has to be a function")
    for name, least in (("micro_batches", 1), ("sample", 1)):
        value = getattr(request, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise VerifyError(f"{name} is {value!r}; it has to be None or a whole number of at least {least}")
    if request.tolerance is not None and not 0 < request.tolerance < 1:
        raise VerifyError(f"tolerance is {request.tolerance!r}; it is relative: a number between 0 and 1")
    if request.micro_batches is not None and len(request.batches) > request.micro_batches:
        raise VerifyError(
            f"micro_batches is {request.micro_batches}, and {len(request.batches)} batches were given; it is what a "
            f"group is planned to have, and only fewer are possible"
        )


def _check_tolerance(tolerance: float | None, layout: Layout) -> None:
    if tolerance is not None and tolerance < layout.epsilon:
        raise VerifyError(
            f"tolerance is {tolerance:.3g}, and the epsilon of the parameters' type is {layout.epsilon:.3g}: rounding "
            f"alone is more; the default is its root, {layout.tolerance:.2g}"
        )


def _hello(request: Request, layout: Layout, rank: int) -> _Hello:
    samples = tuple(
        count_samples(batch, f"micro-batch {index} of rank {rank}")
        for index, batch in enumerate(request.batches)
    )
    options = {name: getattr(request, name) for name in ("micro_batches", "sample", "tolerance")}
    return _Hello(samples, options, layout.fingerprints())


def _compare(hellos: Sequence[_Hello], layout: Layout) -> int:
    """How many micro-batches are planned; raises VerifyError if ranks differ, or if there is too much to compare."""
    for rank, hello in enumerate(hellos):
        for name, value in hello.options.items():
            if value != hellos[0].options[name]:
                raise VerifyError(
                    f"{name} is {hellos[0].options[name]!r} on rank 0 and {value!r} on rank {rank}; every rank has to "
                    f"pass the same"
                )
    compare_fingerprints([hello.fingerprints for hello in hellos])
    _check_size(layout, len(hellos), sum(len(hello.samples) for hello in hellos))
    longest = max(len(hello.samples) for hello in hellos)
    if longest == 0:
        raise VerifyError("no rank has a micro-batch: batches is empty everywhere")
    return int(hellos[0].options["micro_batches"] or longest)


def _check_size(layout: Layout, world: int, micro_batches: int) -> None:
    needed = bytes_needed(layout.length, world, micro_batches)
    if needed > MOST_BYTES:
        fitting = max(1, MOST_BYTES // bytes_needed(len(layout.names), world, micro_batches))
        raise VerifyError(
            f"the model is too large to compare all of it: {layout.length:,} elements of {world + micro_batches} "
            f"gradients (ranks and micro-batches) would take up to {needed:,} bytes on rank 0, and the most is "
            f"{MOST_BYTES:,}; pass sample={min(fitting, 10_000)}, which compares that many elements of each parameter "
            f"(--sample on the command line)"
        )


def bytes_needed(length: int, world: int, micro_batches: int) -> int:
    """What a check of ``length`` elements takes on rank 0 at most, beside the model.

    The micro-batches' gradients once, and again where some are not finite; the ranks' three times, since they come in
    messages; and a dozen vectors of the reference, of the bound and of what is compared with it.
    """
    return 8 * length * (2 * micro_batches + 3 * world + 12)


def _unpack(packs: Sequence[bytes], hellos: Sequence[_Hello], device: torch.device) -> list[MicroBatch]:
    """The micro-batches of all ranks, rank after rank."""
    return [
        MicroBatch(rank, index, batch, samples)
        for rank, (data, hello) in enumerate(zip(packs, hellos, strict=True))
        for index, (batch, samples) in enumerate(zip(unpack(data, device), hello.samples, strict=True))
    ]


def _run_step(request: Request, job: Job, layout: Layout, copies: dict[str, Tensor], rank: int) -> _Stepped:
    clear_gradients(request.model)
    torch.manual_seed(SEED)
    with torch.enable_grad():
        logged = _logged(request.step(request.model, request.batches, job), rank)
    gradients = [parameter.grad for parameter in layout.parameters]
    for name, parameter in zip(layout.names, layout.parameters, strict=True):
        if not same(parameter.detach(), copies[name]):
            raise VerifyError(
                f"rank {rank}: step() changed parameter {name}; it has to stop before optimizer.step(), and leave the "
                f"gradients that it would step with"
            )
    if all(gradient is None for gradient in gradients):
        raise VerifyError(
            f"rank {rank}: step() left no gradient in any parameter of the model; it has to use the model that it is "
            f"given, and leave the gradients there (no zero_grad() afterwards)"
        )
    missing = tuple(name for name, gradient in zip(layout.names, gradients, strict=True) if gradient is None)
    return _Stepped(layout.vector(gradients), missing, logged)


def _logged(value: Any, rank: int) -> float | None:
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return float(value.detach() if isinstance(value, Tensor) else value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
    raise VerifyError(
        f"rank {rank}: step() returned {what}; it returns the loss that it logs, one number, or None"
    )


def _measured(
    reference: Reference,
    stepped: Sequence[_Stepped],
    hellos: Sequence[_Hello],
    layout: Layout,
    *,
    planned: int,
    tolerance: float,
) -> Measured:
    counts = iter(reference.counts)
    return Measured(
        sizes=Sizes(
            micro_batches=planned,
            samples=tuple(hello.samples for hello in hellos),
            counts=tuple(tuple(_take(counts, len(hello.samples))) for hello in hellos),
        ),
        names=layout.names,
        ends=layout.ends,
        stepped=np.stack([each.gradient for each in stepped]),
        missing=tuple(each.missing for each in stepped),
        whole=reference.whole.gradient,
        parts=reference.parts,
        tolerance=tolerance,
        epsilon=layout.epsilon,
        smallest=layout.smallest,
        twins=reference.twins,
        constant=reference.constant,
        suspects=reference.suspects,
        logged=tuple(each.logged for each in stepped),
        loss=reference.whole.loss if reference.whole.count else float("nan"),
    )


def _take(counts: Iterator[int], number: int) -> list[int]:
    return [next(counts) for _ in range(number)]
