"""Gradients of micro-batches added up in float32, and divided once by what the group really contained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .agreement import agree
from .call import check_count, check_total
from .device_count import checked_on_device, one_if_counted, stays_on_device
from .ending import abort, abort_on_error
from .errors import CountError
from .normalization import DIVIDE_BY_COUNT, Kind, Normalization
from .reduction import Reduction
from .ring import Ring
from .sums import Sums, sums_of

if TYPE_CHECKING:
    import torch


class Accumulator:
    """Accumulates gradients over the micro-batches of a group, alone or across the ranks of a ring.

    Each micro-batch's gradient is moved from ``p.grad`` into float32 sums (float64 for float64 parameters). The sums
    are divided once, by what the group contained on all ranks, and put back as ``p.grad``::

        accumulator = rr.Accumulator(model, rr.DIVIDE_BY_COUNT, ring=ring)
        for group in groups:
            with accumulator:
                for batch in group:
                    summed_loss(model, batch).backward()
                    accumulator.add(count=counted_tokens(batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # sees the divided gradient
            optimizer.step()

    Entering ``with`` drops gradients that are still there, and a DistributedDataParallel model does not synchronise
    inside it. A gradient that you keep stays as it is: the next group then gets other memory.
    In a loop that can't be written so, call :meth:`reduce` at the end of a group, ``zero_grad()`` before the
    next, and wrap forward and backward of a DDP model in ``no_sync()``.

    ===================  ==========================================  ============================================
    normalization        each micro-batch's gradient is that of      the sum over micro-batches and ranks divided by
    ===================  ==========================================  ============================================
    ``SUM``              a loss divided by the whole group's total   nothing
    ``MEAN``             a mean, and all micro-batches are equal     the number of micro-batches of all ranks
    ``divide_by(B)``     a sum                                       B, the whole group's
    ``DIVIDE_BY_COUNT``  a sum over ``count``                        the counts of all ranks
    ``WEIGHTED_MEAN``    a mean over ``count``, which weights it     the counts of all ranks
    ===================  ==========================================  ============================================

    Args:
        model: a module, or its parameters. Those without ``requires_grad`` are left out.
        normalization: see above.
        ring: reduces over its ranks; without one the group is this process's own.

    Raises:
        TypeError: a parameter is of a type or on a device that can't be accumulated.
        ValueError: there is no parameter; a DDP model without a ring, which would reduce twice, or with a static
            graph; a total that float32 can't divide by.
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Parameter],
        normalization: Normalization,
        *,
        ring: Ring | None = None,
    ) -> None:
        if not isinstance(normalization, Normalization):
            raise TypeError(
                f"normalization is {normalization!r}; use one of ring_reduce, such as DIVIDE_BY_COUNT"
            )
        self.normalization = normalization
        self.ring = ring
        self._synchronising = _synchronising(model, ring)
        self._module: Any = model if hasattr(model, "parameters") else None
        given: Any = model if self._module is None else self._module.parameters()
        parameters = list(dict.fromkeys(given))
        self._sums = sums_of(parameters)
        self._left_out = [parameter for parameter in parameters if not parameter.requires_grad]
        for sums in self._sums:
            check_total(normalization, sums.type_name)
        _check_device(ring, self._sums)
        self._last: Any = None  # total count of the last group, on its device
        self._inside: contextlib.ExitStack | None = None  # of `with`
        self._agreed = ring is None
        self._first_gradient = 0.0  # the sum of its elements
        self._start()

    def _start(self) -> None:
        self._count: Any = None  # the sum of the counts so far
        self._uncounted = 0  # micro-batches whose count is to come
        self._count_follows = False  # it has come
        self._micro_batches = 0
        for sums in self._sums:
            sums.filled.clear()

    @property
    def last(self) -> Reduction | None:
        """What the last group was divided by; None before the first, and if it failed.

        Waits for the device if the counts lie on one.
        """
        return None if self._last is None else self._reduction(float(self._last))

    def add(self, count: Any = None) -> None:
        """Takes the gradient of one micro-batch: adds it to the sums and sets ``p.grad`` to None.

        ``count``: its examples or counted tokens, a finite number >= 0; a tensor on a GPU stays there, and one that
        is no count makes the result NaN. ``WEIGHTED_MEAN`` needs it, and weights the
        gradient with it; under ``DIVIDE_BY_COUNT`` it may come later, by :meth:`add_count`. A micro-batch of count 0
        adds nothing, NaN included. Parameters without a gradient add nothing.

        Raises ``CountError`` for any other count, and ``RuntimeError`` if the gradient is not a micro-batch's own:
        the last group's were not set to None, DDP has reduced it, or a parameter has changed. With a ring, an error
        ends it on all ranks.
        """
        with abort_on_error(self.ring):
            value = self._checked(count)
            if any(sums.any_gradient() for sums in self._sums):
                self._refuse_foreign()
            weighted, on_device = self.normalization.kind is Kind.WEIGHTED_MEAN, stays_on_device(value)
            scale = value if weighted else one_if_counted(value) if on_device else 1.0
            if not self._agreed and self._micro_batches == 0:
                self._first_gradient = sum(sums.gradient_sum() for sums in self._sums)
            if self._micro_batches == 0:
                for sums in self._sums:
                    sums.begin()
            for sums in self._sums:
                sums.take(scale, skip=not on_device and value == 0)
            self._micro_batches += 1
            self._uncounted += count is None
            if count is not None:
                self._count = value if self._count is None else self._count + value

    def add_count(self, count: Any) -> None:
        """Adds to the group's count what :meth:`add` was not told: a token count that is known at the end.

        For ``DIVIDE_BY_COUNT`` only; ``CountError`` otherwise, and unless ``count`` is a finite number >= 0.
        """
        with abort_on_error(self.ring):
            if self.normalization.kind is not Kind.DIVIDE_BY_COUNT:
                raise CountError(
                    f"{self.normalization!r} takes no count afterwards; pass it to add(), or use DIVIDE_BY_COUNT"
                )
            value = self._checked_count(count)
            self._count = value if self._count is None else self._count + value
            self._count_follows = True

    def reduce(self) -> None:
        """Ends the group: ``p.grad`` becomes the divided gradient, the same on every rank; see :attr:`last`.

        A parameter that got no gradient in the group, on any rank, gets None; if nothing was counted, all get zeros.
        A rank without micro-batches takes part, and counts 0. The first one compares normalization and parameters of
        all ranks. Raises ``CountError`` if a count is missing, ``RuntimeError`` if a gradient was not added or inside
        ``with``, ``RingMismatch`` if ranks accumulate differently, and what :meth:`Ring.all_reduce` raises.
        """
        if self._inside is not None:
            raise RuntimeError("`with accumulator:` reduces when it is left; leave reduce() out, or `with`")
        self._reduce()

    def _reduce(self) -> None:
        self._last = None
        with abort_on_error(self.ring):
            self._refuse_what_was_not_added()
            if self._micro_batches == 0:
                for sums in self._sums:
                    sums.begin()
            if self.ring is not None and not self._agreed:
                parameters = [p.tensor for sums in self._sums for p in sums.parameters]
                agree(self.ring, self.normalization, parameters, self._first_gradient)
                self._agreed = True
            divisor, count = self._divisor_of_group()
            total: Any = 0.0
            for sums in self._sums:
                total = sums.reduce(self.ring, divisor, count)
            nothing = count is not None and not stays_on_device(total) and total == 0
            for sums in self._sums:
                sums.give(all_of_them=nothing)
            self._last = total
        self._start()

    def reset(self) -> None:
        """Drops what was accumulated since the last :meth:`reduce`, and gradients that were not added yet."""
        self._start()
        for sums in self._sums:
            sums.clear_gradients()

    def __enter__(self) -> Accumulator:
        if self._inside is not None:
            raise RuntimeError("`with accumulator:` inside itself: a group ends before the next begins")
        self._start()
        for sums in self._sums:
            sums.clear_gradients()
        self._inside = contextlib.ExitStack()
        for module in self._synchronising:
            self._inside.enter_context(module.no_sync())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.close()
        if error is None:
            self._reduce()
            return
        self._start()
        self._last = None
        abort(self.ring, error)

    def _checked_count(self, count: Any) -> Any:
        """A count as float64, on its device."""
        return checked_on_device(count) if stays_on_device(count) else check_count(count, self.normalization)

    def _checked(self, count: Any) -> Any:
        """The count of a micro-batch; 1 where the normalization has none or gets it later."""
        if self.normalization.kind is Kind.DIVIDE_BY_COUNT and count is None:
            return 1.0
        if self.normalization.uses_count:
            return self._checked_count(count)
        if count is not None:
            raise CountError(
                f"{self.normalization!r} does not use count={count!r}; DIVIDE_BY_COUNT and WEIGHTED_MEAN do"
            )
        return 1.0

    def _refuse_foreign(self) -> None:
        """Gradients that are not this micro-batch's own, or not all of them."""
        if self._micro_batches == 0 and any(sums.still_given() for sums in self._sums):
            raise RuntimeError(
                "the gradients of the last group were not set to None, and this micro-batch was added to them: call "
                "optimizer.zero_grad(), not with set_to_none=False, after each step, or use `with accumulator:`"
            )
        if any(parameter.grad is not None for parameter in self._left_out):
            raise RuntimeError(
                "a parameter has a gradient that did not require one when the accumulator was made, and would not be "
                "divided; make a new accumulator after unfreezing"
            )
        # As of the last forward. Inside `with` it is off, and the flag old if the forward went past DDP's module.
        if self._inside is None and any(module.require_forward_param_sync for module in self._synchronising):
            raise RuntimeError(
                "DistributedDataParallel has reduced this micro-batch's gradient, and it would be done again: "
                "wrap forward and backward in model.no_sync(), or use `with accumulator:`"
            )

    def _refuse_what_was_not_added(self) -> None:
        if self._module is not None:
            known = {id(p.tensor) for sums in self._sums for p in sums.parameters} | set(
                map(id, self._left_out)
            )
            if any(id(parameter) not in known for parameter in self._module.parameters()):
                raise RuntimeError(
                    "the model has parameters that it did not have when the accumulator was made (added, or "
                    "replaced by load_state_dict(assign=True)); make a new accumulator"
                )
        if any(sums.not_taken() for sums in self._sums):
            raise RuntimeError(
                f"a gradient was not added ({self._micro_batches} micro-batches were): call accumulator.add() after "
                f"each backward, the last one too"
            )

    def _divisor_of_group(self) -> tuple[Normalization, Any]:
        """What the sums are divided by, and this rank's count if that has one."""
        kind = self.normalization.kind
        if kind is Kind.MEAN:
            return DIVIDE_BY_COUNT, float(self._micro_batches)
        if not self.normalization.uses_count:
            return self.normalization, None
        if self._uncounted and not self._count_follows:
            raise CountError(
                f"{self._uncounted} micro-batches under {self.normalization!r} have no count; pass it to add(), "
                f"or call add_count() before reduce()"
            )
        return DIVIDE_BY_COUNT, 0.0 if self._count is None else self._count

    def _reduction(self, total: float) -> Reduction:
        """MEAN divides by a count of micro-batches, which is no count of the user's."""
        if self.normalization.kind is Kind.MEAN:
            return Reduction.of(0.0, [total] * len(self._sums))
        return Reduction.of(total, [self.normalization.divisor(1, total)] * len(self._sums))


def _check_device(ring: Ring | None, sums: Sequence[Sums]) -> None:
    """``TypeError`` unless the parameters lie where the ring's tensors do."""
    if ring is None:
        return
    for device in (each.flat.device for each in sums):
        if (None if device.type == "cpu" else device) != ring.device:
            raise TypeError(
                f"a parameter is on {device}, and this ring's tensors lie on {ring.device or 'the CPU'}; make the ring "
                f"with device={device.type!r}, move the parameter, or leave ring= out"
            )


def _synchronising(model: Any, ring: Ring | None) -> list[Any]:
    """The model, or modules in it, of DistributedDataParallel, which the accumulator keeps from synchronising."""
    from torch.nn.parallel import DistributedDataParallel

    modules = model.modules() if hasattr(model, "modules") else ()
    found = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if found and ring is None:
        raise ValueError(
            "a DistributedDataParallel model reduces its gradients itself; pass ring=, over which the accumulator does "
            "it once a group, or accumulate model.module"
        )
    if any(getattr(module, "static_graph", False) for module in found):
        raise ValueError(
            "DistributedDataParallel with static_graph=True can't begin under no_sync(); accumulate model.module"
        )
    return found
