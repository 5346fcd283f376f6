"""The kernels that are made ready with a ring of GPUs are those that its calls use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from group_rings import group_ring
from launch import Seat
from ring_reduce.chunk_passes import CpuPasses, prepare_device
from ring_reduce.normalization import Normalization
from tools import require_tool

Kernel = tuple[str, bool, bool, bool]  # type; whether there is a y, it scales, it divides
TYPES = ("float32", "bfloat16", "float16")
NORMALIZATIONS: tuple[Normalization, ...] = (
    rr.SUM,
    rr.MEAN,
    rr.divide_by(7),
    rr.DIVIDE_BY_COUNT,
    rr.WEIGHTED_MEAN,
)


class Watched(CpuPasses):
    """Notes which kernel a GPU would launch."""

    def __init__(self, element_type: int, used: set[Kernel]) -> None:
        super().__init__(element_type)
        self._used = used

    def combine(self, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None, **numbers: float) -> None:
        scaled = numbers["x_scale"] != 1 or (y is not None and numbers["y_scale"] != 1)
        name = str(x.dtype).removeprefix("torch.")
        self._used.add((name, y is not None, scaled, numbers["divisor"] != 1))
        super().combine(out, x, y, **numbers)


def used_by_calls(seat: Seat) -> set[Kernel]:
    used: set[Kernel] = set()
    with group_ring(seat, name="watched") as ring:
        engine: Any = ring._engine
        engine._passes = lambda element_type: Watched(element_type, used)
        for name in TYPES:
            for normalization in NORMALIZATIONS:
                x = torch.ones(100, dtype=getattr(torch, name))
                ring.all_reduce(x, normalization, count=3 + seat.rank if normalization.uses_count else None)
    return used


class Launches:
    """In the place of the kernel."""

    def __init__(self) -> None:
        self.made: set[Kernel] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Launches:
        return self

    def __call__(self, out: Any, x: torch.Tensor, y: Any, *_: int, **constants: Any) -> None:
        assert constants["ALIGNMENT"] == 16
        name = str(x.dtype).removeprefix("torch.")
        self.made.add((name, y is not None, constants["SCALED"], constants["DIVIDED"]))


def test_what_is_prepared_is_what_calls_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, and nothing else."""
    require_tool("triton", "python -m pip install triton")
    from ring_reduce.kernels import chunk

    launches = Launches()
    monkeypatch.setattr(chunk, "combine_kernel", launches)
    prepare_device(torch.device("cpu"), "rank 0")
    used = set.union(*run(3, used_by_calls))
    assert launches.made >= used
    assert len(launches.made) == 15
    assert {kernel[1:] for kernel in launches.made} == {kernel[1:] for kernel in used}


def test_a_kernel_that_does_not_compile_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of which rank, since all ranks hear of it."""
    require_tool("triton", "python -m pip install triton")
    from ring_reduce.kernels import chunk

    monkeypatch.setattr(chunk, "combine_kernel", {})
    text = r"^ring 'x', rank 1: Triton can't make the passes for cpu: KeyError.*C compiler"
    with pytest.raises(rr.RingError, match=text):
        prepare_device(torch.device("cpu"), "ring 'x', rank 1")
