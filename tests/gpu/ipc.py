"""Ranks as processes whose ring is CUDA IPC: two on one GPU, under MPS where it starts; one a GPU where there are more.

``python ipc.py`` starts them; ``python ipc.py CHECK WORLD RANK DIRECTORY DEVICE`` is one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cpu_world import CpuWorld
from findings import attempt, failed, figure, passed, skipped
from gpu_cases import GUARD, Case, Placed, differences, normalizations

import ring_reduce as rr
from ring_reduce.probe import DirectoryStore

CHECK_TIMEOUT_S = 90.0
# Ranks that share a GPU without MPS take turns of milliseconds.
RING_TIMEOUT_S = 30.0
RINGS = 1000
# Ends the check of many rings in time to say how many there were: a time-out would tell neither that nor the memory.
RINGS_S = 70.0
MOST_GROWTH_BYTES = 8 << 20  # of the GPU's memory over all rings; had each left its 2 MB, it would be 2 GB


EXPANDABLE = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")


class Rank:
    """What a check has: who it is, and rings."""

    def __init__(self, world: int, rank: int, directory: str, device: int) -> None:
        self.world, self.rank = world, rank
        self.device = torch.device("cuda", device)
        self.store = DirectoryStore(Path(directory), timeout=RING_TIMEOUT_S)
        torch.cuda.set_device(self.device)

    def ring(self, name: str = "ring", timeout: float = RING_TIMEOUT_S, lanes: int | None = None) -> rr.Ring:
        """A new one of all ranks."""
        return rr.Ring(
            self.store,
            rank=self.rank,
            world=self.world,
            name=name,
            timeout=timeout,
            lanes=lanes,
            device=self.device,
            transport="cuda_ipc",
        )


def cases(world: int) -> list[Case]:
    """Each dtype and normalization, few elements, since ranks may take turns; counts seen to fail elsewhere."""
    found = []
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        for j, (normalization, counts) in enumerate(normalizations(world)[i % 2 :: 2]):
            size = (0, 1, 1_003, 65_537)[(i + j) % 4]
            found.append(Case(dtype, size, normalization, counts, offset=j % 3, out_of_place=j % 2 == 1))
    found += [Case(torch.int64, 9_999), Case(torch.float32, 9_999_999, rr.MEAN)]
    return [*found, Case(torch.float16, 10_556_587, rr.MEAN)]


def bits(here: Rank) -> str:
    """Against the CPU ring, with tensors that lie within larger ones."""
    with CpuWorld(here.world) as cpu, here.ring() as ring:
        for case in cases(here.world):
            inputs = case.inputs(here.world)
            expected = cpu.all_reduce(inputs, case.normalization, case.counts).to(here.device)
            x = Placed(inputs[here.rank], case.offset)
            out = Placed(torch.full_like(inputs[here.rank], 99), case.offset) if case.out_of_place else x
            count = None if case.counts is None else case.counts[here.rank]
            ring.all_reduce(x.view, case.normalization, out=out.view, count=count)
            torch.cuda.synchronize()
            ring.check()
            assert differences(out.view, expected) == 0, case
            assert out.intact(), f"{case}: written outside"
            assert x.intact(), f"{case}: written outside"
    return f"{len(cases(here.world))} cases, {GUARD} elements of guard"


def graph_and_streams(here: Rank) -> str:
    """A captured call replays with other inputs and counts; calls in turns on two streams."""
    with here.ring() as ring:
        x, out = torch.zeros(2, 10_001, device=here.device)
        count = torch.ones(1, dtype=torch.float64, device=here.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            ring.all_reduce(x, rr.DIVIDE_BY_COUNT, count=count, out=out)
        for replay in range(100):
            x.fill_(float(replay + here.rank))
            count.fill_(float(2**replay % 7 + here.rank))
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            ring.check()
            ranks = range(here.world)
            total, counts = sum(replay + rank for rank in ranks), sum(2**replay % 7 + rank for rank in ranks)
            assert bool((out == torch.tensor(float(total)) / torch.tensor(float(counts))).all()), replay
        streams, xs = (stream, torch.cuda.Stream()), torch.zeros(2, 10_001, device=here.device)
        torch.cuda.synchronize()
        for _ in range(50):
            for each, y in zip(streams, xs, strict=True):
                with torch.cuda.stream(each):
                    y += here.rank
                    ring.all_reduce(y, rr.MEAN)
        torch.cuda.synchronize()
        ring.check()
        assert bool((xs == 50 * (here.world - 1) / 2).all())
    return "100 replays, 100 calls on 2 streams"


def many_rings(here: Rank) -> str:
    """Made and closed, with a call each: the GPU's memory and the process's descriptors stay as they are. Fewer than
    1,000 of them in the time that there is are a failure that says how many."""
    begin, number, late = time.monotonic(), 0, False
    held = []
    while number < RINGS and not late:
        with here.ring(f"ring {number}", lanes=1) as ring:
            # The ranks stop together: by the clock of rank 0.
            x = torch.full((1000,), float(here.rank == 0 and time.monotonic() - begin > RINGS_S))
            late = bool(ring.all_reduce(x.to(here.device)).sum() > 0)
        number += 1
        if number in (10, RINGS) or late:
            torch.cuda.empty_cache()
            held.append((-torch.cuda.mem_get_info(here.device)[0], len(os.listdir("/proc/self/fd"))))
    more, descriptors = (after - before for before, after in zip(held[0], held[-1], strict=True))
    seconds = time.monotonic() - begin
    said = f"{number} rings in {seconds:.0f} s, {more} bytes and {descriptors} descriptors more"
    assert more < MOST_GROWTH_BYTES, said
    assert descriptors == 0, said
    assert number == RINGS, f"{said}; there should be {RINGS}"
    return said


def killed(here: Rank) -> str:
    """The last rank kills itself; the others hear of it in their next call, whose output is no result."""
    ring = here.ring()
    x = torch.ones(1_000_003, device=here.device)
    ring.all_reduce(x, rr.MEAN)
    torch.cuda.synchronize()
    if here.rank == here.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with contextlib.suppress(rr.RingError):  # where it had ended before
        ring.all_reduce(x, rr.MEAN)
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    try:
        ring.check()
    except rr.PeerLost as error:
        ring.close()
        return f"{seconds:.2f} s: {error}"
    raise AssertionError("no rank was missed")


CHECKS: dict[str, Callable[[Rank], str]] = {
    "bits": bits,
    "graph_and_streams": graph_and_streams,
    "many_rings": many_rings,
    "killed": killed,
}


def start(check: str, devices: list[int], where: str, **environment: str) -> None:
    """All ranks of a check; a rank tells what it found, this process what ended badly."""
    world = len(devices)
    with tempfile.TemporaryDirectory(prefix="ring-reduce-gpu-") as directory:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, check, str(world), str(rank), directory, str(device)],
                env={**os.environ, **environment, "RING_REDUCE_GPU_WHERE": where},
            )
            for rank, device in enumerate(devices)
        ]
        deadline = time.monotonic() + CHECK_TIMEOUT_S
        for rank, process in enumerate(ranks):
            try:
                status: int | str = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = f"no end after {CHECK_TIMEOUT_S:.0f} s"
            if status != (-signal.SIGKILL if check == "killed" and rank == world - 1 else 0):
                failed(f"{check}, {where}: rank {rank} ended", str(status))


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The environment of processes that share a GPU at the same time; empty where MPS can't be had."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        skipped("MPS", "nvidia-cuda-mps-control is not on PATH: ranks take turns on the GPU")
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        everything = {**os.environ, **environment}
        began = subprocess.run([control, "-d"], env=everything, check=False, timeout=20).returncode == 0
        if began:
            passed("MPS", "is started")
        else:
            skipped("MPS", "does not start: ranks take turns on the GPU")
        try:
            yield environment if began else {}
        finally:
            if began:
                subprocess.run([control], input="quit\n", text=True, env=everything, check=False, timeout=20)


def main() -> None:
    begin = time.monotonic()
    several = list(range(min(8, torch.cuda.device_count())))
    with mps() as environment:
        where = "2 ranks on a GPU, " + ("MPS" if environment else "taking turns")
        for check in ("bits", "graph_and_streams", "many_rings"):
            start(check, [0, 0], where, **environment)
        start("bits", [0, 0], f"{where}, expandable segments", **environment, **EXPANDABLE)
    if len(several) > 1:
        for check in CHECKS:
            start(check, several, f"{len(several)} GPUs")
    else:
        skipped("a GPU for each rank", "there is one GPU")
    start(
        "killed", [0, 0], "2 ranks on a GPU, taking turns"
    )  # last, and never under MPS, whose clients share a fate
    figure("time of the ipc step", time.monotonic() - begin, "s")


def run_rank(check: str, world: int, rank: int, directory: str, device: int) -> None:
    here = Rank(world, rank, directory, device)
    attempt(f"{check}, {os.environ['RING_REDUCE_GPU_WHERE']}, rank {rank}", lambda: CHECKS[check](here))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        main()
