"""The CUDA IPC transport: ranks on the GPUs of one host, each a process, that reach each other's memory."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core
from .bootstrap import Member, Store
from .call import Call
from .cuda import DEFAULT_DEPTH, DEFAULT_SEGMENT_BYTES, DEFAULT_WINDOW, why_unavailable
from .errors import CountError, RingError
from .handshake import Part, check_equal, make_together

if TYPE_CHECKING:
    import torch

    from . import _cuda

# Blocks a rank, where its GPU runs as many: some 32 blocks fill the links between GPUs, and leave it to others.
DEFAULT_LANES = 32

# What ranks may differ in.
_OWN = ("rank", "world", "lanes", "device", "resident_blocks", "process", "unavailable")


@dataclass(frozen=True)
class IpcTuning:
    """The sizes of a ring, the same on all ranks. Results do not depend on them."""

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    depth: int = DEFAULT_DEPTH
    window: int = DEFAULT_WINDOW
    # For tests:
    first_segment: int = 0  # where the counters start
    call_timeout_s: float | None = None  # of a wait in a call; None: as of making the ring


class CudaIpcEngine:
    """The ring of GPUs. See :class:`ring_reduce.engine.Engine`."""

    transport = "cuda_ipc"
    reason = "all ranks are on one host, and their GPUs reach each other's memory"

    def __init__(self, core: _cuda.IpcRing, lanes: int, device: torch.device) -> None:
        self.lanes = lanes
        self.device = device
        self._core = core
        self.abort = core.abort
        self.check = core.check
        self.close = core.close

    def run(self, call: Call, interruptible: bool) -> float:
        """Enqueues ``call`` on torch's current stream. Returns the total count of the last call that has ended
        and had one.

        Its count may be a number, or a float64 tensor of one element on the device, read when the call runs.

        Raises:
            CountError: a count that is neither, or a number while a graph is captured, which would replay it for ever.
            RingError: the ring has failed, or is closed.
        """
        import torch

        count, on_device = self._count(call)
        self._core.run(
            operation=call.operation,
            type=call.element_type,
            normalization=call.normalization.number,
            divisor=call.normalization.total,
            elements=call.elements,
            input=call.arrays.address(call.input),
            output=call.arrays.address(call.output),
            count=count,
            device_count=on_device,
            stream=torch.cuda.current_stream(self.device).cuda_stream,
        )
        return self._core.total_count()

    def _count(self, call: Call) -> tuple[float, int]:
        """The count as a number, or as an address on the device; the other is 1, or 0."""
        import torch

        if not call.normalization.uses_count:
            return 1.0, 0
        count: Any = call.count  # a tensor where it lies on the device
        if not isinstance(count, torch.Tensor):
            if torch.cuda.is_current_stream_capturing():
                raise CountError(
                    f"count={count!r} would stay as it is in the captured graph; pass a float64 tensor on the device"
                )
            return float(count), 0
        if count.device != self.device or count.dtype != torch.float64 or count.numel() != 1:
            raise CountError(
                f"count is {count.dtype} of {count.numel()} elements on {count.device}; on the device it is one "
                f"float64 on {self.device}"
            )
        return 1.0, count.data_ptr()

    def reduce_tensors(
        self, x: Any, out: Any, normalization: int, divisor: float, count: Any, interruptible: bool
    ) -> float:
        """-1: there is no short way, since what a call costs here is the launch."""
        return -1.0

    def busy(self) -> bool:
        """False: nothing on the host waits for a call."""
        return False

    def stats(self) -> Any:
        """As :class:`ring_reduce._cuda.IpcStats`."""
        return self._core.stats()

    def start_trace(self, limit: int) -> bool:
        """True: there is nothing to record on the host. What the device does, nsys shows."""
        return True

    def take_trace(self) -> list[_core.LaneTrace]:
        """Nothing, see :meth:`start_trace`."""
        return []


def open_cuda_ipc(
    member: Member,
    store: Store | None,
    timeout: float,
    lanes: int | None,
    device: torch.device,
    tuning: IpcTuning | None = None,
) -> CudaIpcEngine:
    """Makes the ring together with all other ranks, on ``device``; an error of one is an error on all.

    Args:
        timeout: seconds that making the ring, and any wait of a call, may take.
        lanes: thread blocks a rank that large calls use; the fewest that any rank asks for count.

    Raises:
        RingTimeout: a rank did not arrive.
        RingMismatch: ranks run different versions or settings.
        RingError: a rank has no driver, no GPU or no CUDA in its build, no peer access to its neighbour, or could not
            get, export or open memory; the text says which rank, and what to do. On every rank.
    """
    sizes = tuning or IpcTuning()
    hello = {
        "rank": member.rank,
        "world": member.world,
        "transport": "cuda_ipc",
        "wire_version": _core.WIRE_VERSION,
        "segment_bytes": sizes.segment_bytes,
        "depth": sizes.depth,
        "window": sizes.window,
        "process": _process(),
        **_describe(device, lanes),
    }
    return make_together(member, store, timeout, hello, _DeviceMemory(member, timeout, device, sizes))


def _describe(device: torch.device, lanes: int | None) -> dict[str, Any]:
    """Of this rank's GPU; where there is none to be had, why: the other ranks have to hear of it."""
    reason = why_unavailable()
    uuid, blocks = "", 0
    if reason is None:
        from . import _cuda

        try:
            uuid, blocks = _cuda.device(device.index)
        except RingError as error:
            reason = str(error)
    wanted = lanes if lanes is not None else DEFAULT_LANES
    return {"unavailable": reason, "device": uuid, "resident_blocks": blocks, "lanes": wanted}


