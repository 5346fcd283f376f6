"""What stands in the way of a ring over CUDA IPC, on the fake CUDA runtime: an error of one rank is one of all."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fake_cuda
import ring_reduce as rr
from cases import Case
from conftest import Run
from fake_cuda import Gpu, difference, gpu, start, violations
from launch import Seat, caught
from ring_reduce.bootstrap import Member
from ring_reduce.cuda_ipc import IpcTuning, open_cuda_ipc

WORLD = 3
CASE = Case("float32", 1_001, rr.MEAN)
# Of each function that making a ring calls, one that fails on rank 1, and the step in which it does.
FAULTS = {
    "cudaGetDeviceCount:1:3": "no ring on the GPU of rank 1: CUDA does not start",
    "cudaSetDevice:1:46": "no ring on the GPU of rank 1: making device 0 the current one",
    "cudaMalloc:1:2": "allocating 2097152 bytes for the ring's slots",
    "cudaIpcGetMemHandle:1:801": "exporting the ring's slots by CUDA IPC",
    "cudaHostRegister:1:304": "of shared host memory with CUDA",
    "cudaHostGetDevicePointer:1:1": "mapping shared host memory into the GPU",
    "cudaIpcOpenMemHandle:1:217": "opening the memory of rank 0 (on GPU-",
    "cudaIpcOpenMemHandle:2:101": "opening the memory of rank 2 (on GPU-",
    "cudaMemcpy:2:700": "reading the memory of rank 0",
    "cudaMemcpy:9:700": "reading the memory of rank 1",
    "cudaMemset:2:1": "clearing the ring's state",
    "cudaEventCreateWithFlags:1:2": "making an event",
    "cudaEventCreateWithFlags:2:2": "making an event",
}


@pytest.fixture(scope="session")
def module() -> Path:
    return fake_cuda.built()


def works(mine: Gpu, name: str, device: int = 0) -> str:
    """Whether a new ring does; a difference, or an empty text."""
    engine = mine.open(name, device=device)
    _, out = start(engine, mine, CASE)
    mine.synchronize()
    engine.check()
    engine.close()
    return difference(out, CASE, mine.seat.world)


def faulty_starts(seat: Seat, module: Path, faults: list[str]) -> list[tuple[str, str, int, str]]:
    """For each fault of rank 1: the error, what is left, and what a new ring then gets wrong."""
    found = []
    with gpu(seat, module) as mine:
        for fault in faults:
            with mock.patch.dict(os.environ, {"FAKE_CUDA_FAULTS": fault if seat.rank == 1 else ""}):
                error = caught(functools.partial(mine.open, fault))
            found.append((type(error).__name__, str(error), mine.held(), works(mine, f"after {fault}")))
        seat.meet("all have closed")
        assert violations(mine.directory) == []
    return found


def test_a_fault_of_one_rank_is_an_error_on_all(run: Run, module: Path) -> None:
    """With its reason; nothing stays open, and the next ring works."""
    outcomes = run(WORLD, faulty_starts, module, list(FAULTS))
    for (fault, text), of_ranks in zip(FAULTS.items(), zip(*outcomes, strict=True), strict=True):
        assert len(set(of_ranks)) == 1, of_ranks
        kind, said, held, wrong = of_ranks[0]
        assert kind == "RingError"
        assert text in said, fault
        assert "rank 1" in said
        assert f"error {fault.split(':')[2]}" in said or "CUDA does not start" in said
        assert (held, wrong) == (0, ""), fault


def no_descriptor_left(seat: Seat, module: Path) -> tuple[str, int, str]:
    """Rank 1 gets one copy of a descriptor and no second; the error, descriptors more, what a new ring gets wrong."""
    copies = iter([os.dup])

    def dup(descriptor: int) -> int:
        for real in copies:
            return real(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with gpu(seat, module) as mine:
        assert works(mine, "opens what stays open") == ""
        before = len(os.listdir("/proc/self/fd"))
        with mock.patch.object(os, "dup", dup) if seat.rank == 1 else contextlib.nullcontext():
            error = caught(lambda: mine.open("without descriptors"))
        more = len(os.listdir("/proc/self/fd")) - before
        return f"{type(error).__name__}: {error}", more, works(mine, "after it")


def test_a_rank_without_descriptors_is_an_error_on_all(run: Run, module: Path) -> None:
    text = "RingError: ring 'without descriptors', rank 1: OSError: [Errno 24] Too many open files"
    assert run(WORLD, no_descriptor_left, module) == [(text, 0, "")] * WORLD


def start_with(seat: Seat, module: Path, environment: list[dict[str, str]]) -> tuple[str, int, list[str]]:
    """The error of a start in which each rank has an environment of its own, what is left, and what must not be."""
    with gpu(seat, module, **environment[seat.rank]) as mine:
        error = caught(lambda: works(mine, "ring"))
        seat.meet("it is over")
        return f"{type(error).__name__}: {error}" if error else "", mine.held(), violations(mine.directory)


def test_devices_in_another_order(run: Run, module: Path) -> None:
    """Device 0 is another GPU on each rank, and to rank 2 the others' are hidden."""
    seen = [{"FAKE_CUDA_DEVICES": devices} for devices in ("0a,0b,0c", "0b,0a,0c", "0c")]
    assert run(WORLD, start_with, module, seen) == [("", 0, [])] * WORLD


