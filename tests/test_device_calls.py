"""Calls on a device: what the host enqueues, on which stream and in which order. No GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ring_reduce as rr
from fake_device import CARD, FakeCuda, FakeEngine, make_ring, on_card, ramp, values
from ring_reduce.device_calls import DeviceWork


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.installed(monkeypatch)


@pytest.fixture
def engine(cuda: FakeCuda) -> FakeEngine:
    return FakeEngine(cuda)


@pytest.fixture
def ring(engine: FakeEngine) -> Iterator[rr.Ring]:
    with make_ring(engine) as made:
        yield made


DOUBLED = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
ENQUEUED = ["ring waits for main", "run on ring", "event 1 on ring"]


def test_a_synchronous_call_runs_on_the_callers_stream(cuda: FakeCuda, ring: rr.Ring) -> None:
    x = ramp()
    version = x._version
    assert ring.all_reduce(x) is x
    assert x._version > version
    assert values(x) == DOUBLED
    with cuda.stream_named("mine"):
        ring.all_reduce(x, rr.MEAN)
    assert cuda.log == ["run on main", "run on mine"]
    assert cuda.kept == []


def test_an_asynchronous_call_runs_behind_the_callers_stream(cuda: FakeCuda, ring: rr.Ring) -> None:
    x = ramp()
    work = ring.all_reduce(x, async_op=True)
    assert isinstance(work, DeviceWork)
    assert cuda.log == ENQUEUED
    assert cuda.kept == [(x.data_ptr(), "ring")]
    assert not work.done()
    assert work.exception() is None
    with cuda.stream_named("mine"):
        assert work.wait() is x
    assert cuda.log == [*ENQUEUED, "mine waits for event 1"]
    assert not work.done(), "the host did not wait"
    cuda.running.clear()
    assert work.done()
    assert values(x) == DOUBLED


def test_a_second_asynchronous_call_takes_the_same_stream(cuda: FakeCuda, ring: rr.Ring) -> None:
    works = [ring.all_reduce(ramp(), async_op=True) for _ in range(2)]
    assert len({id(work._side) for work in works}) == 1


def test_the_future_is_of_the_rings_stream(cuda: FakeCuda, ring: rr.Ring) -> None:
    """torch records the current stream when a future is done, and whoever waits for it waits for that stream."""
    x = ramp()
    future = ring.all_reduce(x, rr.MEAN, async_op=True).get_future()
    assert cuda.log == [*ENQUEUED, "future on ring"]
    assert future.done()
    assert future.value() is x


@pytest.mark.parametrize("async_op", [False, True])
def test_copies_of_strided_tensors_are_made_in_order(
    async_op: bool, cuda: FakeCuda, engine: FakeEngine, ring: rr.Ring
) -> None:
    around = on_card(torch.zeros(12))
    x, out = ramp(12)[::2], around[1::2]
    ring.all_reduce(x, out=out, async_op=async_op)
    assert values(around) == [0, 2, 0, 6, 0, 10, 0, 14, 0, 18, 0, 22]
    where = "ring" if async_op else "main"
    copies = [line for line in cuda.log if "copy" in line or "contig" in line or "run" in line]
    assert copies == ["contiguous on main", f"run on {where}", f"copy_ on {where}"]
    (call,) = engine.calls
    used = {call.input.data_ptr(), call.output.data_ptr(), out.data_ptr()}
    assert len(used) == 3
    assert set(cuda.kept) == ({(address, "ring") for address in used} if async_op else set())


def test_every_operation(cuda: FakeCuda, ring: rr.Ring) -> None:
    x = ramp()
    assert values(ring.reduce_scatter(x, rr.divide_by(4))) == [0.5, 1.0, 1.5]
    gathered = ring.all_gather(x)
    assert gathered.device == CARD
    assert values(gathered) == values(x) * 2
    out = on_card(torch.full((3,), torch.nan))
    work = ring.reduce_scatter(x, out=out, async_op=True)
    assert work.wait() is out
    assert values(out) == DOUBLED[:3]
    assert cuda.kept == [(x.data_ptr(), "ring"), (out.data_ptr(), "ring")]


def test_an_error_leaves_nothing_beside_the_callers_stream(
    cuda: FakeCuda, engine: FakeEngine, ring: rr.Ring
) -> None:
    """Part of the call may have been enqueued: the caller's stream waits for it."""
    engine.error = rr.RingMismatch("by the test")
    x = ramp()
    with pytest.raises(rr.RingMismatch, match="by the test"):
        ring.all_reduce(x, async_op=True)
    assert cuda.log == ["ring waits for main", "run on ring", "main waits for ring"]
    assert cuda.kept == [(x.data_ptr(), "ring")]
    assert cuda.current is cuda.main
    with pytest.raises(rr.RingMismatch, match="by the test"):
        ring.all_reduce(x)
    engine.error = None
    assert values(ring.all_reduce(x)) == DOUBLED, "the lock is free"


