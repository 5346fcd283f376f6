"""The GPU ring's own lines give the reference's bits, where threads stand for a GPU's blocks.

What this can't show is a GPU's: its memory order, its barriers, its divisions. See docs/gpu.md.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cuda_host
import ring_reduce as rr
from cases import Case
from cuda_host import HostRing, wrong
from programs import CSRC

WORLDS = [2, 3]
BLOCK = 66  # threads: the receiver, the sender and the planner are then three of them


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_host.build(CSRC, tmp_path_factory.mktemp("cuda_host"))


def cases(world: int) -> list[Case]:
    """Sizes of 0, around a pack and a window of segments, and one for two lanes; off 16 bytes, and out of place."""
    counts = (3.0, 0.0, 1.25)[:world]
    return [
        Case("float32", 0, rr.MEAN),
        Case("float32", 1, rr.MEAN),
        Case("float32", 301, rr.SUM, out_of_place=True),
        Case("float32", 64 * world + 1, rr.WEIGHTED_MEAN, counts=counts, offset=1),
        Case("float32", 9001 * world, rr.divide_by(7.5)),
        Case("float16", 333, rr.MEAN, offset=1, out_of_place=True),
        Case("bfloat16", 0, rr.WEIGHTED_MEAN, counts=counts),
        Case("bfloat16", 77, rr.MEAN, offset=3),
        Case("bfloat16", 129 * world + 5, rr.WEIGHTED_MEAN, counts=counts, out_of_place=True),
        Case("bfloat16", 65, rr.DIVIDE_BY_COUNT, counts=(0.0,) * world),
        Case("float64", 99, rr.DIVIDE_BY_COUNT, counts=counts),
        Case("int64", 1, rr.SUM),
        Case("int64", 203, rr.SUM, offset=1),
        Case("int32", 97, rr.SUM, out_of_place=True),
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_bits(library: Path, world: int) -> None:
    """One ring for all calls, so that each finds the slots as the last one left them."""
    with HostRing(library, world) as ring:
        for number, case in enumerate(cases(world), start=1):
            assert not wrong(ring, case)
            assert [ring.calls(rank) for rank in range(world)] == [number] * world


@pytest.mark.parametrize("world", WORLDS)
def test_bits_with_several_threads_a_block(library: Path, world: int) -> None:
    with HostRing(library, world, threads=BLOCK) as ring:
        for case in cases(world)[2:4]:
            assert not wrong(ring, case)


@pytest.mark.parametrize("seed", [1, 2])
def test_bits_do_not_depend_on_who_is_late(library: Path, seed: int) -> None:
    with HostRing(library, 3, threads=2) as ring:
        assert not wrong(ring, Case("bfloat16", 5003, rr.MEAN), delay_seed=seed)


def test_counters_pass_two_to_the_32(library: Path) -> None:
    with HostRing(library, 2, first_segment=2**32 - 3) as ring:
        assert not wrong(ring, Case("float32", 2001, rr.MEAN))


def test_total_count(library: Path) -> None:
    """As a kernel reads counts on the device, too."""
    case = Case("float32", 10, rr.WEIGHTED_MEAN, counts=(3.0, 0.0, 1.25))
    for read_counts in (False, True):
        with HostRing(library, 3) as ring:
            assert ring.run(case, read_counts=read_counts).totals == [4.25] * 3


def test_an_absent_rank_ends_the_call(library: Path) -> None:
    """The others' waits end, and what they leave is no result."""
    with HostRing(library, 3, timeout_ns=50_000_000) as ring:
        result = ring.run(Case("float32", 301, rr.MEAN), absent_rank=1)
        assert result.failure in ("no segment", "no slot")
        assert all(bool(np.isnan(result.outputs[rank]).all()) for rank in (0, 2))
        assert ring.calls(1) == 0


@pytest.mark.parametrize("count", [math.nan, -1.0, math.inf])
def test_a_bad_count_on_the_device(library: Path, count: float) -> None:
    with HostRing(library, 2) as ring:
        case = Case("float32", 10, rr.WEIGHTED_MEAN, counts=(1.0, count))
        assert ring.run(case, read_counts=True).failure == "bad count"
        assert ring.failed_rank() == 1


@pytest.mark.parametrize(("stopped", "completed"), [(0, 1), (1, 0)])
def test_a_call_of_which_a_lane_failed_is_not_completed(library: Path, stopped: int, completed: int) -> None:
    """Though the last one did not fail; and the lane that found the ring stopped left no result."""
    values = np.ones(20_000, np.float32)
    with HostRing(library, 1) as ring:
        assert ring.run_lanes(values, stopped) == 2
        assert (ring.calls(0), ring.completed(0)) == (1, completed)
    assert np.isnan(values).sum() == 10_000 * stopped


# ---- faults planted in a copy of csrc/: the comparison can fail


def planted(directory: Path, file: str, old: str, new: str) -> Path:
    """The library of a copy of csrc/ in which ``old``, which stands there once, is ``new``."""
    csrc = directory / "csrc"
    shutil.copytree(CSRC, csrc)
    text = (csrc / file).read_text()
    assert text.count(old) == 1
    (csrc / file).write_text(text.replace(old, new))
    return cuda_host.build(csrc, directory)


def divides_by_too_much(directory: Path) -> Path:
    return planted(directory, "cuda_port.h", "shared.partial_count) * power_of_two(-mix.exponent)", "1.0)")


def never_frees_a_slot(directory: Path) -> Path:
    return planted(
        directory, "cuda_port.h", "publish(left().taken(), counters_.received)", "static_cast<void>(0)"
    )


def writes_a_whole_pack_at_the_end(directory: Path) -> Path:
    rest = "store_tensor<sizeof(T), false>(c.output + at, result, elements)"
    return planted(directory, "cuda_chunk.h", rest, rest.replace(", elements", ""))


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (divides_by_too_much, "should be"),
        (never_frees_a_slot, "no slot"),
        (writes_a_whole_pack_at_the_end, "written outside"),
    ],
)
def test_a_fault_is_seen(fault: Callable[[Path], Path], seen: str, tmp_path: Path) -> None:
    case = Case("float32", 1001, rr.WEIGHTED_MEAN, counts=(3.0, 2.0))
    with HostRing(fault(tmp_path), 2, timeout_ns=50_000_000) as ring:
        try:
            found = wrong(ring, case)
        except AssertionError as error:
            found = str(error)
    assert seen in found
