"""Many calls, random delays, graphs, streams: where an order that is wrong would show."""

from __future__ import annotations

from typing import Any

import torch
from cpu_world import CpuWorld
from findings import attempt
from gpu_cases import SMALL, Case, differences, wrong

import ring_reduce as rr
from ring_reduce.cuda import VirtualRing

WORLD = 4


def delays(cpu: CpuWorld) -> str:
    ring = VirtualRing(WORLD, timeout=20, **SMALL)
    for seed in range(1, 21):
        dtype = [torch.float32, torch.bfloat16, torch.float64][seed % 3]
        problem = wrong(ring, cpu, Case(dtype, 5003 + 64 * seed, rr.MEAN, seed=seed), _delay_seed=seed)
        assert not problem, problem
    big = VirtualRing(WORLD, timeout=20)
    for seed in range(1, 6):
        problem = wrong(big, cpu, Case(torch.bfloat16, 3_000_000, rr.MEAN, seed=seed), _delay_seed=seed)
        assert not problem, problem
    return "25 calls"


def many_small_calls() -> str:
    """Each adds what the call before it left: one that reads a slot too early shows in the end."""
    ring = VirtualRing(WORLD, timeout=20)
    xs = [torch.full((33,), float(rank), device="cuda") for rank in range(WORLD)]
    for _ in range(10_000):
        ring.all_reduce(xs, rr.MEAN)
        for rank, x in enumerate(xs):
            x += rank  # ranks 0..3: the mean grows by 1.5 a call
    torch.cuda.synchronize()
    ring.check()
    for rank, x in enumerate(xs):
        assert bool((x == 1.5 + 9_999 * 1.5 + rank).all()), (rank, x)
    return "10,000 calls"


def graph_replay() -> str:
    ring = VirtualRing(WORLD, timeout=20)
    size = 100_001
    xs = [torch.zeros(size, device="cuda") for _ in range(WORLD)]
    outs = [torch.zeros(size, device="cuda") for _ in range(WORLD)]
    counts = torch.ones(WORLD, dtype=torch.float64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ring.all_reduce(xs, rr.DIVIDE_BY_COUNT, counts=counts, out=outs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        ring.all_reduce(xs, rr.DIVIDE_BY_COUNT, counts=counts, out=outs)
        ring.all_reduce(outs, rr.SUM)
    ramp = torch.arange(size, device="cuda") % 1000
    for replay in range(100):
        for rank, x in enumerate(xs):
            x.copy_(ramp * (rank + 1) + replay)
            outs[rank].fill_(torch.nan)
        numbers = [float((rank + replay) % 3) for rank in range(WORLD)]
        counts.copy_(torch.tensor(numbers))
        graph.replay()
        kept = [rank for rank in range(WORLD) if numbers[rank]]
        total = torch.stack([ramp.float() * (rank + 1) + replay for rank in kept]).sum(0)
        quotient = total / torch.tensor(
            sum(numbers), device="cuda"
        )  # by a number torch multiplies by 1/number
        expected = quotient + quotient + quotient + quotient
        torch.cuda.synchronize()
        ring.check()
        for rank, out in enumerate(outs):
            assert differences(out, expected) == 0, f"replay {replay}, rank {rank}"
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            ring.all_reduce(xs, rr.DIVIDE_BY_COUNT, counts=[1.0] * WORLD)
        raise AssertionError("a Python count was captured")
    except rr.CountError:
        pass
    return "100 replays of 2 calls, changed inputs and counts"


def two_streams() -> str:
    """Calls on two streams share the slots: they have to follow one another."""
    ring = VirtualRing(WORLD, timeout=20)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    size = 300_007
    sets = [[torch.zeros(size, device="cuda") for _ in range(WORLD)] for _ in streams]
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, xs in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                for rank, x in enumerate(xs):
                    x += rank
                ring.all_reduce(xs, rr.MEAN)
    torch.cuda.synchronize()
    ring.check()
    for xs in sets:
        for x in xs:
            assert bool((x == 150.0).all()), x[:4]
    return "100 calls on each of 2"


def text(call: Any) -> str:
    """What the call raises."""
    try:
        call()
    except (rr.RingError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def refusals() -> str:
    """Bad settings and arguments are named; the ring goes on."""
    assert "at the same time" in text(lambda: VirtualRing(8, lanes=1000))
    assert "window" in text(lambda: VirtualRing(2, depth=2, window=2))
    assert "128" in text(lambda: VirtualRing(2, segment_bytes=100))
    assert "1 to 16" in text(lambda: VirtualRing(17))
    ring = VirtualRing(2, timeout=10)
    x, y = torch.ones(10, device="cuda"), torch.ones(10, device="cuda")
    assert "tensor of rank 1" in text(lambda: ring.all_reduce([x, y[:5]]))
    assert "float64" in text(lambda: ring.all_reduce([x, y.double()]))
    assert "cpu" in text(lambda: ring.all_reduce([x, y.cpu()]))
    assert "2 ranks" in text(lambda: ring.all_reduce([x]))
    assert "contiguous" in text(
        lambda: ring.all_reduce([torch.ones(5, 2, device="cuda").T, torch.ones(2, 5, device="cuda")])
    )
    assert "int8" in text(lambda: ring.all_reduce([x.to(torch.int8), y.to(torch.int8)]))
    ring.all_reduce([x, y])
    torch.cuda.synchronize()
    ring.check()
    assert bool((x == 2).all())
    return ""


def bad_device_count() -> str:
    """Raises late, and until then the output is NaN."""
    for bad in (-1.0, torch.nan, torch.inf):
        ring = VirtualRing(2, timeout=10)
        xs = [torch.ones(1000, device="cuda") for _ in range(2)]
        counts = torch.tensor([1.0, bad], dtype=torch.float64, device="cuda")
        ring.all_reduce(xs, rr.DIVIDE_BY_COUNT, counts=counts)
        torch.cuda.synchronize()
        assert bool(xs[1].isnan().all())
        assert "rank 1" in text(ring.check)
    return ""


def main() -> None:
    with CpuWorld(WORLD) as cpu:
        attempt("random delays", lambda: delays(cpu))
    attempt("many small calls", many_small_calls)
    attempt("graph replay", graph_replay)
    attempt("two streams", two_streams)
    attempt("refusals", refusals)
    attempt("a bad count on the device", bad_device_count)


if __name__ == "__main__":
    main()
