"""The ring: all_reduce, reduce_scatter and all_gather with an explicit normalization."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .bootstrap import Member, Store
from .call import Call, all_gather_call, all_reduce_call, reduce_scatter_call
from .checks import timeout_s, whole
from .device_calls import DeviceCalls, device_calls
from .ending import CLOSE_TIMEOUT_S, finish_calls, shut_down
from .errors import RingClosed, RingError, text_of
from .normalization import SUM, Normalization
from .ranges import Ranges
from .refusal import told_to_all
from .shm import ALGORITHMS
from .transport import group_has_cpu, open_engine, ring_device
from .work import CommunicationThread, Work

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from .engine import Engine


@dataclass(frozen=True)
class RingStats:
    """What a ring has done on this rank so far. Bytes are those really moved."""

    calls: int
    # Elements. Of an all_reduce of s bytes about 2(n-1)s/n: round the ring 2s - |chunk r| - |chunk r+1|, directly
    # s + (n-2) |chunk r|. In one shot (n-1)s.
    bytes_sent: int
    bytes_received: int
    # Beside bytes_sent: 64 a segment, or a step and peer; over process_group 40 a call and peer.
    header_bytes_sent: int
    seconds_waiting: float  # for other ranks, summed over lanes
    last_count: float  # total count of the last call that had one; 0 before


class Ring:
    """A ring of processes that reduce tensors together: over shared memory, between the GPUs of a host, or over the
    process groups of torch.distributed.

    All ranks make the ring together, and make the same calls in the same order. Every rank ends with the same bits.
    Use it as a context manager: an exception inside aborts the calls of all ranks, with its text.

    Args:
        store: where the ranks meet: a ``torch.distributed.Store``, or any object with ``set(key, bytes)``,
            ``get(key) -> bytes`` and ``check([key]) -> bool`` that all ranks share. It is asked from other threads
            than the caller's, and must not be bound to one. Not needed for a world of 1.
        rank: this process, 0 to ``world - 1``.
        world: number of processes.
        name: tells rings apart that meet in one store at the same time.
        timeout: seconds (or a timedelta) that a call may go without progress, and that making the ring may take;
            default ``RING_REDUCE_TIMEOUT`` or 300.
        lanes: threads a rank; the fewest that any rank asks for count. Default: the cores divided among the ranks,
            at most 4. Results do not depend on it.
        algorithm: of :meth:`all_reduce`, the same on all ranks: ``"ring"`` goes round the ring; ``"direct"`` lets every
            rank read the others' memory, with fewer hand-overs; ``"auto"`` takes one by size and world, and for small
            tensors of either kind one exchange. Bits of float64, float32 and integers do not depend on it (but
            for weighted means that underflow); 16-bit floats are rounded at each hop of the ring, else once.
        device: where the tensors of this ring lie: None for the CPU, or a CUDA device (``"cuda"``: the current one).
        transport: ``"auto"``, or by name ``"shm"`` (CPU tensors, one host), ``"cuda_ipc"`` (GPUs of one host that reach
            each other's memory) or ``"process_group"`` (Gloo or NCCL, any hosts; see :meth:`from_group`).

    Raises:
        RingTimeout: a rank did not arrive; it is named.
        RingMismatch: ranks disagree on the world or run different versions.
        RingError: a rank is on another host, or could not get its memory. On every rank. Or another rank has a wrong
            ``timeout``, ``device``, ``lanes``, ``algorithm`` or ``transport``: on ranks that come within 5 s of it.
        TypeError, ValueError: an argument of this rank is wrong, or there is no such transport for this device. Of
            those five it tells the others first, for up to 5 s.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        rank: int,
        world: int,
        name: str = "default",
        timeout: float | timedelta | None = None,
        lanes: int | None = None,
        algorithm: str = "auto",
        device: torch.device | str | None = None,
        transport: str = "auto",
        _tuning: dict[str, Any] | None = None,
        _has_group: bool = False,
    ) -> None:
        rank, world = whole(rank, "rank"), whole(world, "world")
        if world < 1 or not 0 <= rank < world:
            raise ValueError(
                f"rank {rank} of a world of {world}: a ring needs world >= 1 and 0 <= rank < world"
            )
        if store is not None and not all(hasattr(store, name) for name in ("set", "get", "check")):
            raise TypeError(
                f"store is a {type(store).__name__}; a ring meets in a torch.distributed.Store, or what has its set(), "
                f"get() and check()"
            )
        self.rank = rank
        self.world = world
        self.name = name
        self._ranges = Ranges()
        self._member = Member(rank, world, name)
        with told_to_all(self._member, store, _has_group):
            self.timeout = timeout_s(timeout)
            tensors_on = ring_device(device)
            lanes = whole(lanes, "lanes") if lanes is not None else None
            if lanes is not None and not 1 <= lanes <= 64:
                raise ValueError(f"lanes={lanes}: a ring has 1 to 64 lanes")
            if algorithm not in ALGORITHMS:
                raise ValueError(f"algorithm={algorithm!r}; there are auto, ring and direct")
        self._engine: Engine = open_engine(
            self._member,
            store,
            self.timeout,
            transport=transport,
            device=tensors_on,
            lanes=lanes,
            algorithm=algorithm,
            tuning=_tuning or {},
            has_group=_has_group,
        )
        self._device_calls: DeviceCalls | None = device_calls(self._engine)
        self._thread = CommunicationThread(f"ring_reduce {name} rank {rank}")
        self._process = os.getpid()
        self._main_thread = threading.main_thread().ident  # which alone handles signals
        self._last_count = 0.0
        self._closed = False
        # A ring that is dropped, or open when Python exits, tells the others that it is gone.
        self._finalizer = weakref.finalize(
            self, shut_down, self._engine, self._thread, self._member, self._process
        )

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        name: str = "default",
        timeout: float | timedelta | None = None,
        lanes: int | None = None,
        algorithm: str = "auto",
        device: torch.device | str | None = None,
        transport: str = "auto",
        _tuning: dict[str, Any] | None = None,
    ) -> Ring:
        """The ring of a torch.distributed process group (default: the world), whose store it meets in.

        Nothing is sent over the group itself. Ranks are those within the group. ``device`` None is the CPU if the group
        has a backend for it, else the current CUDA device. ``transport="auto"`` takes the first that all ranks can:
        shared memory (CUDA IPC on GPUs), then process groups of the ring's own; :attr:`transport_reason` says why.

        Raises ``ValueError`` for a process that is not in ``group``, ``RuntimeError`` before ``init_process_group``,
        and what :class:`Ring` raises.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_process_group_store

        if not dist.is_initialized():
            raise RuntimeError("Ring.from_group() needs torch.distributed.init_process_group() first")
        members = group if group is not None else dist.group.WORLD
        assert members is not None  # there is one after init_process_group
        rank = dist.get_rank(members)
        if rank < 0:
            raise ValueError("this process is not a member of the group; make the ring on its members only")
        store = _get_process_group_store(members)
        world = dist.get_world_size(members)
        return cls(
            store,
            rank=rank,
            world=world,
            name=name,
            timeout=timeout,
            lanes=lanes,
            algorithm=algorithm,
            device=device if device is not None or group_has_cpu(members) else "cuda",
            transport=transport,
            _tuning=_tuning,
            _has_group=True,
        )

    @property
    def transport(self) -> str:
        """How the ranks move data: ``"shm"``, ``"cuda_ipc"`` or ``"process_group"``."""
        return self._engine.transport

    @property
    def transport_reason(self) -> str:
        """Why they move it so."""
        return self._engine.reason

    @property
    def device(self) -> torch.device | None:
        """The CUDA device that the ring's tensors lie on; None for the CPU."""
        device: torch.device | None = self._engine.device
        return device

    @property
    def lanes(self) -> int:
        """Threads a rank that large calls use, the same on all ranks."""
        return self._engine.lanes

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called or the ring has failed."""
        return self._closed or self.failure is not None

    @property
    def failure(self) -> RingError | None:
        """Why the ring failed, the same on all ranks; None while it works or after :meth:`close`."""
        try:
            self._engine.check()
        except RingError as error:
            return None if self._closed else error
        return None

    @property
    def stats(self) -> RingStats:
        """Calls, bytes and waiting of this rank so far."""
        stats = self._engine.stats()
        return RingStats(
            calls=stats.calls,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            header_bytes_sent=stats.header_bytes_sent,
            seconds_waiting=stats.seconds_waiting,
            last_count=self._last_count if self._device_calls is None else self._device_calls.last_count(),
        )

    def all_reduce(
        self,
        x: Any,
        normalization: Normalization = SUM,
        *,
        out: Any = None,
        count: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The sum of all ranks' ``x``, divided as ``normalization`` says, on every rank.

        Args:
            x: torch tensor on the ring's device, NumPy array on the CPU, or an array of another library (CuPy) that
                speaks DLPack, of float64, float32, float16, bfloat16, int32 or int64; any shape and strides, the same
                shape and dtype on every rank. Reduced in place unless ``out`` is given.
            normalization: ``SUM``, ``MEAN``, ``divide_by(total)``, ``DIVIDE_BY_COUNT`` or ``WEIGHTED_MEAN``; integers
                only ``SUM``. 16-bit floats are added and divided in float32.
            out: takes the result; shape and dtype of ``x``.
            count: this rank's examples or tokens, a finite number >= 0, for the last two; 0 leaves this rank's ``x``
                out, NaN included. If all counts are 0, the result is 0. On a GPU it may be a tensor there.
            async_op: return at once, with a :class:`Work` (on a GPU, where every call is only enqueued, a
                :class:`DeviceWork`, and the call runs on a stream of the ring).

        Returns:
            ``x``, or ``out``; with ``async_op`` a work whose ``wait()`` returns it.

        Raises:
            TypeError, ValueError, CountError: these arguments are wrong; the ring goes on.
            RingMismatch: ranks called with different arguments; no tensor was changed.
            RingTimeout, PeerLost, RingAborted, RingClosed: see :mod:`ring_reduce.errors`.
        """
        # What nearly every call is, without what others need: with that, a small one would take twice as long.
        if type(normalization) is Normalization and normalization.uses_count == (count is not None):
            caller = threading.get_ident()
            busy = async_op or self._closed or not self._thread.idle or caller == self._thread.ident
            if not (busy or self._device_calls or self._ranges.flag._is_profiler_enabled):
                result = x if out is None else out
                total = self._engine.reduce_tensors(
                    x, result, normalization.number, normalization.total, count, caller == self._main_thread
                )
                if total >= 0:
                    if count is not None:
                        self._last_count = total
                    return result
        with self._on_stream_of(x):
            call = all_reduce_call(x, normalization, out, count, device=self._engine.device)
            return self._start(call, async_op)

    def reduce_scatter(
        self,
        x: Any,
        normalization: Normalization = SUM,
        *,
        out: Any = None,
        count: Any = None,
        async_op: bool = False,
    ) -> Any:
        """This rank's 1/n of the divided sum: part ``rank`` of ``world`` equal parts.

        The bits may differ from those of :meth:`all_reduce`, which cuts the tensor, and so orders the sum, otherwise.

        Without ``out`` the first dimension of ``x`` is split and a new tensor of shape ``(x.shape[0] / n, ...)`` is
        returned; with it, ``out`` has ``numel / n`` elements of any shape (it may be this rank's part of ``x`` itself).
        ``ValueError`` where it can't be split; other arguments and errors as :meth:`all_reduce`.
        """
        place = {"rank": self.rank, "world": self.world, "device": self._engine.device}
        with self._on_stream_of(x):
            return self._start(reduce_scatter_call(x, normalization, out, count, **place), async_op)

    def all_gather(self, x: Any, *, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' ``x``, one after another along the first dimension, on every rank.

        Without ``out`` a new tensor of shape ``(n * x.shape[0], ...)`` is returned, ``(n,)`` for a scalar; with it,
        ``out`` has ``n * numel`` elements of any shape (``x`` may be this rank's part of it). Other arguments and
        errors as :meth:`all_reduce`.
        """
        place = {"rank": self.rank, "world": self.world, "device": self._engine.device}
        with self._on_stream_of(x):
            return self._start(all_gather_call(x, out, **place), async_op)

    def abort(self, reason: str) -> None:
        """Ends the ring: calls that are running or queued, on every rank, raise ``RingAborted`` with ``reason``.

        From any thread. Nothing happens if the ring has failed or is closed.
        """
        text = f"rank {self.rank} aborted the ring: {reason}"
        self._engine.abort(text.encode(errors="replace").decode())  # a lone surrogate is no UTF-8

    def check(self) -> None:
        """Raises why the ring failed, or ``RingClosed`` after :meth:`close`; nothing while it works."""
        self._engine.check()
        if self._closed:  # close() is still waiting for the last calls
            raise RingClosed(f"{self._member.who} is being closed; make a new ring for further calls")

    def close(self) -> None:
        """Waits for queued calls, then leaves the ring. Other ranks that still call it get ``RingClosed``.

        Closing twice does nothing.
        """
        self._close(self.timeout + CLOSE_TIMEOUT_S)

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if not isinstance(error, RingError) or self.failure is None:
            self.abort(text_of(error))
        self._close(CLOSE_TIMEOUT_S)

    def __repr__(self) -> str:
        lanes = "1 lane" if self.lanes == 1 else f"{self.lanes} lanes"
        state = "closed" if self.closed else f"{lanes}, {self.transport}"
        return f"<Ring {self.name!r} rank {self.rank} of {self.world}, {state}>"

    def _on_stream_of(self, x: Any) -> AbstractContextManager[Any]:
        """For making and starting a call; on the CPU there are no streams."""
        return nullcontext() if self._device_calls is None else self._device_calls.on_stream_of(x)

    def _start(self, call: Call, async_op: bool) -> Any:
        if self._device_calls is not None:
            if self._closed:
                self.check()
            if not self._ranges.flag._is_profiler_enabled:
                return self._device_calls.start(call, async_op)
            with self._ranges.call(call, self._engine.transport):
                return self._device_calls.start(call, async_op)
        if self._closed:
            self.check()
        if not async_op:
            if threading.get_ident() == self._thread.ident:
                raise RuntimeError(
                    f"{self._member.who}: a synchronous call in a callback would wait for the thread that it runs on; "
                    f"pass async_op=True"
                )
            if self._thread.idle:
                # No hand-over to the thread in the time of a small message.
                return self._run(call, threading.get_ident() == self._main_thread)
        self.check()
        work = Work(self._thread.submit(lambda: self._run(call, interruptible=False)), call)
        if async_op:
            return work
        try:
            return work.wait()
        except BaseException as error:
            if not work.done():  # Ctrl-C: the call must not write its tensor some time later
                self.abort(f"{type(error).__name__} while it waited for a call")
            raise

    def _run(self, call: Call, interruptible: bool) -> Any:
        if self._ranges.flag._is_profiler_enabled:
            with self._ranges.call(call, self._engine.transport):
                result = call.run(self._engine, interruptible)
        else:
            result = call.run(self._engine, interruptible)
        if call.normalization.uses_count:
            self._last_count = call.total_count
        return result

    def _close(self, timeout: float) -> None:
        self._closed = True
        if os.getpid() != self._process or not self._finalizer.alive:
            return
        if not finish_calls(self._engine, self._thread, timeout):
            self.abort(f"a call was still in flight {timeout:.1f} s after close()")
            finish_calls(self._engine, self._thread, CLOSE_TIMEOUT_S)
        self._finalizer.detach()
        self._engine.close()
