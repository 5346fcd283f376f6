"""The Triton kernels of an accumulator without a GPU: in Triton's interpreter, and compiled for two architectures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels take torch tensors: pip install torch")

import torch

from ptx import Compiled, compile_ptx, spilled_bytes, wide_accesses
from tools import require_tool

TESTS = Path(__file__).resolve().parent
KERNELS = TESTS.parent / "kernels" / "accumulate.py"
CASES = ["sums", "large sums", "zero scales", "quotients", "exact quotients", "bad divisors"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
THREADS = 128


@pytest.fixture(autouse=True)
def _triton() -> None:
    require_tool("triton", "pip install triton==3.9.0")


# --- in the interpreter

INTERPRET = """
import importlib.util, sys, warnings
import ring_reduce.kernels
case, path = sys.argv[1:]
warnings.simplefilter("ignore")  # of infinities and NaN that meet
spec = importlib.util.spec_from_file_location("ring_reduce.kernels.accumulate", path)
ring_reduce.kernels.accumulate = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ring_reduce.kernels.accumulate)
import kernel_cases
print(*kernel_cases.CASES[case](), "done", sep="\\n")
"""


def interpret(case: str, kernels: Path) -> list[str]:
    """What the kernels of this file do wrong."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET, case, str(kernels)],
        cwd=TESTS,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    *wrong, last = done.stdout.splitlines() or [""]
    assert (done.returncode, last) == (0, "done"), done.stderr
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: str) -> None:
    assert interpret(case, KERNELS) == []


@pytest.mark.parametrize(
    ("case", "text", "fault"),
    [
        ("zero scales", "tl.where(counted, total, old)", "total"),
        ("zero scales", "mask=inside & (fresh == 0)", "mask=inside"),
        ("sums", "tl.where(fresh == 0, old + term, term)", "old + term"),
        ("sums", "_accumulate_block(sums, x, offsets < rest", "_accumulate_block(sums, x, offsets <= rest"),
        ("sums", "(word & 0xFFFFFFFF) * BLOCK", "(word & 0xFFFFFFFF) * (BLOCK - 1)"),
        ("sums", "begin += len(rows)", "begin += 0"),
        ("sums", "+ BLOCK - 1) // BLOCK", ") // BLOCK"),
        ("quotients", "tl.where(divisor == 0, 0.0, quotient)", "quotient"),
        ("quotients", "_divide_block(out, sums, offsets < rest", "_divide_block(out, sums, offsets <= rest"),
        ("quotients", "tl.div_rn(total, by)", "total * (1 / by)"),
        ("bad divisors", 'tl.where(divisor > 0, divisor, float("nan"))', "divisor"),
    ],
)
def test_faults_are_seen(case: str, text: str, fault: str, tmp_path: Path) -> None:
    source = KERNELS.read_text()
    assert source.count(text) == 1, text
    mutant = tmp_path / "accumulate.py"
    mutant.write_text(source.replace(text, fault))
    assert interpret(case, mutant) != []


# --- compiled


Compile = Callable[..., Compiled]


