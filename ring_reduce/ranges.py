"""Named ranges around calls and buckets, for whoever listens: torch's profiler, nsys through NVTX, ring-reduce trace.

While nobody does, a call pays for one test, of ``Ranges.flag``. Imports no torch but for RING_REDUCE_NVTX=1.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from .call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Call

if TYPE_CHECKING:
    import torch

    from .normalization import Normalization

    # Ends a range with a future; returns one that has the same value, or error, and is done after the range.
    Ending = Callable[[torch.futures.Future[Any]], torch.futures.Future[Any]]

OPERATION_NAMES = {ALL_REDUCE: "all_reduce", REDUCE_SCATTER: "reduce_scatter", ALL_GATHER: "all_gather"}


class Listener(Protocol):
    """Who is told of ranges."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        """A range of one thread."""

    def begin(self, name: str) -> Ending:
        """A range that another thread may end."""


class Ranges:
    """The listeners of one ring. ``ValueError`` if ``RING_REDUCE_NVTX`` is not 0 or 1."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = [_Nvtx()] if _wants_nvtx() and _has_nvtx() else []
        # torch keeps a flag that costs no call to read. Without torch there is no profiler.
        self._profiler: Any = sys.modules.get("torch.autograd.profiler", _Flag(False))
        self.flag: Any = None  # anybody listens while its _is_profiler_enabled is true
        self._choose_flag()

    def add(self, listener: Listener) -> None:
        """Tells ``listener`` of the ranges that begin from now on."""
        self._listeners = [*self._listeners, listener]
        self._choose_flag()

    def remove(self, listener: Listener) -> None:
        """Tells it no more; ranges that have begun still end."""
        self._listeners = [each for each in self._listeners if each is not listener]
        self._choose_flag()

    def call(self, call: Call, transport: str) -> AbstractContextManager[None]:
        """The range of a call, on the thread that runs it."""
        size = call.elements * call.arrays.item_bytes(call.input)
        operation = OPERATION_NAMES[call.operation]
        return self._range(f"ring_reduce {operation} {size} B {call.normalization!r} {transport}")

    def begin_bucket(self, bucket: Any, normalization: Normalization) -> Ending:
        """Begins the range of a DDP bucket. What it returns takes the future whose end is the range's, and gives back
        the one to hand to DDP."""
        buffer = bucket.buffer()
        size = buffer.numel() * buffer.element_size()
        name = f"ring_reduce bucket {bucket.index()} {size} B {normalization!r}"
        endings = [listener.begin(name) for listener in self._listening()]

        def end(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
            for each in endings:
                future = each(future)
            return future

        return end

    @contextlib.contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for listener in self._listening():
                stack.enter_context(listener.range(name))
            yield

    def _listening(self) -> list[Listener]:
        return [*self._listeners, _Profiler()] if self._profiler._is_profiler_enabled else self._listeners

    def _choose_flag(self) -> None:
        self.flag = _Flag(True) if self._listeners else self._profiler


class _Flag:
    """Stands in for torch.autograd.profiler."""

    def __init__(self, enabled: bool) -> None:
        self._is_profiler_enabled = enabled


class _Profiler:
    """torch's profiler, while it runs."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        from torch.autograd.profiler import record_function

        return record_function(name)

    def begin(self, name: str) -> Ending:
        from torch.autograd.profiler import record_function

        record = record_function(name)
        record.__enter__()

        def end(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
            # As torch profiles its own asynchronous calls: the profiler does not hear of the ring's thread.
            done: torch.futures.Future[Any] = record._call_end_callbacks_on_future(future)
            record.__exit__(None, None, None)
            return done

        return end


class _Nvtx:
    """NVTX, as torch has it."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        import torch.cuda.nvtx

        return torch.cuda.nvtx.range(name)

    def begin(self, name: str) -> Ending:
        import torch.cuda.nvtx

        number = torch.cuda.nvtx.range_start(name)
        return end_with_future(lambda: torch.cuda.nvtx.range_end(number))


def end_with_future(end: Callable[[], None]) -> Ending:
    """Calls ``end`` once the future is done, and before the one that is returned is."""

    def ending(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        def done(ended: torch.futures.Future[Any]) -> Any:
            end()
            return ended.value()  # or raises what it failed with

        return future.then(done)

    return ending


def _wants_nvtx() -> bool:
    value = os.environ.get("RING_REDUCE_NVTX", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"RING_REDUCE_NVTX is {value!r}; set it to 1 for NVTX ranges, or to 0")
    return value == "1"


def _has_nvtx() -> bool:
    """Whether this torch has NVTX; warns if not. A GPU is not needed."""
    import torch.cuda.nvtx

    try:
        torch.cuda.nvtx.range_push("ring_reduce")
        torch.cuda.nvtx.range_pop()
    except RuntimeError as error:
        warnings.warn(
            f"RING_REDUCE_NVTX=1, but torch {torch.__version__} has no NVTX ({error}); install a CUDA build of torch, "
            f"or unset it",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    return True
