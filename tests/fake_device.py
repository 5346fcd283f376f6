"""A CUDA device that is none: streams and events that note what was asked of them, tensors that say they lie there,
and an engine that reduces at once. For the order in which the host enqueues, which is all that it decides.

Streams are told by name: "main" is current at first, "ring" is the first that is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import ring_reduce as rr
from ring_reduce.call import ALL_GATHER, ALL_REDUCE, Call
from ring_reduce.device_calls import DeviceCalls

CARD = torch.device("cuda", 0)
WORLD = 2
_READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy")


class OnCard(torch.Tensor):
    """A tensor that seems to lie on the card. To ask for its value, which would make the host wait, is an error."""

    device = CARD
    is_cpu = False
    is_cuda = True
    machine: FakeCuda  # the one of this test

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in _READS, f"{name}() makes the host wait"
        if name in ("contiguous", "copy_"):
            cls.machine.log.append(f"{name} on {cls.machine.current.name}")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def record_stream(self, stream: Any) -> None:
        self.machine.kept.append((self.data_ptr(), stream.name))


def on_card(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(OnCard)


def ramp(size: int = 6) -> torch.Tensor:
    return on_card(torch.arange(1.0, size + 1))


def values(x: Any) -> list[Any]:
    """What the device holds."""
    found: list[Any] = x.as_subclass(torch.Tensor).tolist()
    return found


@dataclass(eq=False)
class FakeEvent:
    cuda: FakeCuda
    name: str

    def query(self) -> bool:
        return self.name not in self.cuda.running

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for {self.name}")
        self.cuda.running.discard(self.name)


@dataclass(eq=False)
class FakeStream:
    cuda: FakeCuda
    name: str
    cuda_stream: int = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> FakeEvent:
        self.cuda.events += 1
        event = FakeEvent(self.cuda, f"event {self.cuda.events}")
        self.cuda.running.add(event.name)
        self.cuda.log.append(f"{event.name} on {self.name}")
        return event


@dataclass
class FakeCuda:
    """What torch.cuda would be."""

    log: list[str] = field(default_factory=list)
    kept: list[tuple[int, str]] = field(default_factory=list)  # record_stream: address, and stream
    running: set[str] = field(default_factory=set)  # events that the device has not reached
    events: int = 0
    capturing: bool = False

    def __post_init__(self) -> None:
        self.main = self.current = FakeStream(self, "main")

    def stream_named(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Makes a stream of the user's the current one."""
        return self._stream(FakeStream(self, name))

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        """One in place of torch's, which has no device here."""
        fake = OnCard.machine = cls()
        fake._install(monkeypatch)
        return fake

    def _install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replaced = {
            "current_stream": self._current_stream,
            "default_stream": lambda device: FakeStream(self, "default"),
            "Stream": lambda device: FakeStream(self, "ring"),
            "ExternalStream": lambda address, device: FakeStream(self, f"stream {address}", address),
            "stream": self._stream,
            "device": lambda device: contextlib.nullcontext(),
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": lambda device: self.log.append("host waits for all"),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.futures, "Future", self._future_type())

    def _current_stream(self, device: torch.device) -> FakeStream:
        assert device == CARD
        return self.current

    @contextlib.contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _future_type(self) -> type:
        cuda = self

        class FakeFuture(torch._C.Future):  # type: ignore[type-arg]
            """torch's own, which takes no devices without CUDA."""

            def __init__(self, devices: Any) -> None:
                assert devices == [CARD]
                super().__init__([])

            def set_result(self, result: Any) -> None:
                cuda.log.append(f"future on {cuda.current.name}")
                super().set_result(result)

        return FakeFuture


class FakeEngine:
    """Reduces as if the other ranks had the same tensors and counts, at once."""

    transport, reason, device, lanes = "fake", "by a test", CARD, 1

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.calls: list[Call] = []
        self.error: BaseException | None = None  # that the next call raises
        self.failure: rr.RingError | None = None
        self._total = 0.0

    def run(self, call: Call, interruptible: bool) -> float:
        self.check()
        self.cuda.log.append(f"run on {self.cuda.current.name}")
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        x, out = (each.as_subclass(torch.Tensor) for each in (call.input, call.output))
        if call.operation == ALL_GATHER:
            out.copy_(torch.cat([x.flatten()] * WORLD).view(out.shape))
            return 0.0
        count = call.count if isinstance(call.count, float) else float(call.count.as_subclass(torch.Tensor))
        before = self._total
        if call.normalization.uses_count:
            self._total = WORLD * count
        part = x if call.operation == ALL_REDUCE else x.flatten()[: out.numel()].view(out.shape)
        weight = count if call.normalization == rr.WEIGHTED_MEAN else 1.0
        out.copy_(WORLD * weight * part / call.normalization.divisor(WORLD, self._total))
        return before

    def total_count(self) -> float:
        return self._total

    def reduce_tensors(self, *_: Any) -> float:
        raise AssertionError("the way of the CPU")

    def abort(self, reason: str) -> None:
        self.failure = rr.RingAborted(reason)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def busy(self) -> bool:
        return False

    def close(self) -> None: ...

    def stats(self) -> Any:
        with rr.Ring(rank=0, world=1) as ring:
            return ring._engine.stats()

    def start_trace(self, limit: int) -> bool:
        return True

    def take_trace(self) -> list[Any]:
        return []


def make_ring(engine: FakeEngine) -> rr.Ring:
    """Rank 0 of a ring of that engine."""
    ring = rr.Ring(rank=0, world=1)
    ring._engine.close()
    ring.world = WORLD
    ring._engine = engine
    ring._device_calls = DeviceCalls(engine)
    return ring
