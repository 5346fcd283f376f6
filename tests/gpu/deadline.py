"""A rank that never enters: the others' waits end, the error names it, and the output is no result."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from findings import attempt

import ring_reduce as rr
from ring_reduce.cuda import VirtualRing


def raised(call: Callable[[], object]) -> str:
    """The text of the time-out."""
    try:
        call()
    except rr.RingTimeout as error:
        return str(error)
    raise AssertionError("no time-out was raised")


def absent(world: int, missing: int, size: int) -> str:
    ring = VirtualRing(world, timeout=0.5)
    xs = [torch.ones(size, device="cuda") for _ in range(world)]
    ring.all_reduce(xs, rr.MEAN)
    torch.cuda.synchronize()
    ring.check()
    begin = time.monotonic()
    ring.all_reduce(xs, rr.MEAN, _absent_rank=missing)
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    assert 0.4 < seconds < 10, seconds
    text = raised(ring.check)
    assert "in 0.5 s" in text, text
    assert "call 2" in text, text
    assert all(bool(x.isnan().any()) for rank, x in enumerate(xs) if rank != missing)
    assert raised(lambda: ring.all_reduce(xs, rr.MEAN)) == text
    return f"{seconds:.2f} s: {text}"


def main() -> None:
    attempt("rank 1 of 2 absent", lambda: absent(2, 1, 1000))
    attempt("rank 3 of 4 absent, large", lambda: absent(4, 3, 5_000_000))
    attempt("rank 0 of 8 absent", lambda: absent(8, 0, 100_003))


if __name__ == "__main__":
    main()