def _process() -> str:
    """Tells the processes of a host apart, also those in different containers."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{os.getpid()} {namespace}"


class _DeviceMemory:
    """What the handshake asks of a transport."""

    def __init__(self, member: Member, timeout: float, device: torch.device, tuning: IpcTuning) -> None:
        self._member = member
        self._timeout = timeout
        self._device = device
        self._tuning = tuning
        self._core: _cuda.IpcRing | None = None  # from the moment on that there is something to give back
        self.steps: Sequence[Callable[[CudaIpcEngine], None]] = (self._prove,)

    def agree(self, mine: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The fewest lanes that any rank wants, as far as all blocks of a GPU's ranks run at the same time."""
        everyone = {self._member.rank: mine, **hellos}
        self._check_agreement(mine, everyone)
        on_device = [each["device"] for each in everyone.values()]
        fitting = [each["resident_blocks"] // on_device.count(each["device"]) for each in everyone.values()]
        lanes = max(1, min(*fitting, *(int(each["lanes"]) for each in everyone.values())))
        return {**mine, "lanes": lanes, "token": secrets.randbits(62)}

    def _check_agreement(self, mine: dict[str, Any], everyone: dict[int, dict[str, Any]]) -> None:
        check_equal(self._member, mine, everyone, mine.keys() - set(_OWN))
        processes: dict[str, int] = {}
        for rank, hello in everyone.items():
            if hello["unavailable"] is not None:
                raise RingError(
                    f"ring {self._member.name!r}: no ring on the GPU of rank {rank}: {hello['unavailable']}"
                )
            other = processes.setdefault(hello["process"], rank)
            if other != rank:
                raise RingError(
                    f"ring {self._member.name!r}: ranks {other} and {rank} are in one process, and CUDA IPC is between "
                    f"processes; start one a rank"
                )

    def descriptors(self, rank: int) -> int:
        return int(rank == 0)

    def make_part(self, agreed: dict[str, Any]) -> Part:
        """This rank's memory on its GPU, as a handle. With that of rank 0 goes host memory that all share."""
        with self._told_who():
            from . import _cuda

            self._core = _cuda.IpcRing(
                rank=self._member.rank,
                world=self._member.world,
                device=self._device.index,
                lanes=agreed["lanes"],
                segment_bytes=agreed["segment_bytes"],
                depth=agreed["depth"],
                window=agreed["window"],
                timeout_s=self._tuning.call_timeout_s or self._timeout,
                first_segment=self._tuning.first_segment,
            )
            handle, offset, uuid = self._core.part()
            record = {"handle": handle.hex(), "offset": offset, "device": uuid}
            if self._member.rank != 0:
                return Part(record, [])
            return Part(record, [_core.create_shared_memory(_cuda.control_bytes(self._member.world))])

    def open(self, agreed: dict[str, Any], parts: list[Part], processes: list[int]) -> CudaIpcEngine:
        """Maps the neighbours' memory, and writes a pattern into it."""
        assert self._core is not None
        rank, world = self._member.rank, self._member.world
        (control,) = parts[0].descriptors
        with self._told_who():
            self._core.open(
                control_fd=control,
                processes=_copies(processes),
                left=_staging(parts[(rank - 1) % world]),
                right=_staging(parts[(rank + 1) % world]),
                token=agreed["token"],
            )
        return CudaIpcEngine(self._core, agreed["lanes"], self._device)

    def _prove(self, opened: CudaIpcEngine) -> None:
        """All have written: looks for what the neighbours wrote here."""
        assert self._core is not None
        with self._told_who():
            self._core.prove()

    def discard(self, opened: CudaIpcEngine | None) -> None:
        """Takes back what was made of the ring, with the other ranks, which do so too."""
        if self._core is not None:
            self._core.close()
            self._core = None

    @contextlib.contextmanager
    def _told_who(self) -> Iterator[None]:
        """Errors with the ring and the rank that the others need to know, and of one type on all."""
        try:
            yield
        except (RingError, ValueError) as error:
            raise RingError(f"{self._member.who}: {error}") from None
        except (OSError, MemoryError, ImportError) as error:
            raise RingError(f"{self._member.who}: {type(error).__name__}: {error}") from None


def _copies(descriptors: Sequence[int]) -> list[int]:
    """Of all, or of none; -1 stays as it is."""
    copies: list[int] = []
    with contextlib.ExitStack() as undo:
        for descriptor in descriptors:
            copies.append(-1 if descriptor < 0 else os.dup(descriptor))
            if descriptor >= 0:
                undo.callback(os.close, copies[-1])
        undo.pop_all()
    return copies


def _staging(part: Part) -> _cuda.Part:
    return bytes.fromhex(part.record["handle"]), int(part.record["offset"]), str(part.record["device"])
