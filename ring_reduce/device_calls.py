"""Calls on a CUDA device: enqueued on a stream, with events for who waits. Nothing here makes the host wait.

A transport may: cuda_ipc never does, process_group does where ranks have to agree first (``group_agreement.py``): in
calls that are new to them, and in each with a count, for whose value it waits if that lies on the device.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, cast

from .dlpack import is_foreign, on_stream_of, stream_of
from .engine import Engine
from .errors import CountError, RingError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from .call import Call


class DeviceEngine(Engine, Protocol):
    """What the transport of a device has beside."""

    def total_count(self) -> float:
        """The sum of counts over ranks of the last call that had one and has ended; does not wait."""


class DeviceCalls:
    """Enqueues the calls of a ring: a synchronous one on the caller's stream, others on a stream of the ring.

    The engine chains calls, so that they run in the order of :meth:`start` whatever their streams are.
    """

    def __init__(self, engine: DeviceEngine) -> None:
        self.device: torch.device = engine.device
        self._engine = engine
        self._lock = threading.Lock()  # an engine runs one call at a time
        self._side: torch.cuda.Stream | None = None  # the ring's stream, made by the first call that needs it
        self._counted = 0  # calls with a count so far
        # Behind the last of them; None where it was captured in a graph.
        self._count_known: torch.cuda.Event | None = None
        # Calls on arrays of other libraries that these do not order behind their own work, until a later one finds
        # them done: record_stream() keeps only the memory of torch's own allocator.
        self._held: deque[tuple[torch.cuda.Event, Call]] = deque()

    def on_stream_of(self, x: Any) -> AbstractContextManager[Any]:
        """Makes the stream on which the library of ``x`` works torch's current one: to make a call and start it."""
        return on_stream_of(x, self.device)

    def start(self, call: Call, async_op: bool) -> Any:
        """Enqueues ``call`` behind the caller's stream. Returns its result, or a :class:`DeviceWork`.

        ``CountError`` for a count that a captured graph would never read again; raises what the engine raises.
        """
        import torch

        # Of a fork too: CUDA says less there, and the lock may be held by a thread that does not run.
        self._engine.check()
        with torch.cuda.device(self.device), self._lock:
            capturing = torch.cuda.is_current_stream_capturing()
            if capturing and call.normalization.uses_count and isinstance(call.count, float):
                raise CountError(
                    f"count={call.count:g} would stay as it is in the captured graph; pass a float64 tensor on "
                    f"{self.device}, which each replay reads"
                )
            if not async_op:
                result = call.run(self._engine, interruptible=False)
                if call.normalization.uses_count:
                    event = torch.cuda.current_stream(self.device).record_event()
                    if call.borrows_count and not capturing:
                        self._hold(event, call)
                    self._tally(call, None if capturing else event)
                return result
            side = self._make_side()
            event = self._run_aside(call, side)
            if (is_foreign(call.given) or call.borrows_count) and not capturing:
                self._hold(event, call)
            tally = self._tally(call, None if capturing else event)
            return DeviceWork(self, call, tally, side, event, capturing)

    def last_count(self) -> float:
        """The total count of the last call that had one; 0 before. Waits for that call on the host."""
        import torch

        if self._counted == 0:
            return 0.0
        if self._count_known is None:
            torch.cuda.synchronize(self.device)  # whatever replays the graph
        else:
            self._count_known.synchronize()
        return self._engine.total_count()

    def failure(self) -> RingError | None:
        """Why the ring failed, if it is known by now."""
        try:
            self._engine.check()
        except RingError as error:
            return error
        return None

    def _tally(self, call: Call, event: torch.cuda.Event | None) -> DeviceTally:
        if not call.normalization.uses_count:
            return DeviceTally(self, None)
        self._counted += 1
        self._count_known = event
        return DeviceTally(self, self._counted)

    def _make_side(self) -> torch.cuda.Stream:
        import torch

        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        return self._side

    def _run_aside(self, call: Call, side: torch.cuda.Stream) -> torch.cuda.Event:
        """Runs ``call`` on ``side``, behind the current stream; the event that follows it."""
        import torch

        current = torch.cuda.current_stream(self.device)
        for tensor in _tensors(call):
            # Before the call, so that it holds for one that fails half-way.
            tensor.record_stream(side)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                call.run(self._engine, interruptible=False)
                event: torch.cuda.Event = side.record_event()
                return event
        except BaseException:
            # What was enqueued of it must not run beside what the caller does next, nor leave a capture unjoined.
            current.wait_stream(side)
            raise

    def _hold(self, event: torch.cuda.Event, call: Call) -> None:
        while self._held and self._held[0][0].query():
            self._held.popleft()
        self._held.append((event, call))


