"""The DDP hook on a device: streams of the bucket, of the count and of the future. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_cases import make_model
from ddp_helpers import group
from fake_device import CARD, FakeCuda, FakeEngine, make_ring, on_card, values
from launch import Seat, caught
from ring_reduce import ddp


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, index: int, last: bool) -> None:
        self.tensor = on_card(torch.full((3,), 6.0))
        self._index, self._last = index, last

    def buffer(self) -> torch.Tensor:
        return self.tensor

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda.installed(monkeypatch)
    monkeypatch.setattr(ddp, "_outside_backward", lambda: False)
    return fake


def backward(state: rr.RingHookState, buckets: int = 2) -> list[Any]:
    """The values of the buckets' futures."""
    made = [Bucket(i, i == buckets - 1) for i in range(buckets)]
    futures = [rr.ring_hook(state, bucket) for bucket in made]
    assert all(future.done() for future in futures)
    assert all(future.value() is bucket.tensor for future, bucket in zip(futures, made, strict=True))
    return [values(bucket.tensor) for bucket in made]


def test_each_bucket_begins_behind_the_stream_that_made_it(cuda: FakeCuda) -> None:
    """A backward runs on the streams of its forward: the current one when DDP calls the hook (pytorch issue 37790)."""
    with make_ring(FakeEngine(cuda)) as ring:
        state = rr.RingHookState(ring, rr.MEAN)
        with cuda.stream_named("backward"):
            assert backward(state) == [[6.0] * 3] * 2
    one = ["ring waits for backward", "run on ring", "event {} on ring", "future on ring"]
    assert cuda.log == [line.format(index) for index in (1, 2) for line in one]
    assert state.last == rr.Reduction.of(0.0, [2.0, 2.0])


def test_a_count_on_the_device_is_waited_for_by_the_stream_that_uses_it(cuda: FakeCuda) -> None:
    with make_ring(FakeEngine(cuda)) as ring:
        state = rr.RingHookState(ring, rr.DIVIDE_BY_COUNT)
        mine = on_card(torch.tensor(1.0, dtype=torch.float64))
        with cuda.stream_named("first"):
            state.add_count(mine)
        mine.zero_()  # the caller may use it again
        with cuda.stream_named("second"):
            state.add_count(on_card(torch.tensor(2)))
        with cuda.stream_named("backward"):
            assert backward(state, buckets=1) == [[2.0] * 3]
        assert cuda.log[:5] == [
            "event 1 on first",
            "second waits for event 1",
            "event 2 on second",
            "backward waits for event 2",
            "ring waits for backward",
        ]
        kept_for = [stream for _, stream in cuda.kept]
        assert kept_for == ["second", "backward", "ring", "ring"], "two counts; the bucket and the count"
        assert "host" not in " ".join(cuda.log)
        assert state.last == rr.Reduction.of(6.0, [6.0])
        with pytest.raises(rr.CountError, match="the last one was used"):
            backward(state)


def test_numbers_and_tensors_add_up(cuda: FakeCuda) -> None:
    with make_ring(FakeEngine(cuda)) as ring:
        state = rr.RingHookState(ring, rr.DIVIDE_BY_COUNT)
        state.add_count(1)
        state.add_count(on_card(torch.tensor(1)))
        state.add_count(1)
        assert backward(state) == [[2.0] * 3] * 2
        state.add_count(on_card(torch.tensor(5)))
        state.reset()
        state.add_count(3)
        assert backward(state) == [[2.0] * 3] * 2
        assert state.last == rr.Reduction.of(6.0, [6.0, 6.0])


def test_what_the_last_backward_divided_by_is_gone_with_another_call(cuda: FakeCuda) -> None:
    with make_ring(FakeEngine(cuda)) as ring:
        state = rr.RingHookState(ring, rr.WEIGHTED_MEAN)
        state.add_count(2)
        assert backward(state) == [[6.0] * 3] * 2
        ring.all_reduce(on_card(torch.ones(1)), rr.WEIGHTED_MEAN, count=7)
        with pytest.raises(RuntimeError, match="another call with a count has followed"):
            _ = state.last


def test_an_error_of_the_engine_reaches_ddp_and_the_other_ranks(cuda: FakeCuda) -> None:
    engine = FakeEngine(cuda)
    with make_ring(engine) as ring:
        state = rr.RingHookState(ring, rr.MEAN)
        engine.error = RuntimeError("no kernel image by the test")
        with pytest.raises(RuntimeError, match="no kernel image by the test"):
            backward(state)
        assert isinstance(ring.failure, rr.RingAborted)
        assert "rank 0 aborted the ring: RuntimeError: no kernel image by the test" in str(ring.failure)
    assert "future on ring" not in cuda.log


def test_a_failure_that_is_known_late_ends_the_next_backward(cuda: FakeCuda) -> None:
    engine = FakeEngine(cuda)
    with make_ring(engine) as ring:
        state = rr.RingHookState(ring, rr.DIVIDE_BY_COUNT)
        state.add_count(3)
        backward(state)
        engine.failure = rr.RingTimeout("by the test")
        assert state.last is None
        state.add_count(3)
        with pytest.raises(rr.RingTimeout, match="by the test"):
            backward(state)


def test_counts_that_the_device_could_not_take(cuda: FakeCuda) -> None:
    with make_ring(FakeEngine(cuda)) as ring:
        state = rr.RingHookState(ring, rr.WEIGHTED_MEAN)
        state.add_count(1)
        with pytest.raises(rr.CountError, match="a second count"):
            state.add_count(2)
        assert isinstance(ring.failure, rr.RingAborted)


def test_a_model_elsewhere_is_refused_before_it_trains(cuda: FakeCuda) -> None:
    on_cpu, on_gpu = torch.nn.Parameter(torch.ones(2)), SimpleNamespace()
    on_gpu.device, on_gpu.is_cpu, on_gpu.requires_grad = torch.device("cuda", 1), False, True
    model = SimpleNamespace(parameters=lambda: [on_cpu])
    with (
        make_ring(FakeEngine(cuda)) as ring,
        pytest.raises(ValueError, match="on cpu, and the ring runs on cuda:0"),
    ):
        ddp._check_devices(model, ring)
    model.parameters = lambda: [on_cpu, on_gpu]
    with (
        rr.Ring(rank=0, world=1) as ring,
        pytest.raises(ValueError, match=r"on cuda:1, and the ring runs on cpu; .*device='cuda:1'"),
    ):
        ddp._check_devices(model, ring)
    on_gpu.requires_grad = False
    with rr.Ring(rank=0, world=1) as ring:
        ddp._check_devices(model, ring)


def attach_to_another_device(seat: Seat) -> str:
    with group(seat) as ring, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring._engine, "device", CARD)
        return str(caught(lambda: rr.attach(make_model(), ring, rr.MEAN)))


def test_attach_looks_where_the_model_is(run: Run) -> None:
    for error in run(2, attach_to_another_device):
        assert "the model has parameters on cpu, and the ring runs on cuda:0" in error
