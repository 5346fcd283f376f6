"""Ranges: their names in torch's profiler and in NVTX, and that nobody pays who does not listen."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.cuda.nvtx
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import ring_reduce as rr
from conftest import Run
from ddp_helpers import batch_of, group, loss_of, make_net, wrap
from launch import Seat, caught
from ring_reduce.tracing import Recorder, Track


def ring_events(profiler: profile) -> list[FunctionEvent]:
    found = [event for event in profiler.events() or [] if event.name.startswith("ring_reduce")]
    return sorted(found, key=lambda event: event.time_range.start)


class OneBucket:
    """What DDP hands to a hook."""

    def buffer(self) -> torch.Tensor:
        return torch.ones(8)

    def index(self) -> int:
        return 3

    def is_last(self) -> bool:
        return True


def test_calls_are_in_the_profile() -> None:
    with rr.Ring(rank=0, world=1) as ring:
        ring.all_reduce(torch.ones(256))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            ring.all_reduce(torch.ones(256), rr.MEAN)
            ring.reduce_scatter(np.ones((4, 2)), rr.divide_by(256))
            ring.all_gather(torch.ones(4, dtype=torch.bfloat16))
        ring.all_reduce(torch.ones(256))
    assert [event.name for event in ring_events(profiler)] == [
        "ring_reduce all_reduce 1024 B MEAN shm",
        "ring_reduce reduce_scatter 64 B divide_by(256) shm",
        "ring_reduce all_gather 8 B SUM shm",
    ]


def test_a_result_is_the_same_under_the_profiler() -> None:
    x = torch.arange(1000.0)
    with rr.Ring(rank=0, world=1) as ring, profile(activities=[ProfilerActivity.CPU]):
        version = x._version
        assert ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=4) is x
        assert torch.equal(x, torch.arange(1000.0) / 4)
        assert x._version > version
        assert ring.stats.last_count == 4
        with pytest.raises(TypeError, match="int32"):
            ring.all_reduce(torch.ones(4, dtype=torch.int32), rr.MEAN)


def profile_ddp(seat: Seat) -> list[tuple[str, float, float]]:
    with group(seat) as ring:
        model = wrap(make_net())
        state = rr.attach(model, ring, rr.WEIGHTED_MEAN)
        for step in range(3):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                state.add_count(4)
                loss_of(model(batch_of(seat.rank, step, 4)), 4).backward()
            model.zero_grad()
        return [(each.name, each.time_range.start, each.time_range.end) for each in ring_events(profiler)]


def test_buckets_are_in_the_profile(run: Run) -> None:
    for events in run(2, profile_ddp):
        sizes = [int(name.split()[3]) for name, _, _ in events]
        # Float64 parameters of ddp_helpers.Net.
        assert sum(sizes) == 8 * (12 * 40 + 40 + 40 * 60 + 60 + 60 * 60 + 60 + 60 + 1)
        assert [name for name, _, _ in events] == [
            f"ring_reduce bucket {index} {size} B WEIGHTED_MEAN" for index, size in enumerate(sizes)
        ]
        assert len(events) > 2


def test_a_bucket_in_the_profile_lasts_until_it_is_done() -> None:
    with rr.Ring(rank=0, world=1) as ring:
        begun = threading.Event()
        ring._thread.submit(begun.wait)  # the bucket queues behind it
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            future = rr.ring_hook(rr.RingHookState(ring, rr.SUM), OneBucket())
            with record_function("ring_reduce handed over"):
                pass
            begun.set()
            assert torch.equal(future.wait(), torch.ones(8))
    bucket, handed_over = ring_events(profiler)
    assert (bucket.name, handed_over.name) == ("ring_reduce bucket 3 32 B SUM", "ring_reduce handed over")
    assert bucket.time_range.start <= handed_over.time_range.start
    assert handed_over.time_range.end <= bucket.time_range.end


class FakeNvtx:
    """torch.cuda.nvtx of a build that has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        for name in ("range_push", "range_pop", "range_start", "range_end"):
            monkeypatch.setattr(torch.cuda.nvtx, name, self._recorder(name))
        monkeypatch.setenv("RING_REDUCE_NVTX", "1")

    def _recorder(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return 42

        return call


def test_calls_are_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = FakeNvtx(monkeypatch)
    with rr.Ring(rank=0, world=1) as ring:
        nvtx.calls.clear()
        ring.all_reduce(torch.ones(256), rr.MEAN)
    assert nvtx.calls == [("range_push", "ring_reduce all_reduce 1024 B MEAN shm"), ("range_pop",)]


def test_a_bucket_is_an_nvtx_range_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = FakeNvtx(monkeypatch)
    with rr.Ring(rank=0, world=1) as ring:
        nvtx.calls.clear()
        rr.ring_hook(rr.RingHookState(ring, rr.SUM), OneBucket()).wait()
    assert nvtx.calls[0] == ("range_start", "ring_reduce bucket 3 32 B SUM")
    assert sorted(nvtx.calls[1:3]) == [("range_pop",), ("range_push", "ring_reduce all_reduce 32 B SUM shm")]
    assert nvtx.calls[3:] == [("range_end", 42)]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_no_nvtx_unless_it_is_wanted(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = FakeNvtx(monkeypatch)
    if value is None:
        monkeypatch.delenv("RING_REDUCE_NVTX")
    else:
        monkeypatch.setenv("RING_REDUCE_NVTX", value)
    with rr.Ring(rank=0, world=1) as ring:
        ring.all_reduce(torch.ones(4))
    assert nvtx.calls == []


def test_a_torch_without_nvtx_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setenv("RING_REDUCE_NVTX", "1")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", refuse)
    with pytest.warns(
        RuntimeWarning, match="has no NVTX .NVTX functions not .*install a CUDA build"
    ) as warned:
        ring = rr.Ring(rank=0, world=1)
    assert [Path(each.filename).name for each in warned] == [Path(__file__).name]
    with ring:
        ring.all_reduce(torch.ones(4))  # warns no more: warnings are not caught here


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_REDUCE_NVTX", "yes")
    with pytest.raises(ValueError, match="RING_REDUCE_NVTX is 'yes'; set it to 1"):
        rr.Ring(rank=0, world=1)


def test_a_ring_without_torch_imports_none() -> None:
    code = (
        "import sys, numpy as np, ring_reduce as rr\n"
        "from ring_reduce.tracing import Recorder\n"
        "with rr.Ring(rank=0, world=1) as ring, Recorder(ring) as recorder: ring.all_reduce(np.ones(4))\n"
        "print(len(recorder.trace.spans), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"


def test_nobody_is_asked_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with rr.Ring(rank=0, world=1) as ring:
        monkeypatch.setattr(ring._ranges, "call", None)
        monkeypatch.setattr(ring._ranges, "begin_bucket", None)
        ring.all_reduce(torch.ones(4))
        ring.all_reduce(torch.ones(4), async_op=True).wait()
        rr.ring_hook(rr.RingHookState(ring, rr.SUM), OneBucket()).wait()
        with profile(activities=[ProfilerActivity.CPU]), pytest.raises(TypeError):
            ring.all_reduce(torch.ones(4))


def fail_a_bucket(seat: Seat) -> tuple[str, int]:
    """Rank 1 ends the ring while rank 0 has a bucket in flight."""
    with group(seat) as ring, Recorder(ring) as recorder:
        model = wrap(make_net())
        if seat.rank == 1:
            seat.store.get("in flight")
            ring.abort("by the test")
            return "", 0

        def hook(state, bucket):  # type: ignore[no-untyped-def]
            future = rr.ring_hook(state, bucket)
            seat.store.set("in flight", b"")
            return future

        model.register_comm_hook(rr.RingHookState(ring, rr.SUM), hook)
        loss = loss_of(model(batch_of(seat.rank, 0, 4)), 4)
        error = caught(loss.backward)
    buckets = [span for span in recorder.trace.spans if span.track is Track.BUCKETS]
    return str(error), len(buckets)


def test_a_bucket_that_fails_fails_its_backward_and_ends_its_range(run: Run) -> None:
    (error, ended), _ = run(2, fail_a_bucket)
    assert "by the test" in error
    assert ended > 0