def test_a_failure_of_the_device_is_raised_by_wait_and_by_the_next_call(
    cuda: FakeCuda, engine: FakeEngine, ring: rr.Ring
) -> None:
    work = ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=3, async_op=True)
    engine.failure = rr.RingTimeout("by the test")
    assert work.exception() is None, "not done yet"
    cuda.running.clear()
    assert work.exception() is engine.failure
    calls: list[Callable[[], object]] = [
        work.wait,
        lambda: work.total_count,
        lambda: ring.all_reduce(ramp()),
        lambda: ring.all_reduce(ramp(), async_op=True),
        ring.check,
    ]
    for call in calls:
        with pytest.raises(rr.RingTimeout, match="by the test"):
            call()
    assert cuda.log.count("run on main") == 0


def test_a_fork_gets_the_ring_s_error_and_not_cuda_s(
    engine: FakeEngine, ring: rr.Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it wait for a thread of its parent."""

    def no_cuda(device: torch.device) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    assert ring._device_calls is not None
    with ring._device_calls._lock, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", no_cuda)
        engine.failure = rr.RingClosed("this process is a fork of the one that made the ring")
        for async_op in (False, True):
            with pytest.raises(rr.RingClosed, match="is a fork"):
                ring.all_reduce(ramp(), async_op=async_op)
    engine.failure = None


def test_tensors_elsewhere_are_refused(cuda: FakeCuda, ring: rr.Ring) -> None:
    make_cpu = r"or make a ring of its device: Ring\.from_group\(device='cpu'\)"
    for x, what in ((torch.ones(3), "x is on cpu"), (np.ones(3), "x is a NumPy array")):
        with pytest.raises(
            TypeError, match=rf"this ring runs on cuda:0, and {what}; move it to cuda:0, {make_cpu}"
        ):
            ring.all_reduce(x)
    with pytest.raises(TypeError, match=r"this ring runs on cuda:0, and x is on meta; move it to cuda:0$"):
        ring.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(TypeError, match="and out is a NumPy array"):
        ring.all_reduce(ramp(3), out=np.ones(3))
    with pytest.raises(TypeError, match="and out is on cpu"):
        ring.all_reduce(ramp(3), out=torch.ones(3))
    assert cuda.log == []
    with (
        rr.Ring(rank=0, world=1) as on_cpu,
        pytest.raises(TypeError, match=r"runs on cpu, and x is on cuda:0; .*from_group\(device='cuda:0'\)"),
    ):
        on_cpu.all_reduce(ramp())


def test_calls_are_in_the_profile(cuda: FakeCuda, ring: rr.Ring) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ring.all_reduce(ramp(), rr.MEAN, async_op=True)
    names = [event.name for event in profiler.events() or [] if event.name.startswith("ring_reduce")]
    assert names == ["ring_reduce all_reduce 24 B MEAN fake"]


def test_calls_of_two_threads_run_one_at_a_time(engine: FakeEngine, ring: rr.Ring) -> None:
    inside, overlaps, second = [0], [0], threading.Event()
    run = engine.run

    def watched(call: Any, interruptible: bool) -> float:
        inside[0] += 1
        overlaps[0] += inside[0] > 1
        second.wait(20)
        threading.Event().wait(0.05)  # for the other to come in, where nothing keeps it out
        inside[0] -= 1
        return run(call, interruptible)

    engine.run = watched  # type: ignore[method-assign]

    def other() -> None:
        second.set()
        ring.all_reduce(ramp())

    thread = threading.Thread(target=lambda: ring.all_reduce(ramp()))
    thread.start()
    other()
    thread.join()
    assert overlaps == [0]
    assert len(engine.calls) == 2


def test_a_ring_that_is_closed(ring: rr.Ring, cuda: FakeCuda) -> None:
    ring.close()
    with pytest.raises(rr.RingClosed):
        ring.all_reduce(ramp())
    assert cuda.log == []
