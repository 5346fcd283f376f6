"""The process_group transport: the ring over torch.distributed's point-to-point messages, on any number of hosts.

Gloo carries CPU tensors and NCCL those of GPUs. The step loop, the order of sums and the arithmetic are the core's, so
the bits are those of shared memory with ``algorithm="ring"``.

Waits end by the backend's means: a process that ends closes its connections, a rank that is merely late is given the
ring's timeout, and within a second all ranks hear of what one has seen, as long as their store can be reached. Over
NCCL the host does not wait: the records that go with every call, over Gloo, tell who is missing, and end the kernels.
What they can't see (a rank that stops behind its record) torch's watchdog ends, and with it the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import _core
from .bootstrap import GRACE_S, Member
from .bounded_store import BoundedStore
from .call import ALL_GATHER, REDUCE_SCATTER, Call
from .chunk_passes import ChunkPasses, CpuPasses, DevicePasses
from .errors import RingAborted, RingClosed, RingError, text_of
from .group_agreement import Agreement
from .group_failure import FirstFailure, Watch, again, lost
from .group_links import LinkError
from .group_port import GroupPort, Plan
from .group_start import Connections
from .group_tensors import dtype_of, tensor_at
from .interruptible import CallThread

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Large enough that a pass and a transfer outweigh their launches on a GPU, and the hand-overs between Gloo's threads.
SEGMENT_BYTES = 4 << 20
WINDOW = 2  # one segment is in transfer while the pass of another runs


class ProcessGroupEngine:
    """See :class:`ring_reduce.engine.Engine`. ``store`` is this ring's alone; it and ``device`` may be None in a world
    of 1 and on the CPU. Raises ``RingError`` if the groups can't be made."""

    transport = "process_group"
    lanes = 1

    def __init__(
        self,
        member: Member,
        store: dist.Store | None,
        timeout: float,
        *,
        reason: str,
        device: torch.device | None = None,
        segment_bytes: int | None = None,
        window: int = WINDOW,
    ) -> None:
        self.reason = reason
        self.device = device
        self._member = member
        self._timeout = timeout
        self._process = os.getpid()
        self._segment_bytes = segment_bytes or SEGMENT_BYTES
        connected = Connections(member, timeout, device, 2 * window)  # of a world of 1: none
        self._failures: FirstFailure | None = None
        if store is not None and member.world > 1:
            connected.connect(store, self._segment_bytes)
            self._failures = FirstFailure(BoundedStore(member.who, store, GRACE_S))
        self._talk, self._links, self._staging = connected.talk, connected.links, connected.staging
        self._thread = CallThread(f"{member.who}: calls")
        self._calling = threading.Lock()
        self._running = 0
        self._failure: RingError | None = None
        self._closed = False
        self._agreement = Agreement(
            member, self._talk, late=device is not None, fail=lambda error: self._fail(self._cause(error))
        )
        self._calls = self._bytes_sent = self._bytes_received = 0
        self._seconds_waiting = self._last_count = 0.0
        self._before: torch.cuda.Event | None = None  # on a device: behind the last call
        self._tracing = False
        # On a device a call may be on its way with nobody in it on the host.
        waits = self.busy if device is None else lambda: True
        self._watch = Watch(self._failures, waits, self._fail) if self._failures is not None else None

    def run(self, call: Call, interruptible: bool) -> float:
        """Runs a call and returns the total count. ``RuntimeError`` while a graph is captured; the ring goes on.

        On a thread of its own where it is to be ``interruptible``, since Gloo's waits are not.
        """
        self._check_fork()  # before the locks, which another thread of the parent may have held
        self._refuse_capture()
        if not interruptible or self.device is not None or self._links is None:
            return self._run(call)
        return self._thread.run(lambda: self._run(call), lambda error: self._fail(self._cause(error)))

    def _run(self, call: Call) -> float:
        with self._calling, self._failing_together(), self._in_order():
            self._calls += 1
            plan = self._plan(call)
            port = GroupPort(plan, self._links, self._passes(call.element_type), self._typed_staging(call))
            try:
                port.run()
            finally:
                self._bytes_sent += port.bytes_sent
                self._bytes_received += port.bytes_received
                self._seconds_waiting += port.seconds_waiting
        # As the core reports it: of the chunk that all ranks end with, or of this rank's own.
        total = plan.total_count(self._member.rank if call.operation == REDUCE_SCATTER else 0)
        if call.normalization.uses_count:
            self._last_count = total
        return total

    def total_count(self) -> float:
        """The sum of counts over ranks of the last call that had one."""
        return self._last_count

    def reduce_tensors(
        self, x: Any, out: Any, normalization: int, divisor: float, count: Any, interruptible: bool
    ) -> float:
        """Every call goes the long way."""
        return -1.0

    def abort(self, reason: str) -> None:
        """Ends the ring on every rank. A rank that is in no call hears of it in its next, or by ``check``."""
        if self._failure is None and not self._closed and os.getpid() == self._process:
            self._fail(RingAborted(reason))

    def check(self) -> None:
        """Raises why the ring has ended. On the CPU it asks the store whether another rank knows; on a device, where
        every wait checks, the watch does."""
        self._check_fork()
        if self._failure is None and not self._closed and self.device is None:
            said = self._failures.look() if self._failures is not None else None
            if said is not None:
                self._fail(said)
        self._check_open()

    def busy(self) -> bool:
        """Whether a call is running on the host."""
        return self._running > 0

    def close(self) -> None:
        """Leaves the ring. Idempotent."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        if self._failures is not None and self._watch is not None:
            self._failures.closing(self._member.rank, self._calls)
            self._watch.close()
            self._failures.close()
            self._watch = None  # and with it a cycle, which would keep connections until the next collection
        self._agreement.close()
        self._thread.close()
        for links in (self._links, self._talk):
            if links is not None and self._failure is None:
                links.close()
        self._staging.clear()

    def stats(self) -> _core.Stats:
        """Bytes of payload, and of the records by which ranks agree as ``header_bytes_sent``."""
        self._check_fork()
        return _core.Stats(
            calls=self._calls,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            header_bytes_sent=self._agreement.bytes_sent,
            seconds_waiting=self._seconds_waiting,
        )

    def start_trace(self, limit: int) -> bool:
        """Whether no other recorder is there. Lanes have no events: only the core records its own."""
        first, self._tracing = not self._tracing, True
        return first

    def take_trace(self) -> list[_core.LaneTrace]:
        """No lanes."""
        self._tracing = False
        return []

    def _plan(self, call: Call) -> Plan:
        """The call as all ranks agree on it. ``RingMismatch`` where they don't."""
        operation, normalization = call.operation, call.normalization
        fingerprint = _core.Fingerprint(
            call=self._calls,
            operation=operation,
            elements=call.elements,
            type=call.element_type,
            normalization=normalization.number,
            divisor=normalization.total,
        )
        # On a device it may lie there, and the host waits for it.
        count = float(call.count) if normalization.uses_count else None
        counts = self._agreement.counts(fingerprint, count)
        own_begin, _ = fingerprint.chunk(self._member.rank, self._member.world)
        return Plan(
            self._member,
            fingerprint,
            call.elements,
            self._flat(call, call.input),
            own_begin if operation == ALL_GATHER else 0,
            self._flat(call, call.output),
            own_begin if operation == REDUCE_SCATTER else 0,
            counts,
            self._segment_bytes // call.arrays.item_bytes(call.input),
        )

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """What fails in here ends the ring on all ranks, and is raised as the first of them tells it."""
        self._check_open()
        self._running += 1
        try:
            yield
        except (LinkError, RingError) as error:
            raise self._fail(self._cause(error)) from None
        except BaseException as error:
            self._fail(self._cause(error))
            raise
        finally:
            self._running -= 1

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Calls share the staging: on a device, one waits on its stream for the one before, on whatever stream."""
        if self.device is None:
            yield
            return
        import torch

        stream = torch.cuda.current_stream(self.device)
        if self._before is not None:
            stream.wait_event(self._before)
        yield
        self._before = stream.record_event()

    def _fail(self, error: RingError) -> RingError:
        """Ends the ring, and with it whatever waits for it on any rank; the first failure of all ranks."""
        first = self._failures.report(error) if self._failures is not None else error
        if self._failure is None and not self._closed:
            self._failure = first
            for links in (self._talk, self._links):
                if links is not None:
                    links.abort()
        return again(self._failure or first)

    def _cause(self, error: BaseException) -> RingError:
        """What the other ranks hear of an error in a call."""
        if isinstance(error, LinkError):
            closed_after = (
                self._failures.calls_before_closing(error.peer) if self._failures is not None else None
            )
            return lost(error, self._member.rank, self._calls, self._timeout, closed_after)
        if isinstance(error, RingError):
            return error
        return RingAborted(f"rank {self._member.rank} aborted the ring: {text_of(error)}")

    def _check_fork(self) -> None:
        if os.getpid() != self._process:
            raise RingClosed(
                f"rank {self._member.rank}: this process is a fork of the one that made the ring; make a ring of its "
                f"own here"
            )

    def _refuse_capture(self) -> None:
        if self.device is None:
            return
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"rank {self._member.rank}: calls over process_group can't be captured in a CUDA graph: their ranks "
                f"agree on the host, which a replay would leave out; use cuda_ipc, or call outside of the capture"
            )

    def _check_open(self) -> None:
        if self._failure is not None:
            raise again(self._failure)
        if self._closed:
            raise RingClosed(
                f"rank {self._member.rank}: the ring is closed; make a new one for further calls"
            )

    def _passes(self, element_type: int) -> ChunkPasses:
        return CpuPasses(element_type) if self.device is None else DevicePasses()

    def _flat(self, call: Call, x: Any) -> torch.Tensor:
        """The memory of a contiguous array or tensor."""
        if self.device is not None:
            return x.detach().view(-1)  # type: ignore[no-any-return]
        return tensor_at(call.arrays.address(x), call.arrays.elements(x), call.element_type)

    def _typed_staging(self, call: Call) -> list[torch.Tensor]:
        return [place.view(dtype_of(call.element_type)) for place in self._staging]
