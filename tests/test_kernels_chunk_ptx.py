"""The Triton passes over a ring's segment as PTX: wide accesses, no spills, the core's arithmetic, MEAN like SUM."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels take torch tensors: pip install torch")

import torch

from chunk_cases import FLOATS, INTEGERS, load
from ptx import Compiled, accesses, compile_ptx, spilled_bytes, wide_accesses
from tools import require_tool

KERNELS = Path(__file__).resolve().parent.parent / "kernels" / "chunk.py"
TRITON_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
}
THREADS = 128
NARROW = "narrow, or with other accesses"

Compile = Callable[..., Compiled]


@pytest.fixture(scope="module")
def compile_pass(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """``compile_pass(capability, dtype, ...)``: as launched, and once for all tests."""
    require_tool("triton", "pip install triton==3.9.0")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing can be compiled")

    @functools.cache
    def compile_once(
        capability: int,
        dtype: torch.dtype,
        *,
        scaled: bool = False,
        divided: bool = False,
        wide: bool = True,
        with_y: bool = True,
        path: Path = KERNELS,
        **options: Any,
    ) -> Compiled:
        module = load(path)
        pointers = dict.fromkeys(("out", "x", "y"), f"*{TRITON_NAMES[dtype]}")
        constants = module.variant(dtype, scaled=scaled, divided=divided, wide=wide)
        if not with_y:
            constants["y"] = None
        types = {**pointers, **dict.fromkeys(("elements", "x_scale", "y_scale", "divisor"), "i64")}
        return compile_ptx(module.combine_kernel, types, constants, capability, {**module.OPTIONS, **options})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        yield compile_once


def products_that_are_fused(ptx: str) -> list[str]:
    """But those by 1: sm_80 has no other addition of two bfloat16, to which LLVM narrows their sum in float32.

    The bits are the same. float32 has more than twice the digits, so rounding there first changes nothing.
    """
    ones = re.findall(rf"mov\.b(?:16|32)\s+(%\w+), (?:0x3F80|{0x3F803F80});", ptx)
    fused = re.findall(r"\bfma\.(\S+)\s+%\w+, %\w+, (%\w+),", ptx)
    return [kind for kind, factor in fused if kind not in ("rn.bf16", "rn.bf16x2") or factor not in ones]


def wrong(compiled: Compiled, dtype: torch.dtype, *, loads: int = 2, scaled: bool, divided: bool) -> set[str]:
    """What a pass must not be. ``loads``: of whole tensors."""
    from ring_reduce.kernels.chunk import BLOCK

    a_tensor = BLOCK * dtype.itemsize // (16 * THREADS)
    bits = 64 if dtype is torch.float64 else 32
    checks = {
        NARROW: wide_accesses(compiled.ptx) != {"ld": loads * a_tensor, "st": a_tensor},
        "spilled": spilled_bytes(compiled.ptxas) > 0 or re.search(r"\b(?:ld|st)\.local", compiled.ptx),
        "fused": products_that_are_fused(compiled.ptx),
        "inexact": re.search(r"\.ftz\b|\bdiv\.(?:full|approx)|\brcp\.", compiled.ptx),
        "divided wrongly": bool(re.search(rf"\bdiv\.rn\.f{bits}\b", compiled.ptx)) is not divided,
        "scaled wrongly": bool(re.search(rf"\bmul\.(?:rn\.)?f{bits}\b", compiled.ptx)) is not scaled,
    }
    return {name for name, is_wrong in checks.items() if is_wrong}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_sum(compile_pass: Compile, capability: int, dtype: torch.dtype) -> None:
    compiled = compile_pass(capability, dtype)
    assert f".target sm_{capability}" in compiled.ptx
    assert wrong(compiled, dtype, scaled=False, divided=False) == set()


# Without a scale the finish of MEAN and divide_by; with one that of float16, and of every type's WEIGHTED_MEAN.
FINISHES = [
    *((80, dtype, dtype is torch.float16) for dtype in FLOATS),
    *((90, dtype, scaled) for dtype in FLOATS for scaled in (False, True)),
]


@pytest.mark.parametrize(("capability", "dtype", "scaled"), FINISHES, ids=str)
def test_finish(compile_pass: Compile, capability: int, dtype: torch.dtype, scaled: bool) -> None:
    """What divides the sum costs no load and no store."""
    quotient = compile_pass(capability, dtype, scaled=scaled, divided=True)
    assert f".target sm_{capability}" in quotient.ptx
    assert wrong(quotient, dtype, scaled=scaled, divided=True) == set()
    assert accesses(quotient.ptx) == accesses(compile_pass(capability, dtype).ptx)
    if dtype.itemsize == 2:
        assert ("cvt.rn.f16" if dtype is torch.float16 else "cvt.rn.bf16") in quotient.ptx


def test_misaligned(compile_pass: Compile) -> None:
    """The same arithmetic in accesses of an element each, which any address allows."""
    dtype = torch.bfloat16
    compiled = compile_pass(80, dtype, scaled=True, divided=True, wide=False)
    assert wrong(compiled, dtype, scaled=True, divided=True) == {NARROW}
    assert set(accesses(compiled.ptx)) == {"ld.global.b16", "st.global.b16"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_copy(compile_pass: Compile, dtype: torch.dtype) -> None:
    """Of which nothing is computed."""
    compiled = compile_pass(90, dtype, with_y=False)
    assert wrong(compiled, dtype, loads=1, scaled=False, divided=False) == set()
    assert "cvt." not in re.sub(r"cvt\.[us]\d+\.[us]\d+", "", compiled.ptx)  # but those of addresses


@pytest.mark.parametrize(
    ("text", "fault", "divided", "finding"),
    [
        ("out, x, y, True, x_scale", "out, x, y, offsets < rest, x_scale", True, NARROW),
        ("multiple_of(out + begin, ALIGNMENT)", "multiple_of(out + begin, 4)", True, NARROW),
        ("by = _number(", "by = tl.load(out, mask=inside) + _number(", True, NARROW),
        ("tl.div_rn(total.to(SUM_TYPE), by)", "total / by", True, "inexact"),
        # It flushes denormals to 0, as div_rn itself did before Triton 3.6.
        ("tl.div_rn(total.to(SUM_TYPE), by)", "tl.extra.cuda.libdevice.div_rn(total, by)", True, "inexact"),
        ("tl.div_rn(total.to(SUM_TYPE), by)", "total * tl.div_rn(1.0, by)", True, "scaled wrongly"),
        ("    if DIVIDED:", "    if True:", False, "divided wrongly"),
        ("    if SCALED:\n        total", "    if True:\n        total", False, "scaled wrongly"),
    ],
)
def test_faults_are_seen(
    compile_pass: Compile, tmp_path: Path, text: str, fault: str, divided: bool, finding: str
) -> None:
    source = KERNELS.read_text()
    assert source.count(text) == 1, text
    mutant = tmp_path / "chunk.py"
    mutant.write_text(source.replace(text, fault))
    compiled = compile_pass(80, torch.float32, divided=divided, path=mutant)
    assert finding in wrong(compiled, torch.float32, scaled=False, divided=divided)


def test_fusion_is_seen(compile_pass: Compile) -> None:
    """With Triton's own options a product and the sum become one instruction."""
    fused = compile_pass(80, torch.float32, scaled=True, enable_fp_fusion=True)
    assert "fused" in wrong(fused, torch.float32, scaled=True, divided=False)


def test_spills_are_seen(compile_pass: Compile) -> None:
    """Too few registers must show."""
    spilled = compile_pass(80, torch.float64, divided=True, maxnreg=24)
    assert "spilled" in wrong(spilled, torch.float64, scaled=False, divided=True)


def test_variants_are_few(compile_pass: Compile) -> None:
    """Sizes, addresses and numbers are compiled into no variant: that would stop a training step for a second."""
    from ring_reduce.kernels.chunk import combine_kernel

    arguments = [p for p in combine_kernel.params if not p.is_constexpr]
    assert all(p.do_not_specialize for p in arguments)
    assert [p.annotation_type for p in arguments] == ["", "", "", "i64", "i64", "i64", "i64"]
