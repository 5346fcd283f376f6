"""The ring over CUDA IPC on a fake CUDA runtime: its host code, its handshake and its protocol, ranks being processes.

What this can't show is a GPU's: real IPC, and what its memory and launches do. See docs/gpu.md.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import fake_cuda
import reference
import ring_reduce as rr
from cases import Case
from conftest import Run
from fake_cuda import SMALL, Gpu, call_on, difference, gpu, ledger, start, violations
from launch import Seat, caught
from ring_reduce.call import ALL_GATHER, REDUCE_SCATTER


@pytest.fixture(scope="session")
def module() -> Path:
    return fake_cuda.built()


def cases(world: int) -> list[Case]:
    """Counts that were seen to fail elsewhere (9,999,999 and 10,556,587, scaled down), 0 and 1, and every dtype."""
    counts = (3.0, 0.0, 1.25, 2.0)[:world]
    return [
        Case("float32", 0, rr.MEAN),
        Case("float32", 1, rr.MEAN),
        Case("float32", 9_999, rr.SUM, out_of_place=True),
        Case("float32", 9_001 * world, rr.divide_by(7.5)),
        Case("float32", 64 * world + 1, rr.WEIGHTED_MEAN, counts=counts),
        Case("float16", 1_055, rr.MEAN),
        Case("bfloat16", 10_557, rr.MEAN, out_of_place=True),
        Case("bfloat16", 129 * world + 5, rr.WEIGHTED_MEAN, counts=counts),
        Case("float64", 99, rr.DIVIDE_BY_COUNT, counts=counts),
        Case("int64", 203, rr.SUM),
        Case("int32", 97, rr.SUM),
    ]


def bits(seat: Seat, module: Path) -> tuple[list[str], int, list[str], int]:
    """All cases on one ring: what is wrong, the calls that ended, what must not happen, and what is left."""
    with gpu(seat, module) as mine:
        engine = mine.open()
        wrong = []
        for case in cases(seat.world):
            _, out = start(engine, mine, case)
            mine.synchronize()
            engine.check()
            wrong.append(difference(out, case, seat.world))
        calls = engine.stats().calls
        engine.close()
        seat.meet("all have closed")
        return wrong, calls, violations(mine.directory), mine.held()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bits(run: Run, module: Path, world: int) -> None:
    count = len(cases(world))
    assert run(world, bits, module) == [([""] * count, count, [], 0)] * world


def parts(seat: Seat, module: Path) -> list[str]:
    """Reductions to equal parts, and parts gathered, in place and not, aligned and not; what is wrong."""
    wrong = []
    counts = (3.0, 0.0, 1.25)
    with gpu(seat, module) as mine:
        engine = mine.open()
        for name, each in (("float32", 0), ("bfloat16", 333), ("float32", 5_001), ("float64", 64)):
            case = Case(name, each * seat.world, rr.WEIGHTED_MEAN, counts=counts)
            whole = fake_cuda.to_device(case.input(seat.rank), case)
            part = torch.full((each,), 77, dtype=whole.dtype)
            mine.kept += [whole, part]
            engine.run(call_on(whole, part, case.normalization, counts[seat.rank], REDUCE_SCATTER), False)
            mine.synchronize()
            expected = reference.reduce_scatter(
                case.inputs(seat.world), case.element, case.normalization, counts
            )
            if not reference.same_bits(fake_cuda.values(part, case), expected[seat.rank]):
                wrong.append(f"reduce_scatter: {case}")
            gathered = torch.full((each * seat.world,), 77, dtype=whole.dtype)
            own = gathered[each * seat.rank : each * (seat.rank + 1)] if each == 333 else part
            own.copy_(part)
            mine.kept.append(gathered)
            engine.run(call_on(own, gathered, rr.SUM, operation=ALL_GATHER), False)
            mine.synchronize()
            engine.check()
            if not reference.same_bits(fake_cuda.values(gathered, case), np.concatenate(expected)):
                wrong.append(f"all_gather: {case}")
        engine.close()
    return wrong


def test_reduce_scatter_and_all_gather(run: Run, module: Path) -> None:
    assert run(3, parts, module) == [[]] * 3


def counters_and_counts(seat: Seat, module: Path) -> tuple[str, float, list[int]]:
    """A difference across the wrap of the counters' low half, with counts on the device; the total; bytes sent."""
    case = Case("float32", 3_001, rr.WEIGHTED_MEAN, counts=(3.0, 0.5))
    assert case.counts is not None
    with gpu(seat, module) as mine:
        engine = mine.open(tuning=replace(SMALL, first_segment=2**32 - 5))
        engine.device = torch.device("cpu")  # where the tensor of the count is
        x = fake_cuda.to_device(case.input(seat.rank), case)
        count = torch.tensor([case.counts[seat.rank]], dtype=torch.float64)
        engine.run(call_on(x, x, case.normalization, count), False)
        mine.synchronize()
        stats = engine.stats()
        total = engine._core.total_count()
        engine.close()
        return difference(x, case, seat.world), total, [stats.bytes_sent, stats.bytes_received]


