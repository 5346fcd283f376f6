"""Arrays of other libraries, through DLPack: CuPy's on its stream, and any that can be written to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ring_reduce as rr
from conftest import Run
from fake_device import CARD, FakeCuda, FakeEngine, OnCard, make_ring, on_card, values
from launch import Seat, caught


class Shared:
    """An array of a library that the ring does not know."""

    def __init__(self, array: np.ndarray, kind: int = 1) -> None:
        self.array, self.kind = array, kind
        self.shape, self.dtype, self.device = array.shape, array.dtype, "here"

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[key] = value


class WithNamespace(Shared):
    """As the array API standard has it."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(
            empty=lambda shape, dtype, device: WithNamespace(np.full(shape, np.nan, dtype))
        )


def reduce_shared(seat: Seat) -> None:
    ring = seat.kept_ring()
    x = Shared(np.arange(6.0))
    assert ring.all_reduce(x, rr.MEAN) is x
    assert x.array.tolist() == [0, 1, 2, 3, 4, 5]
    assert ring.all_reduce(x, out=x) is x
    assert x.array.tolist() == [0, 2, 4, 6, 8, 10]
    around = np.zeros(12, np.float32)
    out = Shared(around[1::2])  # strided
    assert ring.all_reduce(Shared(np.ones(6, np.float32)), out=out, async_op=True).wait() is out
    assert around.tolist() == [0, 2] * 6
    assert ring.all_reduce(Shared(np.ones(0))).array.size == 0
    gathered = ring.all_gather(WithNamespace(np.full(2, float(seat.rank))))
    assert type(gathered) is WithNamespace
    assert gathered.array.tolist() == [0, 0, 1, 1]
    assert ring.reduce_scatter(WithNamespace(np.ones((2, 2)))).array.tolist() == [[2, 2]]
    mixed: Any = x if seat.rank == 0 else x.array
    ring.all_reduce(mixed)
    assert x.array.tolist() == [0, 4, 8, 12, 16, 20], "ranks may use different libraries"


def test_an_array_that_speaks_dlpack(run: Run) -> None:
    run(2, reduce_shared)


def read_only() -> Shared:
    array = np.ones(3)
    array.flags.writeable = False
    return Shared(array)


