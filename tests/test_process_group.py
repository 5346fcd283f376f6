"""The ring over process groups: to the bit what shared memory gives, and what the reference says."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch

import ring_reduce as rr
from cases import SMALL, Case, assert_same, poisoned, reduce, same_memory, to_tensor
from conftest import Run
from group_rings import SMALL_GROUP, group_ring, kept_group_ring
from launch import Seat, spawn
from reference import FLOATS, TYPES
from ring_reduce import _core
from ring_reduce.call import all_reduce_call
from ring_reduce.normalization import Normalization
from test_normalization import DIVIDING, counts_of
from tools import require_tool

WORLDS = [2, 3, 4]


def cases_of(world: int) -> list[Case]:
    """Every type with every normalization: some elements, and many segments whose last ones differ in length."""
    cases: list[Case] = []
    for name, element in TYPES.items():
        segment = SMALL["segment_bytes"] // element.bytes
        for normalization in [rr.SUM, *(DIVIDING if name in FLOATS else [])]:
            seed = len(cases)
            cases += [
                Case(
                    name,
                    size,
                    normalization,
                    seed=seed + i,
                    values="exact" if i % 2 else "random",
                    counts=counts_of(world, seed + i) if normalization.uses_count else None,
                    out_of_place=i % 3 == 0,
                    offset=i % 2,
                )
                for i, size in enumerate([seed % (2 * world), world * segment * 7 + 3 + seed % 5])
            ]
    return [*cases, Case("float32", 0), Case("float32", 0, rr.DIVIDE_BY_COUNT, counts=(1.5,) * world)]


def reduce_over_both(seat: Seat, cases: list[Case]) -> list[tuple[np.ndarray, np.ndarray, float, float]]:
    """Of each case the results, and the total counts, over shared memory and over process groups."""
    shm, group = seat.kept_ring(algorithm="ring", **SMALL), kept_group_ring(seat)
    found = []
    for case in cases:
        results = [reduce(ring, case) for ring in (shm, group)]
        counted = (
            case.normalization.uses_count
        )  # else it is that of an earlier call, perhaps of another test's
        counts = [ring.stats.last_count if counted else 0.0 for ring in (shm, group)]
        found.append((results[0], results[1], counts[0], counts[1]))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_to_the_bit(run: Run, world: int) -> None:
    cases = cases_of(world)
    for rank, results in enumerate(run(world, reduce_over_both, cases)):
        for case, (over_shm, over_group, shm_count, group_count) in zip(cases, results, strict=True):
            what = f"{case}, rank {rank} of {world}"
            assert_same(over_group, case.expected(world), what)
            assert_same(over_group, over_shm, what)
            assert group_count == shm_count, what


Halves = list[tuple[str, Normalization, list[bytes], float]]


def halves_over_both(seat: Seat, elements: int) -> tuple[Halves, Halves]:
    """reduce_scatter, in place too, and all_gather; over shared memory, and over process groups."""
    results: list[Halves] = []
    counts = (0.1, 0.2, 0.3, 0.7)  # whose sum depends on its order, and so on the rank
    for ring in (seat.kept_ring(algorithm="ring", **SMALL), kept_group_ring(seat)):
        found: Halves = []
        for name, element in TYPES.items():
            for normalization in [rr.SUM, *(DIVIDING if name in FLOATS else [])]:
                count = counts[seat.rank] if normalization.uses_count else None
                x = to_tensor(Case(name, seat.world * elements, seed=5).input(seat.rank), element)
                apart = poisoned(elements, element)[0]
                ring.reduce_scatter(x, normalization, out=apart, count=count)
                whole = poisoned(seat.world * elements, element)[0]
                ring.all_gather(apart, out=whole)
                within = x.clone()
                own = within[seat.rank * elements :][:elements]
                ring.reduce_scatter(within, normalization, out=own, count=count)
                assert same_memory(own, apart), (name, normalization)
                ring.all_gather(own, out=within)
                assert same_memory(within, whole), (name, normalization)
                raw = [tensor.view(torch.uint8).numpy().tobytes() for tensor in (apart, whole)]
                found.append((name, normalization, raw, ring.stats.last_count if count is not None else 0.0))
        results.append(found)
    return results[0], results[1]


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_and_all_gather_to_the_bit(run: Run, world: int) -> None:
    ranks = run(world, halves_over_both, 101)
    for over_shm, over_group in ranks:
        assert over_group == over_shm
    for i, (name, normalization, (_, whole), _) in enumerate(ranks[0][1]):
        parts = b"".join(over_group[i][2][0] for _, over_group in ranks)
        assert whole == parts, (name, normalization)


def special_over_both(seat: Seat) -> list[list[Any]]:
    """What is left out of a sum, and what must not overflow on the way."""
    rank, results = seat.rank, []
    for ring in (seat.kept_ring(algorithm="ring", **SMALL), kept_group_ring(seat)):
        found = []
        for name in FLOATS:
            x = torch.full((500,), math.nan if rank == 0 else 3.0).to(getattr(torch, name))
            for counts in ((0.0, 0.1, 0.2), (0.0, 0.0, 0.0), (0.3, 0.7, 1e-3)):
                for normalization in (rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN):
                    y = ring.all_reduce(x.clone(), normalization, count=counts[rank])
                    found.append(y.double().nan_to_num(-1.0).tolist())
        large = torch.full((500,), 60000.0, dtype=torch.float16)
        found.append(ring.all_reduce(large.clone(), rr.MEAN).tolist())
        found.append(ring.all_reduce(large, rr.WEIGHTED_MEAN, count=256).tolist())
        results.append(found)
    return results


def test_counts_of_0_and_the_range_of_float16(run: Run) -> None:
    for over_shm, over_group in run(3, special_over_both):
        assert over_group == over_shm
        three = [3.0] * 500
        assert over_group[1] == pytest.approx(three)  # a mean of 3.0 alone: NaN has a count of 0
        assert over_group[2] == over_group[3] == [0.0] * 500  # nothing was counted
        assert over_group[4] == [-1.0] * 500  # NaN that counts
        assert over_group[-2] == over_group[-1] == [60000.0] * 500


def bytes_of(seat: Seat, size: int) -> list[tuple[int, ...]]:
    ring = kept_group_ring(seat)
    moved = []
    for elements in (size, 0):
        before = ring.stats
        ring.all_reduce(np.ones(elements, np.float32))
        after = ring.stats
        names = ("bytes_sent", "bytes_received", "header_bytes_sent", "calls")
        moved.append(tuple(getattr(after, name) - getattr(before, name) for name in names))
    assert after.seconds_waiting > 0
    return moved


def test_bytes_are_those_of_the_formula(run: Run) -> None:
    world, size = 3, 1001
    for rank, (full, empty) in enumerate(run(world, bytes_of, size)):
        chunks = [elements for _, elements in rr.partition(size, 4, world)]
        sent = 4 * (2 * size - chunks[rank] - chunks[(rank + 1) % world])
        received = 4 * (2 * size - chunks[rank - 1] - chunks[rank])
        assert full == (sent, received, 40 * (world - 1), 1)
        assert empty == (0, 0, 40 * (world - 1), 1)


def calls_in_flight(seat: Seat) -> list[float]:
    """Asynchronous ones, a synchronous one behind them, arrays of both libraries, and one that may not be written."""
    with group_ring(seat, name="flight", **SMALL_GROUP) as ring:
        works = [ring.all_reduce(torch.full((3000,), float(i)), async_op=True) for i in range(5)]
        last = ring.all_reduce(np.full(3000, 5.0))
        fixed = np.full(300, 7.0)
        fixed.flags.writeable = False
        out = ring.all_reduce(fixed, out=np.empty(300))
        assert repr(ring) == f"<Ring 'flight' rank {seat.rank} of {seat.world}, 1 lane, process_group>"
        return [float(x[-1]) for x in [*(work.wait() for work in works), last, out]]


def test_asynchronous_calls_keep_their_order(run: Run) -> None:
    assert run(2, calls_in_flight) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 14.0]] * 2


def test_a_world_of_1() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    with rr.Ring(store, rank=0, world=1, transport="process_group", _has_group=True) as ring:
        x = torch.arange(5.0)
        assert ring.all_reduce(x.clone(), rr.DIVIDE_BY_COUNT, count=2).tolist() == (x / 2).tolist()
        assert ring.stats.last_count == 2.0
        assert ring.reduce_scatter(x, rr.MEAN).tolist() == ring.all_gather(x).tolist() == x.tolist()
        assert (ring.stats.bytes_sent, ring.stats.header_bytes_sent, ring.stats.calls) == (0, 0, 3)


def test_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would leave out what the ranks agree on on the host."""
    with rr.Ring(rank=0, world=1, transport="process_group", _has_group=True) as ring:
        engine: Any = ring._engine
        call = all_reduce_call(torch.ones(3), rr.SUM, None, None)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "device", torch.device("cuda", 0))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(RuntimeError, match="can't be captured in a CUDA graph"):
                engine.run(call, False)
        assert ring.all_reduce(torch.ones(3)).tolist() == [1.0] * 3, "the ring goes on"