def device_calls(engine: Engine) -> DeviceCalls | None:
    """The calls of a ring of a device; None on the CPU."""
    return None if engine.device is None else DeviceCalls(cast(DeviceEngine, engine))


class DeviceTally:
    """The total count of a call. Keeps none of its tensors."""

    # The transport knows the total of its last call only.
    last_only = True

    def __init__(self, calls: DeviceCalls, number: int | None) -> None:
        self._calls = calls
        self._number = number  # among the calls with a count; None: it has none
        self._total: float | None = None

    @property
    def total_count(self) -> float | None:
        """The sum of counts over ranks, 0 where the normalization has none; None if the ring has failed.

        Waits for the call. ``RuntimeError`` once another call with a count was started.
        """
        calls = self._calls
        if self._number is None:
            return 0.0
        if self._total is None:
            if self._number != calls._counted:
                raise RuntimeError(
                    f"on {calls.device} a ring keeps the total count of its last call only, and another call with a "
                    f"count has followed; ask before that"
                )
            total = calls.last_count()
            self._total = total if calls.failure() is None else None
        return self._total


class DeviceWork:
    """An asynchronous call of a ring on a device: enqueued, in order, on a stream of the ring.

    Its tensors must not be touched until :meth:`wait`; dropping them, or this, is safe. A call that fails on the
    device leaves NaN in floating outputs over cuda_ipc, and over process_group what had been written by then.
    """

    def __init__(
        self,
        calls: DeviceCalls,
        call: Call,
        tally: DeviceTally,
        side: torch.cuda.Stream,
        event: torch.cuda.Event,
        captured: bool,
    ) -> None:
        self._calls = calls
        self._call = call
        self._tally = tally
        self._side = side
        self._event = event
        self._captured = captured

    @property
    def total_count(self) -> float:
        """The sum of counts over ranks; 0 where the normalization has none. Waits for the call on the host.

        ``RuntimeError`` once another call with a count was started: the device keeps the last one's only.
        """
        total = self._tally.total_count
        if total is None:
            self._raise_failure()
        return total or 0.0

    def wait(self, timeout: float | None = None) -> Any:
        """Makes the current stream wait for the call (CuPy's for its arrays), not the host; returns its result.

        ``timeout`` is there for the sake of :meth:`Work.wait`: the ring's own ends every call. Raises why the ring has
        failed, if it is known by now; else the next call, or ``ring.check()``, raises it.
        """
        self._raise_failure()
        stream_of(self._call.given, self._calls.device).wait_event(self._event)
        return self._call.given

    def done(self) -> bool:
        """Whether the call has ended on the device, well or not; False for one that was captured in a graph."""
        return not self._captured and self._event.query()

    def exception(self) -> BaseException | None:
        """Why the ring failed, once the call is done; None if it did not."""
        return self._calls.failure() if self.done() else None

    def tally(self) -> DeviceTally:
        """The total count, without the tensors."""
        return self._tally

    def get_future(self) -> torch.futures.Future[Any]:
        """A torch future on the device, as DDP's hooks return it: done now, and whoever waits for it makes its stream
        wait for the call. Its value is the reduced tensor, of the memory of another library's array too."""
        import torch

        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._calls.device])
        # set_result() records the current stream.
        with torch.cuda.stream(self._side):
            future.set_result(self._call.result)
        return future

    def __repr__(self) -> str:
        state = "captured" if self._captured else "done" if self.done() else "enqueued"
        return f"<DeviceWork {state}>"

    def _raise_failure(self) -> None:
        error = self._calls.failure()
        if error is not None:
            raise error


def _tensors(call: Call) -> list[Any]:
    """Of ``call``, each once: what its stream reads or writes."""
    given = [call.input, call.output, call.result]
    if not isinstance(call.count, float):
        given.append(call.count)
    return list({id(tensor): tensor for tensor in given}.values())
