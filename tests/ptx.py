"""Compiles Triton kernels without a GPU, and reads what the PTX and its assembler say of them."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from typing import Any, NamedTuple


class Compiled(NamedTuple):
    ptx: str
    ptxas: str  # what it says of registers and spills


def compile_ptx(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, Any]
) -> Compiled:
    """``kernel`` with arguments of these types and constants, for an architecture: as a launch has it compiled.

    With TRITON_DUMP_PTXAS_LOG=1 the assembler tells of spills, but not where Triton's cache has the kernel already.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(compiled.asm["ptx"], log.getvalue())


def spilled_bytes(ptxas: str) -> int:
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
    assert len(found) == 1, ptxas
    return sum(map(int, found[0]))


def accesses(ptx: str) -> Counter[str]:
    """Loads and stores of global memory, each with its width."""
    return Counter(re.findall(r"\b(?:ld|st)\.global[.\w]*", ptx))


def wide_accesses(ptx: str) -> Counter[str]:
    """Loads and stores of 16 bytes."""
    return Counter(re.findall(r"\b(ld|st)\.global[.\w]*\.(?:v4\.b32|v2\.b64)\b", ptx))