def make_fingerprint(**changes: Any) -> _core.Fingerprint:
    numbers = {"call": 1, "operation": 0, "elements": 10, "type": 1, "normalization": 0, "divisor": 1.0}
    return _core.Fingerprint(**{**numbers, **changes})


def test_what_the_core_refuses() -> None:
    for name, value in {"operation": 3, "type": 6, "normalization": -1}.items():
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            make_fingerprint(**{name: value})
    fingerprint = make_fingerprint()
    assert _core.Fingerprint.from_bytes(fingerprint.to_bytes()).describe() == fingerprint.describe()
    with pytest.raises(ValueError, match=f"{_core.FINGERPRINT_BYTES} bytes, not 3"):
        _core.Fingerprint.from_bytes(b"xyz")
    with pytest.raises(ValueError, match="rank is 3"):
        fingerprint.chunk(3, 3)
    with pytest.raises(ValueError, match="k is 5"):
        _core.chunk_of_move(5, 0, 3)
    with pytest.raises(ValueError, match="window"):
        _core.run_ring(object(), 0, 0, 1, 0)
    with pytest.raises(ValueError, match="type is 9"):
        _core.combine(9, 0, 0, 0, 0, 1.0, 1.0, 1.0)


def through_triton(seat: Seat, cases: list[Case]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same calls over shared memory, and over process groups with the passes of a GPU, interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    from ring_reduce.chunk_passes import DevicePasses

    with seat.ring(algorithm="ring") as shm, group_ring(seat, segment_bytes=1024) as group:
        engine: Any = group._engine
        engine._passes = lambda _: DevicePasses()
        return [(reduce(shm, case), reduce(group, case)) for case in cases]


def test_through_the_kernels_of_a_gpu() -> None:
    require_tool("triton", "python -m pip install triton")
    world = 3
    cases = [
        Case(name, 1000, normalization, seed=i, counts=counts if normalization.uses_count else None)
        for name in FLOATS
        if name != "bfloat16"  # which the interpreter truncates
        for normalization in (rr.SUM, rr.MEAN, rr.WEIGHTED_MEAN)
        for i, counts in enumerate([(0.3, 0.0, 2.1)])
    ]
    for results in spawn(world, through_triton, cases):
        for case, (over_shm, over_group) in zip(cases, results, strict=True):
            assert_same(over_group, over_shm, case)
