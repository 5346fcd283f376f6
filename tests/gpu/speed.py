"""Times on this card: medians of interleaved runs, by CUDA events. Prints figures; gates only SUM against MEAN."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from findings import attempt, failed, figure, passed

import ring_reduce as rr
from ring_reduce.cuda import VirtualRing
from ring_reduce.kernels import accumulate as kernels

MB = 1 << 20


def times(calls: Mapping[str, Callable[[], Any]], rounds: int = 15, inner: int = 5) -> dict[str, list[float]]:
    """Seconds a call, by name: each round times each of them once, ``inner`` calls at a time, in alternating order."""
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(inner):
                calls[name]()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) / 1e3 / inner)
    return found


def copy_bandwidth() -> float:
    """Bytes read and written a second."""
    x, y = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = statistics.median(times({"copy": lambda: y.copy_(x)})["copy"])
    figure("copy of 1 GiB", 2 * x.numel() / seconds / 1e12, "TB/s")
    return 2 * x.numel() / seconds


def fresh_tensors(world: int, bytes_: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(bytes_ // dtype.itemsize, dtype=dtype, device="cuda") for _ in range(world)]


def ring_against_copy(bandwidth: float) -> None:
    """Tensor bytes that have to be read and written, over the time; slots are left out, they stay in L2."""
    for world in (2, 4, 8):
        for size in (64 * MB, 256 * MB):
            xs, outs = (fresh_tensors(world, size, torch.float32) for _ in range(2))
            ring = VirtualRing(world, timeout=20)
            calls = {"ring": partial(ring.all_reduce, xs, rr.MEAN, out=outs)}
            seconds = statistics.median(times(calls, rounds=7, inner=3)["ring"])
            ring.check()
            name = f"virtual ring, world {world}, {size // MB} MB float32"
            figure(f"{name}: of the copy bandwidth", 100 * 2 * world * size / seconds / bandwidth, "%", "80")
            moved = (
                world * size * 2 + 4 * (world - 1) * size
            )  # and what goes through the slots, written and read
            figure(f"{name}: with the slots", moved / seconds / 1e12, "TB/s")


def sweep(bandwidth: float) -> None:
    """Which sizes suit the card."""
    world, size = 8, 64 * MB
    xs, outs = (fresh_tensors(world, size, torch.bfloat16) for _ in range(2))
    widest = VirtualRing(world).lanes
    for lanes in sorted({widest, widest * 2 // 3, widest // 3}):
        for segment in (16 << 10, 32 << 10, 64 << 10, 128 << 10):
            for depth, window in ((2, 1), (4, 2)):
                ring = VirtualRing(
                    world, lanes=lanes, segment_bytes=segment, depth=depth, window=window, timeout=20
                )
                calls = {"ring": partial(ring.all_reduce, xs, rr.MEAN, out=outs)}
                seconds = statistics.median(times(calls, rounds=3, inner=2)["ring"])
                chosen = f"{lanes} lanes, {segment >> 10} KB, depth {depth}, window {window}"
                figure(
                    f"sweep, world 8, 64 MB bfloat16: {chosen}",
                    100 * 2 * world * size / seconds / bandwidth,
                    "%",
                )


def normalizations() -> None:
    """SUM against MEAN and divide_by: the division has to hide behind the memory."""
    for world, size, dtype in (
        (8, 64 * MB, torch.bfloat16),
        (4, 64 * MB, torch.float32),
        (2, 256 * MB, torch.float16),
    ):
        xs, outs = (fresh_tensors(world, size, dtype) for _ in range(2))
        ring = VirtualRing(world, timeout=20)
        found = times(
            {
                "SUM": partial(ring.all_reduce, xs, rr.SUM, out=outs),
                "MEAN": partial(ring.all_reduce, xs, rr.MEAN, out=outs),
                "divide_by": partial(ring.all_reduce, xs, rr.divide_by(4097.3), out=outs),
            },
            rounds=25,
            inner=3,
        )
        for name in ("MEAN", "divide_by"):
            ratio = statistics.median(a / b for a, b in zip(found[name], found["SUM"], strict=True))
            what = f"{name} / SUM, world {world}, {size // MB} MB {dtype}".replace("torch.", "")
            figure(what, ratio, "", "1.00 +- 0.01")
            if 0.97 <= ratio <= 1.03:
                passed(what)
            else:
                failed(what, f"{ratio:.4f}")


def latency() -> None:
    for world in (2, 8):
        ring = VirtualRing(world, timeout=20)
        xs = fresh_tensors(world, 1024, torch.float32)
        calls = {"ring": partial(ring.all_reduce, xs, rr.MEAN)}
        figure(
            f"virtual ring, world {world}, 1 KB",
            statistics.median(times(calls, inner=50)["ring"]) * 1e6,
            "us",
        )


def accumulation(bandwidth: float) -> None:
    """One fused pass over many gradients against torch's separate operations and the card's copy."""
    for dtype in (torch.bfloat16, torch.float32):
        sizes = [4096 * 4096, 4096, 4096 * 11008, 11008, 4096 * 4096, 4096 * 11008]
        gradients = [torch.ones(size, dtype=dtype, device="cuda") for size in sizes]
        sums = [torch.zeros(size, dtype=torch.float32, device="cuda") for size in sizes]
        outputs = [torch.empty_like(x) for x in gradients]
        fresh = [False] * len(sums)
        total = sum(sizes)

        def separate(gradients: Any = gradients, sums: Any = sums) -> None:
            for each, x in zip(sums, gradients, strict=True):
                each += x.float() * 0.37

        def foreach(gradients: Any = gradients, sums: Any = sums) -> None:
            torch._foreach_add_(sums, gradients, alpha=0.37)

        def separate_division(sums: Any = sums, outputs: Any = outputs) -> None:
            for each, out in zip(sums, outputs, strict=True):
                out.copy_(each / 24.0)

        fused: dict[str, Callable[[], Any]] = {
            "fused": partial(kernels.accumulate, sums, gradients, fresh=fresh, scale=0.37),
            "separate": separate,
            "foreach": foreach,
            "divide": partial(kernels.divide_into, outputs, sums, divisor=24.0),
            "separate division": separate_division,
        }
        if dtype is not torch.float32:
            del fused["foreach"]
        found = {name: statistics.median(each) for name, each in times(fused, rounds=9, inner=3).items()}
        name = f"accumulate {total / 1e6:.0f} M {dtype}".replace("torch.", "")
        moved, divided = total * (8 + dtype.itemsize), total * (4 + dtype.itemsize)
        figure(f"{name}: of the copy bandwidth", 100 * moved / found["fused"] / bandwidth, "%", "90")
        figure(f"{name}: torch's separate operations / fused", found["separate"] / found["fused"], "x", "2")
        if "foreach" in found:
            figure(f"{name}: torch._foreach_add_ / fused", found["foreach"] / found["fused"], "x")
        figure(
            f"{name}: the division, of the copy bandwidth",
            100 * divided / found["divide"] / bandwidth,
            "%",
            "90",
        )
        figure(f"{name}: torch's division / fused", found["separate division"] / found["divide"], "x")


def main() -> None:
    bandwidth = copy_bandwidth()
    for name, measure in {
        "normalizations": normalizations,
        "accumulation": lambda: accumulation(bandwidth),
        "ring against copy": lambda: ring_against_copy(bandwidth),
        "latency": latency,
        "sweep": lambda: sweep(bandwidth),
    }.items():
        attempt(f"measured: {name}", lambda m=measure: m())  # type: ignore[misc]


if __name__ == "__main__":
    main()