def test_ranks_without_peer_access(run: Run, module: Path) -> None:
    """Both are named, with their GPUs."""
    seen = [{"FAKE_CUDA_DEVICES": "0a"}, {"FAKE_CUDA_DEVICES": "0b,0c"}, {"FAKE_CUDA_DEVICES": "0c"}]
    for each in seen:
        each["FAKE_CUDA_NO_PEER"] = "0b-0c"
    uuid = "GPU-00000000-0000-0000-0000-00000000000"
    seen_here = f"the GPU of rank 1 ({uuid}b) has no peer access to that of rank 2 ({uuid}c)"
    hidden = (
        f"opening the memory of rank 1 (on {uuid}b) by CUDA IPC"  # from rank 2, which finds it out by trying
    )
    for text, held, not_allowed in run(WORLD, start_with, module, seen):
        assert seen_here in text or hidden in text
        assert (held, not_allowed) == (0, [])


def test_writes_that_do_not_arrive(run: Run, module: Path) -> None:
    """CUDA says that all went well, and reads back what it wrote: the neighbour looks too."""
    lost = [{"FAKE_CUDA_FAULTS": "lostWrites:1:0"} if rank == 1 else {} for rank in range(WORLD)]
    for text, _, _ in run(WORLD, start_with, module, lost):
        assert "the pattern that rank 1 wrote into the memory of rank " in text
        assert "did not arrive: peer access does not work here" in text


def test_no_gpu(run: Run, module: Path) -> None:
    none = [{"FAKE_CUDA_DEVICES": ""} if rank == 1 else {} for rank in range(WORLD)]
    text = "RingError: ring 'ring': no ring on the GPU of rank 1: there is no NVIDIA driver on this machine"
    assert run(WORLD, start_with, module, none) == [(text, 0, [])] * WORLD


def other_sizes(seat: Seat, module: Path) -> str:
    with gpu(seat, module) as mine:
        sizes = IpcTuning(segment_bytes=128 if seat.rank else 256, depth=3)
        return str(caught(lambda: mine.open(tuning=sizes)))


def test_other_settings(run: Run, module: Path) -> None:
    for text in run(2, other_sizes, module):
        assert "ring 'ring': segment_bytes is 256 on rank 0 and 128 on rank 1" in text


def two_ranks_in_a_process(seat: Seat, module: Path) -> str:
    from concurrent.futures import ThreadPoolExecutor

    with gpu(seat, module) as mine, ThreadPoolExecutor(2) as pool:

        def end(rank: int) -> str:
            member = Member(rank, 2, "one process")
            device: Any = torch.device("cuda", 0)
            return str(caught(lambda: open_cuda_ipc(member, seat.store, 20, 1, device)))

        first, second = pool.map(end, range(2))
        assert first == second
        assert violations(mine.directory) == []
        return first


def test_two_ranks_in_a_process(run: Run, module: Path) -> None:
    (text,) = run(1, two_ranks_in_a_process, module)
    assert "ranks 0 and 1 are in one process, and CUDA IPC is between processes; start one a rank" in text
