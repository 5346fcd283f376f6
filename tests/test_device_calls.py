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
from fake_device import CARD, WORLD, FakeCuda, FakeEngine, make_ring, on_card, values
from ring_reduce.device_calls import DeviceWork


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def engine(cuda: FakeCuda) -> FakeEngine:
    return FakeEngine(cuda)


@pytest.fixture
def ring(engine: FakeEngine) -> Iterator[rr.Ring]:
    with make_ring(engine) as made:
        yield made


def ramp(size: int = 6) -> torch.Tensor:
    return on_card(torch.arange(1.0, size + 1))


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


COUNTS: dict[str, Callable[[], Any]] = {
    "float64": lambda: on_card(torch.tensor([4.0], dtype=torch.float64)),
    "int64": lambda: on_card(torch.tensor(4)),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_a_count_on_the_device_is_not_read(
    kind: str, cuda: FakeCuda, engine: FakeEngine, ring: rr.Ring
) -> None:
    """The fake tensor raises where the host would."""
    x = ramp()
    ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=COUNTS[kind]())
    assert values(x) == [value / 8 for value in DOUBLED]
    ring.all_reduce(x, rr.WEIGHTED_MEAN, count=COUNTS[kind](), async_op=True)
    assert values(x) == [value / 8 for value in DOUBLED]
    (_, call) = engine.calls
    assert call.count.dtype is torch.float64
    assert call.count.shape == ()
    assert (call.count.data_ptr(), "ring") in cuda.kept


def test_a_count_of_the_host_is_a_number(engine: FakeEngine, ring: rr.Ring) -> None:
    ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=torch.tensor(3))
    ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=np.float32(0.5))
    assert [call.count for call in engine.calls] == [3.0, 0.5]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (torch.zeros(2), r"of shape \(2,\) on cuda:0; it has to be one number, on cuda:0 or on the host"),
        (torch.tensor(True), "count is torch.bool"),
        (torch.tensor(1j), "count is torch.complex64"),
    ],
)
def test_what_is_no_count_on_the_device(
    count: torch.Tensor, text: str, cuda: FakeCuda, ring: rr.Ring
) -> None:
    with pytest.raises(rr.CountError, match=text):
        ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=on_card(count))
    with pytest.raises(rr.CountError, match="on meta; it has to be one number, on cuda:0"):
        ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=torch.tensor(3.0, device="meta"))
    with pytest.raises(rr.CountError, match="count is -1"):
        ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=-1)
    assert cuda.log == []


def test_totals_are_asked_of_the_device(cuda: FakeCuda, ring: rr.Ring) -> None:
    assert ring.stats.last_count == 0
    work = ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=3, async_op=True)
    ring.all_reduce(ramp())  # has no count
    assert "host" not in " ".join(cuda.log)
    assert work.total_count == WORLD * 3
    assert cuda.log[-1] == "host waits for event 1"
    assert ring.all_reduce(ramp(), async_op=True).total_count == 0
    ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=5)
    assert ring.stats.last_count == WORLD * 5
    assert work.total_count == WORLD * 3, "it is known"


def test_a_total_that_the_device_no_longer_has_is_an_error(ring: rr.Ring) -> None:
    work = ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=3, async_op=True)
    ring.all_reduce(ramp(), rr.DIVIDE_BY_COUNT, count=5)
    with pytest.raises(RuntimeError, match="keeps the total count of its last call only"):
        _ = work.total_count


@pytest.mark.parametrize("async_op", [False, True])
def test_a_captured_call_takes_its_count_from_the_device(
    async_op: bool, cuda: FakeCuda, ring: rr.Ring
) -> None:
    cuda.capturing = True
    x = ramp()
    with pytest.raises(rr.CountError, match=r"count=3 would stay .*; pass a float64 tensor on cuda:0"):
        ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=3, async_op=async_op)
    assert cuda.log == []
    assert values(x) == values(ramp())
    ring.all_reduce(x, rr.divide_by(4), async_op=async_op)
    result = ring.all_reduce(
        x, rr.DIVIDE_BY_COUNT, count=on_card(torch.tensor(3.0).double()), async_op=async_op
    )
    if async_op:
        cuda.running.clear()
        assert not result.done(), "no event of a capture can be asked"
        result.wait()
        assert cuda.log[-1] == "main waits for event 2", "joins what it forked"
    assert ring.stats.last_count == 6
    assert cuda.log[-1] == "host waits for all"


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