@pytest.fixture
def compile_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compile:
    """``compile_kernel(name, capability, dtype, wide, number)``: as the launcher has it compiled, but without a GPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing can be compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # what is found there says nothing of spills
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")

    def compile_one(
        name: str, capability: int, dtype: torch.dtype, wide: bool, number: str = "*fp64", **options: Any
    ) -> Compiled:
        from ring_reduce.kernels import accumulate as kernels

        kernel = getattr(kernels, name)
        constants = {
            "TYPE": kernels.TRITON_TYPES[dtype],
            "SUM_TYPE": kernels.TRITON_TYPES[kernels.sum_type(dtype)],
            "WIDE": wide,
            "BLOCK": kernels.BLOCK,
            "ROW": kernels.ROW,
        }
        pointers = dict(zip(kernel.arg_names, ["*i64", "*i64", number], strict=False))
        return compile_ptx(kernel, pointers, constants, capability, {**kernels.OPTIONS, **options})

    return compile_one


ALL = pytest.mark.parametrize(
    ("capability", "dtype"), [(capability, dtype) for capability in (80, 90) for dtype in DTYPES], ids=str
)


@ALL
@pytest.mark.parametrize("name", ["accumulate_kernel", "divide_kernel"])
def test_compiled(compile_kernel: Compile, name: str, capability: int, dtype: torch.dtype) -> None:
    """16 bytes an access where the tensors are aligned, no spills, and the core's arithmetic."""
    from ring_reduce.kernels.accumulate import BLOCK, sum_type

    wide, narrow = (compile_kernel(name, capability, dtype, wide) for wide in (True, False))
    per_sum, per_other = (BLOCK * t.itemsize // (16 * THREADS) for t in (sum_type(dtype), dtype))
    accumulates = name == "accumulate_kernel"
    loads, stores = (per_sum + per_other, per_sum) if accumulates else (per_sum, per_other)
    assert wide_accesses(wide.ptx) == {"ld": loads, "st": stores}
    assert wide_accesses(narrow.ptx) == {}
    for compiled in (wide, narrow):
        assert f".target sm_{capability}" in compiled.ptx
        assert spilled_bytes(compiled.ptxas) == 0
        assert not re.search(
            r"\bfma\.|\.ftz\b|\bdiv\.(?:full|approx)|\brcp\.|\b(?:ld|st)\.local", compiled.ptx
        )
        bits = 8 * sum_type(dtype).itemsize
        assert (f"div.rn.f{bits}" in compiled.ptx) is not accumulates
    if not accumulates and dtype.itemsize == 2:
        rounding = "cvt.rn.f16" if dtype is torch.float16 else "cvt.rn.bf16"
        assert rounding in wide.ptx


def test_spills_are_seen(compile_kernel: Compile) -> None:
    """The gate can fail: too few registers must show."""
    assert spilled_bytes(compile_kernel("accumulate_kernel", 80, torch.float64, True, maxnreg=24).ptxas) > 0


def test_fusion_is_seen(compile_kernel: Compile) -> None:
    """The gate can fail: with Triton's own options product and sum become one instruction."""
    fused = compile_kernel("accumulate_kernel", 80, torch.float32, True, enable_fp_fusion=True)
    assert re.search(r"\bfma\.", fused.ptx) or "mul.rn" not in fused.ptx


@pytest.mark.parametrize("number", ["*fp32", "*i64", "*i32"])
def test_counts_of_any_type(compile_kernel: Compile, number: str) -> None:
    """A scale or divisor on the device is a tensor of floats or of integers."""
    for name in ("accumulate_kernel", "divide_kernel"):
        assert spilled_bytes(compile_kernel(name, 90, torch.bfloat16, True, number).ptxas) == 0


# --- the launcher


def test_groups() -> None:
    """Tensors are accessed widely only if both begin at a multiple of 16 bytes; empty ones are left out."""
    from ring_reduce.kernels.accumulate import group

    room = torch.zeros(100)
    aligned, shifted, empty = room[:10], room[1:11], room[:0]
    half, half_shifted = (
        torch.zeros(100, dtype=torch.float16)[:10],
        torch.zeros(100, dtype=torch.float16)[4:14],
    )
    sums = [aligned, shifted, aligned, empty, aligned, aligned]
    others = [aligned, aligned, shifted, empty, half, half_shifted]
    assert group(sums, others) == {
        (torch.float32, True): [0],
        (torch.float32, False): [1, 2],
        (torch.float16, True): [4],
        (torch.float16, False): [5],
    }
    assert group([], []) == {}


X, WIDE, LONG = torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.zeros(5)


@pytest.mark.parametrize(
    ("sums", "others", "error", "text"),
    [
        ([X], [X, X], ValueError, "1 sums but 2 other tensors"),
        ([X], [LONG], ValueError, "tensor 0 has 5 elements and its sum 4"),
        ([X, X], [X, WIDE], TypeError, "tensor 1 is torch.float64 and its sum torch.float32"),
        ([WIDE], [X], TypeError, "tensor 0 is torch.float32 and its sum torch.float64"),
        ([X], [X.int()], TypeError, "tensor 0 is torch.int32"),
        ([X], [torch.zeros(4, device="meta")], ValueError, "tensor 0 is on meta and its sum on cpu"),
        ([torch.zeros(2, 3)], [torch.zeros(3, 2).t()], ValueError, "tensor 0 or its sum is not contiguous"),
    ],
)
def test_wrong_tensors(
    sums: list[torch.Tensor], others: list[torch.Tensor], error: type[Exception], text: str
) -> None:
    from ring_reduce.kernels.accumulate import accumulate, divide_into

    with pytest.raises(error, match=text):
        accumulate(sums, others, fresh=[True] * len(sums), scale=1.0)
    with pytest.raises(error, match=text):
        divide_into(others, sums, divisor=1.0)


def test_wrong_numbers() -> None:
    from ring_reduce.kernels.accumulate import accumulate, divide_into

    for scale in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match=f"scale is {scale}; it has to be a finite number"):
            accumulate([X], [X], fresh=[True], scale=scale)
    for divisor in (-1.0, torch.nan):
        with pytest.raises(ValueError, match=f"divisor is {divisor}; it has to be a number, 0 or more"):
            divide_into([X], [X], divisor=divisor)
    with pytest.raises(ValueError, match="1 sums but 2 fresh"):
        accumulate([X], [X], fresh=[True, False], scale=1.0)


def test_nothing_to_do() -> None:
    from ring_reduce.kernels.accumulate import accumulate, divide_into

    accumulate([], [], fresh=[], scale=1.0)
    divide_into([X[:0]], [X[:0]], divisor=1.0)
