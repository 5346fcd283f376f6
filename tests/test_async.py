"""Calls in flight: their order, their results, and what an error does to those behind it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from cases import SMALL
from conftest import Run
from launch import Seat, caught


def many_queued(seat: Seat, calls: int) -> list[float]:
    ring = seat.kept_ring(**SMALL)
    works = [
        ring.all_reduce(np.full(50 + i, float(i * (seat.rank + 1))), async_op=True) for i in range(calls)
    ]
    results = []
    for i, work in enumerate(works):
        result = work.wait()
        assert result.shape == (50 + i,)
        assert (result == result[0]).all()
        assert work.done()
        results.append(float(result[0]))
    return results


@pytest.mark.parametrize("world", [1, 2, 3])
def test_many_calls_in_flight(run: Run, world: int) -> None:
    factor = world * (world + 1) // 2
    assert run(world, many_queued, 200) == [[float(i * factor) for i in range(200)]] * world


def waited_backwards(seat: Seat) -> list[float]:
    ring = seat.kept_ring(**SMALL)
    works = [ring.all_reduce(np.full(3, float(i)), rr.MEAN, async_op=True) for i in range(20)]
    return [float(work.wait()[0]) for work in reversed(works)]


def test_works_may_be_waited_for_in_any_order(run: Run) -> None:
    assert run(2, waited_backwards) == [[float(i) for i in reversed(range(20))]] * 2


def same_tensor(seat: Seat) -> list[float]:
    """Each call works on what the one before left: a chain that shows the order."""
    ring = seat.kept_ring(**SMALL)
    x = np.full(10, 1.0 + seat.rank)
    for i in range(10):
        ring.all_reduce(x, rr.divide_by(2 + i), async_op=True)
    ring.all_reduce(x)  # synchronous, behind those in the queue
    values: list[float] = x.tolist()
    return values


def test_a_synchronous_call_waits_its_turn(run: Run) -> None:
    expected = 3.0 / 2
    for i in range(1, 10):
        expected = 2 * expected / (2 + i)
    for values in run(2, same_tensor):
        assert values == pytest.approx([2 * expected] * 10)


def dropped_works(seat: Seat) -> tuple[list[float], bool]:
    """Neither the Work nor the tensor is held by the caller until the call is done."""
    ring = seat.kept_ring()
    out = np.empty(1 << 16)
    ring.all_reduce(np.full(1 << 16, 2.0), out=out, async_op=True)
    gc.collect()
    last = ring.all_reduce(np.ones(3), async_op=True)
    last.wait()
    held = weakref.ref(ring.all_reduce(np.ones(3), async_op=True))
    ring.all_reduce(np.ones(3))
    return [float(out.min()), float(out.max())], held() is None


def test_the_caller_may_drop_the_work(run: Run) -> None:
    assert run(2, dropped_works) == [([4.0, 4.0], True)] * 2


def tensors_live_no_longer(seat: Seat) -> bool:
    ring = seat.kept_ring()
    x = np.ones(1000)
    held = weakref.ref(x)
    ring.all_reduce(x, async_op=True).wait()
    del x
    deadline = time.monotonic() + 20
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # the thread lets go a moment after the result is there
    return held() is None


def test_a_done_call_holds_no_tensor(run: Run) -> None:
    assert run(2, tensors_live_no_longer) == [True, True]


def futures(seat: Seat) -> list[Any]:
    import torch

    ring = seat.kept_ring()
    x = torch.ones(5)
    future = ring.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: 2 * done.value())
    assert isinstance(future, torch._C.Future)
    assert future.wait() is x
    work = ring.all_reduce(x, async_op=True)
    work.wait()
    after = work.get_future()  # of a call that is done already
    return [doubled.wait().tolist(), after.done(), after.value().tolist()]


def test_futures_of_torch(run: Run) -> None:
    assert run(2, futures) == [[[4.0] * 5, True, [4.0] * 5]] * 2


def waits_with_timeout(seat: Seat) -> list[bool]:
    """Rank 1 calls only once rank 0 has seen its wait end: no clock decides."""
    with seat.ring() as ring:
        if seat.rank == 0:
            work = ring.all_reduce(np.ones(3), async_op=True)
            timed_out = isinstance(caught(lambda: work.wait(timeout=0.05)), TimeoutError)
            in_flight = not work.done()
            seat.store.set("waited", b"")
            return [timed_out, in_flight, work.wait().tolist() == [2.0] * 3, work.done()]
        seat.store.get("waited")
        return [ring.all_reduce(np.ones(3)).tolist() == [2.0] * 3]


def test_a_wait_that_times_out_ends_no_call(run: Run) -> None:
    assert run(2, waits_with_timeout) == [[True] * 4, [True]]


def errors_in_the_queue(seat: Seat) -> tuple[list[Exception | None], list[str], Exception | None]:
    import torch

    with seat.ring(**SMALL) as ring:
        tensors = [torch.ones(100 + (seat.rank if i == 3 else 0)) for i in range(8)]
        works = []
        for tensor in tensors:
            try:
                works.append(ring.all_reduce(tensor, async_op=True))
            except rr.RingError:  # the fourth failed before this was queued
                break
        errors = [caught(work.wait) for work in works]
        future_error = caught(works[3].get_future().wait)
        unchanged = ["changed" if tensor.sum() > 150 else "unchanged" for tensor in tensors]
        return errors[:4] + [e for e in errors[4:] if e is None], unchanged, future_error


def test_an_error_ends_all_that_are_queued_behind_it(run: Run) -> None:
    results = run(2, errors_in_the_queue)
    for errors, tensors, future_error in results:
        assert errors[:3] == [None] * 3
        assert isinstance(errors[3], rr.RingMismatch)
        assert len(errors) == 4  # none of those behind succeeded
        assert tensors == ["changed"] * 3 + ["unchanged"] * 5
        assert str(errors[3]) == str(results[0][0][3])
        assert isinstance(future_error, RuntimeError)
        assert str(errors[3]) in str(future_error)


def opposite_orders(seat: Seat) -> list[float]:
    """Two rings, called in opposite orders: each ring has a thread, so neither waits for the other."""
    with seat.ring() as first, seat.ring() as second:
        x, y = np.full(1000, 1.0), np.full(1000, 10.0)
        order = [(first, x), (second, y)]
        works = [
            ring.all_reduce(tensor, async_op=True) for ring, tensor in (order if seat.rank else order[::-1])
        ]
        for work in works:
            work.wait()
        return [float(x[0]), float(y[0])]


def test_two_rings_in_opposite_orders(run: Run) -> None:
    assert run(2, opposite_orders) == [[2.0, 20.0]] * 2


def threads_in_turn(seat: Seat) -> list[float]:
    """Two threads of each rank call one ring, each when the other has: the ring is no thread's property."""
    ring = seat.kept_ring()
    results: list[float] = []
    for i in range(10):
        thread = threading.Thread(
            target=lambda i=i: results.append(float(ring.all_reduce(np.full(3, float(i)))[0]))
        )
        thread.start()
        thread.join()
        results.append(float(ring.all_reduce(np.full(3, 0.5))[0]))
    return results


def test_calls_from_several_threads(run: Run) -> None:
    assert run(2, threads_in_turn) == [[v for i in range(10) for v in (2.0 * i, 1.0)]] * 2


def closes_with_calls_in_flight(seat: Seat) -> list[float]:
    ring = seat.ring()
    works = [ring.all_reduce(np.full(1000, float(i)), async_op=True) for i in range(50)]
    ring.close()  # after those in the queue
    return [float(work.wait()[0]) for work in works]


def test_close_waits_for_calls_in_flight(run: Run) -> None:
    assert run(2, closes_with_calls_in_flight) == [[2.0 * i for i in range(50)]] * 2


def main_thread_goes_on(seat: Seat) -> bool:
    """The call runs elsewhere: this thread counts on while the peer has not called yet."""
    with seat.ring() as ring:
        if seat.rank == 1:
            seat.store.get("counted")
        work = ring.all_reduce(np.ones(3), async_op=True)
        if seat.rank == 0:
            assert sum(range(10**5)) == 4999950000
            assert not work.done()
            seat.store.set("counted", b"")
        return bool(work.wait()[0] == 2.0)


def test_the_caller_goes_on_meanwhile(run: Run) -> None:
    assert run(2, main_thread_goes_on) == [True, True]