def test_counters_pass_two_to_the_32_and_counts_are_read_on_the_device(run: Run, module: Path) -> None:
    for wrong, total, moved in run(2, counters_and_counts, module):
        assert wrong == ""
        assert total == 3.5
        assert moved == [3_001 * 4] * 2  # of two ranks: a chunk to be added, and the other finished


def refused_counts(seat: Seat, module: Path) -> list[str]:
    """What is said of counts that can't be; then a call works."""
    with gpu(seat, module) as mine:
        engine = mine.open()
        x = torch.ones(4)
        errors = []
        for count in (torch.ones(2, dtype=torch.float64), torch.ones(1)):
            wrong = call_on(x, x, rr.WEIGHTED_MEAN, count)
            errors.append(caught(functools.partial(engine.run, wrong, False)))
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            errors.append(caught(lambda: engine.run(call_on(x, x, rr.WEIGHTED_MEAN, 3.0), False)))
            engine.run(call_on(x, x, rr.SUM), False)
        mine.synchronize()
        engine.close()
        assert x.tolist() == [seat.world] * 4
        return [f"{type(error).__name__}: {error}" for error in errors]


def test_counts_that_are_refused_cost_nothing(run: Run, module: Path) -> None:
    for shape, dtype, captured in run(2, refused_counts, module):
        assert "CountError: count is torch.float64 of 2 elements" in shape
        assert "CountError: count is torch.float32 of 1 elements" in dtype
        assert "CountError: count=3.0 would stay as it is in the captured graph" in captured


def enqueue_on_two_streams(mine: Gpu, cases: list[Case]) -> list[str]:
    """Calls in turns on two streams, all enqueued before any other rank makes one; what is wrong."""
    seat = mine.seat
    engine = mine.open()
    streams = [mine.stream(), mine.stream()]
    if seat.rank != 0:
        seat.store.get("rank 0 has enqueued")
    outs = []
    for number, case in enumerate(cases):
        mine.current = streams[number % 2]
        outs.append(start(engine, mine, case)[1])
    if seat.rank == 0:
        seat.store.set("rank 0 has enqueued", b"")
    mine.synchronize()
    engine.check()
    engine.close()
    return [difference(out, case, seat.world) for out, case in zip(outs, cases, strict=True)]


def two_streams(seat: Seat, module: Path) -> tuple[list[str], list[str]]:
    with gpu(seat, module) as mine:
        wrong = enqueue_on_two_streams(mine, [Case("float32", 500 + i, rr.MEAN, seed=i) for i in range(6)])
        seat.meet("all have closed")
        return wrong, violations(mine.directory)


def test_two_streams(run: Run, module: Path) -> None:
    """Calls follow one another whatever stream they are on, and do not wait for the host."""
    assert run(2, two_streams, module) == [([""] * 6, [])] * 2


