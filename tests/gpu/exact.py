"""Virtual ranks against the CPU ring, to the bit. ``python exact.py WORLD``"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from cpu_world import CpuWorld
from findings import failed, passed
from gpu_cases import SMALL, Case, large_cases, small_cases, wrong

from ring_reduce.cuda import VirtualRing


def run(name: str, ring: VirtualRing, cpu: CpuWorld, cases: Iterable[Case]) -> None:
    by_dtype: dict[torch.dtype, list[str]] = {}
    count = 0
    for case in cases:
        count += 1
        found = by_dtype.setdefault(case.dtype, [])
        if len(found) < 3 and (problem := wrong(ring, cpu, case)):
            found.append(problem)
    for dtype, found in by_dtype.items():
        what = f"{name}, world {cpu.world}, {dtype}"
        if found:
            failed(what, "\n".join(found))
        else:
            passed(what, f"of {count} cases")


def main(world: int) -> None:
    torch.set_num_threads(8)
    with CpuWorld(world) as cpu:
        run("small", VirtualRing(world, timeout=10, **SMALL), cpu, small_cases(world))
        run("large", VirtualRing(world, timeout=10), cpu, large_cases(world))
        wrapping = VirtualRing(world, timeout=10, _first_segment=2**32 - 20, **SMALL)
        run("counters past 2**32", wrapping, cpu, list(small_cases(world))[::7])


if __name__ == "__main__":
    main(int(sys.argv[1]))
