"""The ring on one GPU: virtual ranks, which run the kernel of a GPU rank in one process. For tests and measuring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arrays import ELEMENT_TYPES, INTEGERS
from .call import check_count, check_total
from .checks import timeout_s, whole
from .errors import CountError, RingError
from .normalization import SUM, Kind, Normalization

if TYPE_CHECKING:
    import torch

DEFAULT_SEGMENT_BYTES = 32 << 10
DEFAULT_DEPTH = 4
DEFAULT_WINDOW = 2


def why_unavailable() -> str | None:
    """Why no ring can run on a GPU here: built without CUDA, no driver, no device, no code for it. None if one can."""
    try:
        from . import _cuda
    except ImportError as error:
        if not Path(error.path or "").name.startswith("_cuda"):  # there is none
            return "ring_reduce was built without CUDA; reinstall it where nvcc is, with RING_REDUCE_CUDA=1"
        return f"ring_reduce's CUDA module does not load: {error}"
    return _cuda.why_no_cuda() or None


class VirtualRing:
    """A ring whose ``world`` ranks all run on the current GPU, in one cooperative launch a call.

    It has all_reduce alone, which makes every move of the schedule: it is there to test the kernel and to measure it.

    Args:
        world: virtual ranks, 1 to 16.
        lanes: thread blocks a rank that large calls use; default: as many as run at the same time.
        segment_bytes: what travels at once, a multiple of 128. A link holds ``depth`` segments, and ``window`` of them
            go through a step together, 1 to ``depth - 1``. Results depend on none of these.
        timeout: seconds that a wait on the device may take.

    Raises:
        RingError: CUDA can't be used here, or an operation of it failed.
        ValueError: settings out of range, or more blocks than the GPU runs at the same time.
    """

    def __init__(
        self,
        world: int,
        *,
        lanes: int | None = None,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        depth: int = DEFAULT_DEPTH,
        window: int = DEFAULT_WINDOW,
        timeout: float | None = None,
        _first_segment: int = 0,
    ) -> None:
        self.world = whole(world, "world")
        self.timeout = timeout_s(timeout)
        numbers = {"segment_bytes": segment_bytes, "depth": depth, "window": window}
        settings = {name: whole(value, name) for name, value in numbers.items()}
        wanted_lanes = None if lanes is None else whole(lanes, "lanes")
        reason = why_unavailable()
        if reason is not None:
            raise RingError(f"no ring on a GPU: {reason}")
        import torch

        from . import _cuda

        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self.device)  # torch's context, which the ring then shares
        self.lanes = _cuda.resident_blocks() // max(1, self.world) if wanted_lanes is None else wanted_lanes
        self._core = _cuda.VirtualRing(
            world=self.world,
            lanes=self.lanes,
            **settings,
            timeout_s=self.timeout,
            first_segment=_first_segment,
        )

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        normalization: Normalization = SUM,
        *,
        counts: Sequence[float] | torch.Tensor | None = None,
        out: Sequence[torch.Tensor] | None = None,
        _delay_seed: int = 0,
        _absent_rank: int = -1,
    ) -> Sequence[torch.Tensor]:
        """The divided sum of ``tensors``, one a rank, into every one of ``out`` (default: in place). Returns ``out``.

        Runs on torch's current stream, behind earlier calls of this ring; the host does not wait. What fails on the
        device fills floating outputs with NaN, and :meth:`check` and the next call raise it.

        Args:
            tensors: contiguous, on the ring's device, of one shape and dtype.
            counts: a number for each rank, or a float64 tensor of them on the device, which a captured graph reads
                again at each replay; for ``DIVIDE_BY_COUNT`` and ``WEIGHTED_MEAN``.

        Raises:
            TypeError, ValueError, CountError: arguments that are wrong; nothing was started.
            RingError: an earlier call failed, or this one could not be started.
        """
        import torch

        outputs = tensors if out is None else out
        name = check_tensors(tensors, outputs, self.world, self.device)
        numbers, on_device = check_counts(counts, normalization, name, self.world, self.device)
        with torch.cuda.device(self.device):
            self._core.all_reduce(
                type=ELEMENT_TYPES[name],
                normalization=int(normalization.kind),
                divisor=normalization.total,
                elements=tensors[0].numel(),
                inputs=[x.data_ptr() for x in tensors],
                outputs=[x.data_ptr() for x in outputs],
                counts=numbers,
                device_counts=0 if on_device is None else on_device.data_ptr(),
                stream=torch.cuda.current_stream().cuda_stream,
                delay_seed=_delay_seed,
                absent_rank=_absent_rank,
            )
        for x in outputs:
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)  # a store that autograd does not see
        return outputs

    def check(self) -> None:
        """Raises what failed on the device, of calls that have ended; does not wait for others."""
        self._core.check()

    def total_count(self) -> float:
        """The sum of counts of the last call. Waits for the device."""
        return self._core.total_count()


def check_tensors(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], world: int, device: torch.device
) -> str:
    """The name of the dtype. ``TypeError`` or ``ValueError`` names the tensor that does not fit."""
    if len(tensors) != world or len(outputs) != world:
        raise ValueError(
            f"a virtual ring of {world} ranks takes a tensor for each, and there are {len(tensors)} tensors and "
            f"{len(outputs)} outputs"
        )
    first = tensors[0]
    name = str(first.dtype).removeprefix("torch.")
    if name not in ELEMENT_TYPES:
        raise TypeError(f"a ring takes {', '.join(ELEMENT_TYPES)}, not {name}; convert it first")
    for what, group in (("tensor", tensors), ("out", outputs)):
        for rank, x in enumerate(group):
            _check_tensor(f"{what} of rank {rank}", x, first, device)
    return name


def _check_tensor(who: str, x: torch.Tensor, first: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{who} is on {x.device}, and the ring on {device}; move it there")
    if x.dtype != first.dtype or x.shape != first.shape:
        raise ValueError(
            f"{who} is {x.dtype} of shape {tuple(x.shape)}, and the tensor of rank 0 is {first.dtype} of shape "
            f"{tuple(first.shape)}; they have to be equal"
        )
    if not x.is_contiguous() or x.is_neg():
        raise ValueError(f"{who} is not contiguous; pass x.contiguous()")


def check_counts(
    counts: Any, normalization: Normalization, name: str, world: int, device: torch.device
) -> tuple[list[float], torch.Tensor | None]:
    """The counts as numbers, or as a tensor on ``device``; neither where the normalization uses none.

    ``TypeError``, ``ValueError`` or ``CountError`` for what can't divide elements of the dtype ``name``.
    """
    import torch

    if name in INTEGERS and normalization.kind is not Kind.SUM:
        raise TypeError(f"{normalization!r} divides, and {name} can't hold a quotient; use SUM")
    check_total(normalization, name)
    if not normalization.uses_count:
        if counts is not None:
            raise CountError(f"{normalization!r} does not use counts={counts!r}; leave it out")
        return [], None
    if counts is None:
        raise CountError(f"{normalization!r} divides by counts: pass counts=, one for each rank")
    if len(counts) != world:
        raise CountError(f"there are {len(counts)} counts for {world} ranks; pass one for each rank")
    if isinstance(counts, torch.Tensor) and counts.is_cuda:
        if counts.device != device or counts.dtype != torch.float64 or not counts.is_contiguous():
            raise CountError(
                f"counts are {counts.dtype} on {counts.device}; on the device they are contiguous float64 on {device}"
            )
        return [], counts
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CountError(
            f"counts={counts!r} would stay as they are in the captured graph; pass a float64 tensor on the device"
        )
    return [check_count(count, normalization) for count in counts], None