def captured(seat: Seat, module: Path) -> list[str]:
    """Calls before, in and after captures, which CUDA lets wait for none outside of theirs; what is wrong."""
    case = Case("float32", 501, rr.MEAN)
    with gpu(seat, module) as mine:
        engine = mine.open()
        outs = []
        for capture in (0, 7, 7, 8, 0):
            mine.capture(capture)
            outs.append(start(engine, mine, case)[1])
        for capture in (7, 8):
            mine.replay(capture)
        mine.synchronize()
        engine.check()
        engine.close()
        return [difference(out, case, seat.world) for out in outs]


def test_capture(run: Run, module: Path) -> None:
    assert run(2, captured, module) == [[""] * 5] * 2


def exported(seat: Seat, module: Path) -> list[str]:
    """What a rank exported and opened."""
    with gpu(seat, module) as mine:
        engine = mine.open()
        for case in cases(seat.world)[:4]:
            start(engine, mine, case)
        mine.synchronize()
        engine.close()
        seat.meet("all have closed")
        return [
            line.split()[1] for line in ledger(mine.directory) if line.startswith(f"{os.getpid()} cudaIpc")
        ]


@pytest.mark.parametrize(("world", "opened"), [(2, 1), (3, 2)])
def test_only_staging_memory_is_exported(run: Run, module: Path, world: int, opened: int) -> None:
    """Once, and opened once a neighbour: how the caller's tensors were allocated does not matter."""
    pairs = ["cudaIpcOpenMemHandle"] * opened + ["cudaIpcCloseMemHandle"] * opened
    assert run(world, exported, module) == [["cudaIpcGetMemHandle", *pairs]] * world


def virtual_ring(seat: Seat, module: Path) -> list[str]:
    """The host code of virtual ranks; what is wrong."""
    case = Case("float32", 2_001, rr.DIVIDE_BY_COUNT, counts=(3.0, 0.0, 1.25))
    assert case.counts is not None
    with gpu(seat, module) as mine:
        from ring_reduce import _cuda

        ring = _cuda.VirtualRing(
            world=3, lanes=2, segment_bytes=128, depth=3, window=2, timeout_s=20.0, first_segment=0
        )
        xs = [torch.from_numpy(case.input(rank)) for rank in range(3)]
        addresses = [x.data_ptr() for x in xs]
        ring.all_reduce(
            type=1,
            normalization=case.normalization.number,
            divisor=1.0,
            elements=case.size,
            inputs=addresses,
            outputs=addresses,
            counts=list(case.counts),
            device_counts=0,
            stream=0,
            delay_seed=0,
            absent_rank=-1,
        )
        assert ring.total_count() == 4.25
        ring.check()
        wrong = [difference(x, case, 3) for x in xs]
        del ring
        return [*wrong, *violations(mine.directory), *[""] * mine.held()]


def test_virtual_ranks(run: Run, module: Path) -> None:
    assert run(1, virtual_ring, module) == [[""] * 3]


def too_many_blocks(seat: Seat, module: Path) -> tuple[str, int]:
    """What a GPU says that runs 12 blocks at the same time, and what it then holds."""
    with gpu(seat, module) as mine:
        from ring_reduce import _cuda

        settings = {"segment_bytes": 128, "depth": 3, "window": 2, "timeout_s": 20.0, "first_segment": 0}
        error = caught(lambda: _cuda.VirtualRing(world=5, lanes=3, **settings))  # type: ignore[arg-type]
        return f"{type(error).__name__}: {error}", mine.held()


def test_virtual_ranks_that_would_wait_for_each_other_for_ever_are_refused(run: Run, module: Path) -> None:
    """Blocks that do not run at the same time."""
    ((text, held),) = run(1, too_many_blocks, module)
    assert text.startswith("ValueError: ")
    assert "12 at the same time; use at least 1 and at most 2 lanes" in text
    assert held == 0


def test_poison_is_seen() -> None:
    """The comparison can fail."""
    case = Case("float32", 10, rr.MEAN)
    out = torch.from_numpy(case.expected(2).copy())
    assert difference(out, case, 2) == ""
    out[3] = torch.nextafter(out[3], out[3] + 1)
    assert "element 3 of 10" in difference(out, case, 2)