class _OfArrow:
    """Has no assignment, as Arrow's arrays."""

    def __dlpack__(self) -> None:
        raise AssertionError("asked for its memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


_OfJax = type("ArrayImpl", (Shared,), {"__module__": "jaxlib._jax"})

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "read-only": (read_only, TypeError, "can't be shared through DLPack: .*readonly"),
    "no assignment": (_OfArrow, TypeError, "a test_cupy._OfArrow can't be changed; copy it"),
    "jax": (lambda: _OfJax(np.ones(3)), TypeError, "a jaxlib.ArrayImpl can't be changed; copy it"),
    "reversed": (lambda: Shared(np.ones(3)[::-1]), ValueError, "negative strides"),
    "kind": (
        lambda: Shared(np.ones(3), kind=8),
        TypeError,
        "of DLPack's kind 8; a ring takes memory of CPU or",
    ),
    "bool": (lambda: Shared(np.ones(3, bool)), TypeError, "not bool; convert it first"),
    "repeated": (
        lambda: Shared(np.lib.stride_tricks.as_strided(np.ones(3), (3,), (0,))),
        ValueError,
        "share memory",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arrays_that_no_ring_takes(what: str) -> None:
    """torch itself would write into the read-only one, and end the process at the reversed one."""
    make, kind, text = REFUSED[what]
    with rr.Ring(rank=0, world=1) as ring:
        for async_op in (False, True):
            with pytest.raises(kind, match=text):
                ring.all_reduce(make(), async_op=async_op)
        x = Shared(np.ones(4))
        assert ring.all_reduce(x, rr.divide_by(2)).array.tolist() == [0.5] * 4


def test_out_may_be_x_itself() -> None:
    """Strided, so that two tensors over its memory would be taken for an overlap."""
    around = np.ones(8)
    x = Shared(around[::2])
    with rr.Ring(rank=0, world=1) as ring:
        assert ring.all_reduce(x, rr.divide_by(2), out=x) is x
    assert around.tolist() == [0.5, 1] * 4


def test_libraries_are_not_mixed_in_a_call() -> None:
    with rr.Ring(rank=0, world=1) as ring:
        for x, out in (
            (Shared(np.ones(3)), torch.ones(3)),
            (np.ones(3), Shared(np.ones(3))),
            (Shared(np.ones(3)), WithNamespace(np.ones(3))),
        ):
            error = caught(lambda x=x, out=out: ring.all_reduce(x, out=out))  # type: ignore[misc]
            assert isinstance(error, TypeError)
            assert "use the same library for both" in str(error)
        error = caught(lambda: ring.all_gather(Shared(np.ones(3))))
        assert isinstance(error, TypeError)
        assert "can't make a new test_cupy.Shared; pass out=" in str(error)


class FakeArray(Shared):
    """CuPy's array."""

    log: list[Any]

    def __dlpack__(self, *, stream: int) -> Any:  # type: ignore[override]
        self.log.append(stream)
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def data(self) -> Any:
        return self.array.tolist()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """With CuPy, whose current stream is 7, and a DLPack of torch that makes tensors on the card."""
    fake = FakeCuda.installed(monkeypatch)
    from_dlpack = torch.from_dlpack
    monkeypatch.setattr(torch, "from_dlpack", lambda capsule: on_card(from_dlpack(capsule)))
    FakeArray.log = []
    streams = SimpleNamespace(get_current_stream=lambda index: SimpleNamespace(ptr=7 if index == 0 else None))
    module = SimpleNamespace(ndarray=FakeArray, cuda=streams)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return fake


def test_a_cupy_array_is_reduced_on_cupys_stream(cuda: FakeCuda) -> None:
    x = FakeArray(np.arange(4.0))
    with make_ring(FakeEngine(cuda)) as ring:
        assert ring.all_reduce(x) is x
        assert cuda.log == ["run on stream 7"]
        assert FakeArray.log == [7], "CuPy orders what it does behind that very stream"
        cuda.log.clear()
        work = ring.all_reduce(x, rr.MEAN, async_op=True)
        assert work.wait() is x
    assert cuda.log == [
        "ring waits for stream 7",
        "run on ring",
        "event 1 on ring",
        "stream 7 waits for event 1",
    ]
    assert x.data() == [0, 2, 4, 6]


def test_cupys_default_stream(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is 0, of which torch's ExternalStream would make another stream."""
    monkeypatch.setattr(sys.modules["cupy"].cuda, "get_current_stream", lambda index: SimpleNamespace(ptr=0))
    with make_ring(FakeEngine(cuda)) as ring:
        ring.all_reduce(FakeArray(np.ones(3)))
    assert cuda.log == ["run on default"]
    assert FakeArray.log == [1], "as the array API names it"


def test_a_cupy_array_is_kept_until_the_device_is_done(cuda: FakeCuda) -> None:
    """torch's allocator looks after its own memory only."""
    with make_ring(FakeEngine(cuda)) as ring:
        assert ring._device_calls is not None
        held = ring._device_calls._held
        ring.all_reduce(FakeArray(np.ones(3)), async_op=True)
        ring.all_reduce(FakeArray(np.ones(4)), async_op=True)
        assert [call.elements for _, call in held] == [3, 4]
        cuda.running.discard("event 1")
        ring.all_reduce(FakeArray(np.ones(5)), async_op=True)
        assert [call.elements for _, call in held] == [4, 5]
        ring.all_reduce(on_card(torch.ones(6)), async_op=True)
        assert [call.elements for _, call in held] == [4, 5]


def test_a_cupy_count_is_not_read(cuda: FakeCuda) -> None:
    x, count = FakeArray(np.full(3, 6.0)), FakeArray(np.array(3))
    engine = FakeEngine(cuda)
    with make_ring(engine) as ring:
        ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=count)
    assert x.data() == [2.0] * 3
    assert type(engine.calls[0].count) is OnCard


def test_a_cupy_count_of_a_torch_tensor_is_kept_until_the_device_is_done(cuda: FakeCuda) -> None:
    """As float64 it is read where CuPy has it; the call runs on torch's stream, or on the ring's."""
    with make_ring(FakeEngine(cuda)) as ring:
        assert ring._device_calls is not None
        for async_op in (False, True):
            count = FakeArray(np.array(2.0))
            ring.all_reduce(on_card(torch.ones(3)), rr.DIVIDE_BY_COUNT, count=count, async_op=async_op)
            _, held = ring._device_calls._held[-1]
            assert held.count.data_ptr() == count.array.ctypes.data
        assert len(ring._device_calls._held) == 2
        ring.all_reduce(on_card(torch.ones(3)), rr.DIVIDE_BY_COUNT, count=on_card(torch.ones(1)))
        assert len(ring._device_calls._held) == 2


def test_the_future_of_a_cupy_array_holds_a_tensor(cuda: FakeCuda) -> None:
    """torch looks for the tensors in a value by pickling it, which would copy the array to the host."""
    with make_ring(FakeEngine(cuda)) as ring:
        value = ring.all_reduce(FakeArray(np.ones(3)), async_op=True).get_future().value()
    assert values(value) == [2.0] * 3


def test_a_cupy_array_on_a_ring_of_the_cpu(cuda: FakeCuda) -> None:
    with (
        rr.Ring(rank=0, world=1) as ring,
        pytest.raises(TypeError, match=rf"runs on cpu, and x is on {CARD}; .*from_group\(device='cuda:0'\)"),
    ):
        ring.all_reduce(FakeArray(np.ones(3)))


def test_a_torch_without_cuda(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with (
        rr.Ring(rank=0, world=1) as ring,
        pytest.raises(TypeError, match=r"is on a GPU, and torch .* can use none; install a CUDA build"),
    ):
        ring.all_reduce(FakeArray(np.ones(3)))
