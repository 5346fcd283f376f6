"""The ring as a communication hook of DistributedDataParallel."""
# No `from __future__ import annotations`, and no annotation on the hook: register_comm_hook compares annotations with
# classes, which would have to be imported, and torch with them.

from typing import Any

from .call import check_count
from .ending import abort_on_error
from .errors import CountError
from .normalization import Kind, Normalization
from .reduction import Reduction
from .ring import Ring
from .work import Work
from .zeroed import watch


class RingHookState:
    """State of :func:`ring_hook`: a ring, what divides the sum of the gradients, and the count of the next backward.

    With ``DIVIDE_BY_COUNT`` and ``WEIGHTED_MEAN`` each reduced backward needs a count on every rank::

        state.add_count(len(batch))   # or the number of counted tokens; 0 is a count too
        loss.backward()

    With ``DIVIDE_BY_COUNT`` counts add up until a backward reduces and consumes them, so that under ``no_sync`` one is
    added for each micro-batch. ``WEIGHTED_MEAN`` takes one count a reduced backward: means of micro-batches do not add
    up to a mean, so accumulate sums and use ``DIVIDE_BY_COUNT``. A rank that has left ``join()`` counts 0. One state
    serves one model.
    """

    def __init__(self, ring: Ring, normalization: Normalization) -> None:
        if not isinstance(normalization, Normalization):
            raise TypeError(
                f"normalization is {normalization!r}; use one of ring_reduce, such as WEIGHTED_MEAN"
            )
        self.ring = ring
        self.normalization = normalization
        self._pending: float | None = None  # added, not yet used
        self._in_use: float | None = None  # of the backward that is being reduced
        self.reductions = 0  # backwards reduced so far
        self.warned = 0  # the last of them that was followed by a warning of gradients not zeroed
        self._buckets: list[_Bucket] = []  # of the last reduced backward

    def add_count(self, count: Any) -> None:
        """Adds this rank's examples or tokens, a finite number >= 0, to the count of the next reduced backward.

        Raises ``CountError`` for anything else, which aborts the ring on all ranks: they would wait for this one.
        """
        if not self.normalization.uses_count:
            raise CountError(
                f"{self.normalization!r} uses no count; leave add_count() out, or use DIVIDE_BY_COUNT"
            )
        with abort_on_error(self.ring):
            if self.normalization.kind is Kind.WEIGHTED_MEAN and self._pending is not None:
                raise CountError(
                    f"rank {self.ring.rank}: a second count, {count}, before a backward reduced {self._pending:g}: "
                    f"means of micro-batches do not add up to a mean; accumulate sums under DIVIDE_BY_COUNT, or call "
                    f"reset() if a step was given up"
                )
            self._pending = (self._pending or 0.0) + check_count(count, self.normalization)

    def reset(self) -> None:
        """Drops counts that a failed forward or backward left."""
        self._pending = None
        self._in_use = None

    @property
    def last(self) -> Reduction | None:
        """What the last reduced backward divided by; None before the first, while one is reduced, and if it failed."""
        if not self._buckets or any(bucket.total_count is None for bucket in self._buckets):
            return None
        totals = [bucket.total_count or 0.0 for bucket in self._buckets]
        divisors = [self.normalization.divisor(self.ring.world, total) for total in totals]
        return Reduction.of(totals[-1], divisors)

    def _reduce(self, bucket: Any) -> Any:
        """Starts the reduction of a bucket; DDP hands them over in order, from 0 to the last."""
        with abort_on_error(self.ring):
            if bucket.index() == 0:
                self._buckets = []
                self._in_use = self._take_count()
            count = self._in_use if self.normalization.uses_count else None
            ranges = self.ring._ranges
            watched = ranges.flag._is_profiler_enabled
            end_range = ranges.begin_bucket(bucket, self.normalization) if watched else None
            work = self.ring.all_reduce(bucket.buffer(), self.normalization, count=count, async_op=True)
            self._buckets.append(_Bucket(work))
            if bucket.is_last():
                self._in_use = None
                self.reductions += 1
            return work.get_future() if end_range is None else end_range(work.get_future())

    def _take_count(self) -> float | None:
        """The count of the backward that starts to be reduced."""
        if not self.normalization.uses_count:
            return None
        if _outside_backward():
            return 0.0
        count, self._pending = self._pending, None
        if count is None:
            used = "the last one was used by the backward before" if self.reductions else "none was added yet"
            raise CountError(
                f"rank {self.ring.rank}: a backward under {self.normalization!r} has no count ({used}); call "
                f"state.add_count(examples or tokens) once for each forward, before its backward"
            )
        return count


class _Bucket:
    """The total count of a bucket once it is reduced. Keeps nothing of its tensors."""

    def __init__(self, work: Work) -> None:
        self.total_count: float | None = None
        work.when_done(self._done)

    def _done(self, total_count: float, error: BaseException | None) -> None:
        if error is None:
            self.total_count = total_count


def _outside_backward() -> bool:
    """Whether DDP calls the hook for a rank that has left join(), to match the others' collectives."""
    import torch

    return bool(torch._C._current_graph_task_id() == -1)


def ring_hook(state: RingHookState, bucket):  # type: ignore[no-untyped-def]
    """Communication hook for ``ddp.register_comm_hook(state, ring_hook)``: reduces gradients over ``state.ring``.

    The gradient of each parameter becomes the sum over ranks, divided as ``state.normalization`` says; DDP itself
    divides by nothing when it has a hook. Returns a ``torch.futures.Future`` of the bucket's tensor.
    """
    return state._reduce(bucket)


def attach(model: Any, ring: Ring, normalization: Normalization) -> RingHookState:
    """Makes a DistributedDataParallel model reduce its gradients over ``ring``; returns the hook's state.

    From then on a backward that adds to gradients which were reduced and not zeroed since warns, unless
    ``normalization`` is a mean: the old gradient would be summed over the ranks a second time. The bare hook
    can't see it.

    Raises ``TypeError`` if ``model`` is not wrapped in DDP, and ``ValueError`` if its ranks are not those of the ring
    or if it can't take a hook: DDP takes one for its life, and its ``mixed_precision`` option installs its own.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach takes a DistributedDataParallel model, not {type(model).__name__}; wrap it first"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "this model has DDP's mixed_precision, which installs a communication hook of its own, and DDP takes one "
            "hook only; leave mixed_precision out and use autocast, or a model in bfloat16"
        )
    group = model.process_group
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if (rank, world) != (ring.rank, ring.world):
        raise ValueError(
            f"the model's group has this process as rank {rank} of {world} and the ring as rank {ring.rank} of "
            f"{ring.world}; make the ring with Ring.from_group(group)"
        )
    state = RingHookState(ring, normalization)
    try:
        model.register_comm_hook(state, ring_hook)
    except RuntimeError as error:
        raise ValueError(
            f"this model can't take the ring's hook: {str(error).rstrip(' .')}; DDP takes one hook only"
        ) from error
    watch(model, state)
    return state
