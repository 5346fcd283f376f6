"""What nvcc makes of the GPU ring's kernels: no spills, and PTX that waits and publishes as it has to.

One compilation serves all of it: faults are planted in its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import cuda_lint
from cuda_lint import INSTALL_NVCC, KERNELS, faults, spilled_bytes
from programs import CSRC
from tools import require_tool

RELEASE = "st.release.sys.global.u64"
ACQUIRE = "ld.acquire.sys.global.u64"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, int]]:
    nvcc = require_tool("nvcc", INSTALL_NVCC)
    return cuda_lint.compile_kernels(CSRC, nvcc, tmp_path_factory.mktemp("cuda_lint"))


def test_no_kernel_spills(compiled: tuple[str, dict[str, int]]) -> None:
    _, spills = compiled
    assert sorted(spills.values()) == [0] * KERNELS
    assert all("ring_kernel" in name for name in spills)


def test_spills_are_read() -> None:
    """The gate can fail."""
    text = "Function properties for f\n    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
    assert spilled_bytes(text) == {"f": 28}


def test_the_kernels_have_no_faults(compiled: tuple[str, dict[str, int]]) -> None:
    assert faults(compiled[0]) == []


def replaced(old: str, new: str) -> Callable[[str], str]:
    """A plant: every ``old`` is ``new``."""
    return lambda ptx: ptx.replace(old, new)


def first_replaced(pattern: str, new: str) -> Callable[[str], str]:
    """A plant: the first match alone."""
    return lambda ptx: re.sub(pattern, new, ptx, count=1)


def without_barrier(number: int) -> Callable[[str], str]:
    """A plant: the first kernel lacks a barrier. The third stands before the two releases of a move."""

    def plant(ptx: str) -> str:
        at = [match.span() for match in re.finditer(r"^\s*bar\.sync.*$", ptx, re.MULTILINE)][number]
        return ptx[: at[0]] + ptx[at[1] :]

    return plant


def released_at_once(ptx: str) -> str:
    """A plant: one store of data has a release behind it."""
    return re.sub(r"(\bst\.global\.cg\.v4[^;]*;)", rf"\1 \n{RELEASE} [%rd1], %rd2;", ptx, count=1)


PLANTS = {
    "relaxed release": (replaced(RELEASE, "st.relaxed.sys.global.u64"), "relaxed access"),
    "one relaxed release": (first_replaced(r"st\.release\.sys", "st.relaxed.sys"), "relaxed access"),
    "releases gone": (replaced(RELEASE, "st.global.u64"), "too few release stores"),
    "volatile acquire": (first_replaced(r"ld\.acquire\.sys", "ld.volatile"), "volatile access"),
    "acquires gone": (replaced(ACQUIRE, "ld.global.u64"), "too few acquire loads"),
    "release within the GPU": (first_replaced(r"st\.release\.sys", "st.release.gpu"), "ends within the GPU"),
    "load that may move": (first_replaced(r"ld\.global\.cg\.v4", "ld.global.nc.v4"), "above a wait"),
    "no barrier at the start": (without_barrier(0), "too few barriers"),
    "no barrier behind the waits": (without_barrier(1), "too few barriers"),
    "no barrier before the publish": (without_barrier(2), "no barrier between"),
    "release at once": (released_at_once, "no barrier between"),
    "fused multiply-add": (first_replaced(r"\bmul\.rn\.f32", "fma.rn.f32"), "rounded once"),
    "approximate division": (first_replaced(r"\bdiv\.rn\.f32", "div.approx.f32"), "approximate division"),
    "array in local memory": (first_replaced(r"\bst\.shared", "st.local"), "local memory"),
    "narrow slots": (replaced("ld.global.cg.v4", "ld.global.cg.v2"), "loads of slots of 16 bytes"),
    "a kernel missing": (first_replaced(r"\.entry", ".func"), f"and not {KERNELS}"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_fault_in_the_ptx_is_seen(plant: str, compiled: tuple[str, dict[str, int]]) -> None:
    change, seen = PLANTS[plant]
    ptx = compiled[0]
    mutant = change(ptx)
    assert mutant != ptx
    found = faults(mutant)
    assert any(seen in fault for fault in found), found
