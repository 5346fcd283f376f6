"""Calls of a ring on a GPU: streams, graphs, counts on the device, CuPy's arrays."""

from __future__ import annotations

from typing import Any

import torch
from findings import skipped
from ranks import Setting, check, run

import ring_reduce as rr

SIZE = 100_003
REPLAYS = 20
_SLEEP_CYCLES = 400_000_000  # some 0.2 s


def ramp(ring: rr.Ring, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, others on each rank; small, so that no sum rounds."""
    return (torch.arange(SIZE, device=ring.device) % 1000 + ring.rank).to(dtype)


def total(ring: rr.Ring) -> torch.Tensor:
    """The sum of all ranks' ramps."""
    ranks = ring.world * (ring.world - 1) // 2
    return (torch.arange(SIZE, device=ring.device) % 1000 * ring.world + ranks).float()


def equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert torch.equal(got, want), f"{what}: {got[:4].tolist()} and not {want[:4].tolist()}"


def host_goes_on(ring: rr.Ring) -> str:
    """The device is busy when the call is made; nothing of it can be done when the host is back."""
    x = ramp(ring)
    ring.all_reduce(ramp(ring))  # what is loaded in the first call
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP_CYCLES)
    work = ring.all_reduce(x, async_op=True)
    assert not work.done(), "the host waited, or the call did not wait for the caller's stream"
    assert work.wait() is x
    equal(x, total(ring), "after wait()")
    assert work.done()
    return ""


def streams(ring: rr.Ring) -> str:
    """Calls on several streams, of what is made late on each; memory is let go at once."""
    mine = [torch.cuda.Stream() for _ in range(3)]
    outputs = []
    for turn in range(12):
        with torch.cuda.stream(mine[turn % 3]):
            torch.cuda._sleep(2_000_000)
            x = ramp(ring) * (turn + 1)
            work = ring.all_reduce(x, async_op=turn % 2 == 0)
            out = x if turn % 2 else work.wait()
            outputs.append(out.clone())
            del x, out, work
            torch.full((SIZE,), torch.nan, device=ring.device)  # would take the memory
    torch.cuda.synchronize()
    for turn, out in enumerate(outputs):
        equal(out, total(ring) * (turn + 1), f"turn {turn}")
    return "12 calls on 3 streams"


def strided(ring: rr.Ring) -> str:
    for async_op in (False, True):
        room = torch.zeros(2 * SIZE, device=ring.device)
        x, out = torch.stack([ramp(ring)] * 2, 1)[:, 0], room[1::2]
        work = ring.all_reduce(x, rr.divide_by(2), out=out, async_op=async_op)
        if async_op:
            work.wait()
        equal(out, total(ring) / 2, f"async_op={async_op}")
        equal(room[::2], torch.zeros_like(room[::2]), "what is beside it")
    return ""


def device_counts(ring: rr.Ring) -> str:
    count = torch.tensor(3 + ring.rank, device=ring.device)
    counts = sum(3 + rank for rank in range(ring.world))
    x = ramp(ring)
    work = ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=count, async_op=True)
    ring.all_reduce(ramp(ring))
    assert work.total_count == counts
    work.wait()
    equal(x, total(ring) / counts, "a count on the device")
    ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=1)
    assert ring.stats.last_count == ring.world
    return ""


def graph(ring: rr.Ring) -> str:
    """Forks to the ring's stream and joins it; each replay reads input and count anew."""
    x, out = ramp(ring), torch.empty(SIZE, device=ring.device)
    count = torch.ones((), dtype=torch.float64, device=ring.device)
    ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=count, out=out, async_op=True).wait()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        work = ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=count, out=out, async_op=True)
        assert not work.done()
        work.wait()
        out += 1
    for replay in range(REPLAYS):
        x.copy_(ramp(ring) * replay)
        count.fill_(2.0**replay)
        captured.replay()
        equal(out, total(ring) * replay / (2.0**replay * ring.world) + 1, f"replay {replay}")
    return f"{REPLAYS} replays"


def cupy_arrays(ring: rr.Ring) -> str:
    import cupy

    expected = cupy.from_dlpack(total(ring))
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            x = cupy.arange(SIZE, dtype=cupy.float32) % 1000 + ring.rank
            assert ring.all_reduce(x) is x
            assert bool((x == expected).all()), "in place"
            x = cupy.arange(SIZE, dtype=cupy.float32) % 1000 + ring.rank
            work = ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=cupy.asarray(2), async_op=True)
            assert work.wait() is x
            assert bool((x * (2 * ring.world) == expected).all()), "with a count"
            _refuse_reversed(ring, x)
    return f"cupy {cupy.__version__}"


def _refuse_reversed(ring: rr.Ring, x: Any) -> None:
    try:
        ring.all_reduce(x[::-1])
    except ValueError:
        return
    raise AssertionError("a reversed array was taken")


def checks(ring: rr.Ring, setting: Setting) -> None:
    # NCCL's process groups agree on the host about a call with a count, and on each that is new to them.
    check(ring, setting, "the host goes on", host_goes_on)
    check(ring, setting, "calls on streams", streams)
    check(ring, setting, "strided tensors", strided)
    check(ring, setting, "counts on the device", device_counts)
    if setting.transport == "cuda_ipc":
        check(ring, setting, "a captured graph", graph)
    else:
        skipped(f"a captured graph ({setting}, rank {ring.rank})", "process groups agree on the host")
    try:
        import cupy  # noqa: F401
    except ImportError:
        skipped(f"CuPy ({setting}, rank {ring.rank})", "cupy is not installed")
    else:
        check(ring, setting, "CuPy arrays", cupy_arrays)


if __name__ == "__main__":
    run(checks)
