"""The ring as a communication hook of DistributedDataParallel."""
# No `from __future__ import annotations`, and no annotation on the hook: register_comm_hook compares annotations with
# classes, which would have to be imported, and torch with them.

from typing import Any

from .call import ring_count
from .ending import abort_on_error
from .errors import CountError
from .normalization import Kind, Normalization
from .reduction import Reduction
from .ring import Ring
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
        self._pending = _PendingCount(ring._engine.device)
        self._in_use: Any = None  # count of the backward that is being reduced
        self.reductions = 0  # backwards reduced so far
        self.warned = 0  # the last of them that was followed by a warning of gradients not zeroed
        self._tallies: list[Any] = []  # of the buckets of the last reduced backward

    def add_count(self, count: Any) -> None:
        """Adds this rank's examples or tokens, a finite number >= 0, to the count of the next reduced backward.

        On a ring of a device it may be a tensor there, of one element, whose value the host does not wait for (but over
        process_group, when the backward is reduced).

        Raises ``CountError`` for anything else, which aborts the ring on all ranks: they would wait for this one.
        """
        if not self.normalization.uses_count:
            raise CountError(
                f"{self.normalization!r} uses no count; leave add_count() out, or use DIVIDE_BY_COUNT"
            )
        with abort_on_error(self.ring):
            if self.normalization.kind is Kind.WEIGHTED_MEAN and self._pending.value is not None:
                raise CountError(
                    f"rank {self.ring.rank}: a second count, {count}, before a backward reduced "
                    f"{self._pending.value:g}: means of micro-batches do not add up to a mean; accumulate sums under "
                    f"DIVIDE_BY_COUNT, or call reset() if a step was given up"
                )
            self._pending.add(ring_count(count, self.normalization, self.ring._engine.device))

    def reset(self) -> None:
        """Drops counts that a failed forward or backward left."""
        self._pending.value = None
        self._in_use = None

    @property
    def last(self) -> Reduction | None:
        """What the last reduced backward divided by; None before the first, while one is reduced, and if it failed.

        On a ring of a device it waits for the device where there are counts; ``RuntimeError`` if the ring has made
        another call with a count since.
        """
        totals = [tally.total_count for tally in self._tallies]
        if not totals or None in totals:
            return None
        divisors = [self.normalization.divisor(self.ring.world, total) for total in totals]
        return Reduction.of(totals[-1], divisors)

    def _reduce(self, bucket: Any) -> Any:
        """Starts the reduction of a bucket; DDP hands them over in order, from 0 to the last."""
        with abort_on_error(self.ring):
            if bucket.index() == 0:
                self._tallies = []
                self._in_use = self._take_count()
            count = self._in_use if self.normalization.uses_count else None
            ranges = self.ring._ranges
            watched = ranges.flag._is_profiler_enabled
            end_range = ranges.begin_bucket(bucket, self.normalization) if watched else None
            work = self.ring.all_reduce(bucket.buffer(), self.normalization, count=count, async_op=True)
            tally = work.tally()
            # All buckets of a backward have one count, and so one total.
            self._tallies = [tally] * (len(self._tallies) + 1) if tally.last_only else [*self._tallies, tally]
            if bucket.is_last():
                self._in_use = None
                self.reductions += 1
            return work.get_future() if end_range is None else end_range(work.get_future())

    def _take_count(self) -> Any:
        """The count of the backward that starts to be reduced."""
        if not self.normalization.uses_count:
            return None
        if _outside_backward():
            return 0.0
        count = self._pending.take()
        if count is None:
            used = "the last one was used by the backward before" if self.reductions else "none was added yet"
            raise CountError(
                f"rank {self.ring.rank}: a backward under {self.normalization!r} has no count ({used}); call "
                f"state.add_count(examples or tokens) once for each forward, before its backward"
            )
        return count


class _PendingCount:
    """The counts added since the last reduced backward: a number, or a tensor on the ring's device."""

    def __init__(self, device: Any) -> None:
        self.value: Any = None  # None: there is none
        self._device = device
        self._ready: Any = None  # of a tensor: the event behind what computed it

    def add(self, count: Any) -> None:
        self._join()
        # A copy: the caller may use its tensor again.
        self.value = count + (0.0 if self.value is None else self.value)
        if not isinstance(self.value, float):
            self._ready = self._stream().record_event()

    def take(self) -> Any:
        """The sum, for use on the current stream; None if there is none."""
        self._join()
        value, self.value = self.value, None
        return value

    def _join(self) -> None:
        """A backward may run on another stream than that of the caller who counted."""
        if self.value is not None and not isinstance(self.value, float):
            stream = self._stream()
            stream.wait_event(self._ready)
            self.value.record_stream(stream)

    def _stream(self) -> Any:
        import torch

        return torch.cuda.current_stream(self._device)


def _outside_backward() -> bool:
    """Whether DDP calls the hook for a rank that has left join(), to match the others' collectives."""
    import torch

    return bool(torch._C._current_graph_task_id() == -1)


def ring_hook(state: RingHookState, bucket):  # type: ignore[no-untyped-def]
    """Communication hook for ``ddp.register_comm_hook(state, ring_hook)``: reduces gradients over ``state.ring``.

    The gradient of each parameter becomes the sum over ranks, divided as ``state.normalization`` says; DDP itself
    divides by nothing when it has a hook. Returns a ``torch.futures.Future`` of the bucket's tensor. On a device the
    reduction begins behind the current stream, on which backward has made the bucket, and runs beside what follows.
    """
    return state._reduce(bucket)


def attach(model: Any, ring: Ring, normalization: Normalization) -> RingHookState:
    """Makes a DistributedDataParallel model reduce its gradients over ``ring``; returns the hook's state.

    From then on a backward that adds to gradients which were reduced and not zeroed since warns, unless
    ``normalization`` is a mean: the old gradient would be summed over the ranks a second time. The bare hook
    can't see it.

    Raises ``TypeError`` if ``model`` is not wrapped in DDP, and ``ValueError`` if its ranks or its device are not those
    of the ring or if it can't take a hook: DDP takes one for its life, and its ``mixed_precision`` option installs its
    own.
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
    _check_devices(model, ring)
    state = RingHookState(ring, normalization)
    try:
        model.register_comm_hook(state, ring_hook)
    except RuntimeError as error:
        raise ValueError(
            f"this model can't take the ring's hook: {str(error).rstrip(' .')}; DDP takes one hook only"
        ) from error
    watch(model, state)
    return state


def _check_devices(model: Any, ring: Ring) -> None:
    """``ValueError`` for a parameter that the ring could not reduce the gradient of."""
    where = ring._engine.device
    for parameter in model.parameters():
        here = parameter.is_cpu if where is None else parameter.device == where
        if parameter.requires_grad and not here:
            raise ValueError(
                f"the model has parameters on {parameter.device}, and the ring runs on {where or 'cpu'}; make the ring "
                f"with Ring.from_group(device='{parameter.device}')"
            )
