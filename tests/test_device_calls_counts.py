"""Counts of calls on a device: which are read there, and what the host asks of the device for a total. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ring_reduce as rr
from fake_device import WORLD, FakeCuda, FakeEngine, make_ring, on_card, ramp, values

DOUBLED = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


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
