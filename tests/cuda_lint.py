"""Reads the PTX of the ring's kernels for faults that neither a CPU nor, most days, a GPU would show."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "-O3", "--fmad=false", "-Werror", "all-warnings"]
KERNELS = 6  # one for each element type
INSTALL_NVCC = "apt-get install cuda-nvcc-13-0 cuda-cudart-dev-13-0 (from NVIDIA's CUDA repository)"

_DATA_STORE = re.compile(r"\bst\.global\.c[gs]\b")
_RELEASE = re.compile(r"\bst\.release\.sys\.global\.u64\b")
_ACQUIRE = re.compile(r"\bld\.acquire\.sys\.global\.u64\b")
_BARRIER = re.compile(r"\b(?:bar\.sync|barrier\.sync)\b")
_FORBIDDEN = {
    r"\bld\.global(?:\.\w+)*\.nc\b": "a load that the compiler may move above a wait",
    r"\b(?:ld|st)\.volatile\.global\b": "a volatile access where an acquire or release belongs",
    r"\b(?:ld|st)\.relaxed\b": "a relaxed access where an acquire or release belongs",
    r"\b(?:ld\.acquire|st\.release|atom\.acq_rel)\.(?:cta|cluster|gpu)\b": "an order that ends within the GPU",
    r"\b(?:fma|mad)\.rn\b": "a product and a sum that are rounded once",
    r"\bdiv\.(?:approx|full)\b|\brcp\b|\.ftz\b": "an approximate division, or denormals that are lost",
    r"\b(?:ld|st)\.local\b": "an array in local memory",
}


def compile_kernels(csrc: Path, nvcc: str, directory: Path) -> tuple[str, dict[str, int]]:
    """One compilation for sm_90: its PTX, and the bytes that each kernel spills."""
    command = [nvcc, *FLAGS, "-arch=sm_90", "-Xptxas", "-v", "--keep", "--keep-dir", str(directory)]
    command += ["-cubin", "-o", str(directory / "ring.cubin"), str(csrc / "cuda_ring.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (directory / "cuda_ring.ptx").read_text(), spilled_bytes(done.stdout + done.stderr)


def spilled_bytes(ptxas: str) -> dict[str, int]:
    """Of each function that ``ptxas -v`` reports: stack frame, spill stores and spill loads together."""
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    found = re.findall(rf"Function properties for (\w+)\s+{sizes}", ptxas)
    return {name: sum(map(int, numbers)) for name, *numbers in found}


def kernels(ptx: str) -> dict[str, list[str]]:
    """The instructions of each kernel, in the order of the text."""
    parts = re.split(r"^\s*(?:\.(?:visible|weak)\s+)?\.entry\s+(\w+)", ptx, flags=re.MULTILINE)
    return {name: body.splitlines() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def faults(ptx: str) -> list[str]:
    """What is wrong, a line each."""
    found = []
    bodies = kernels(ptx)
    if len(bodies) != KERNELS:
        found.append(f"{len(bodies)} kernels and not {KERNELS}")
    for name, lines in bodies.items():
        text = "\n".join(lines)
        found += [f"{name}: {what}" for pattern, what in _FORBIDDEN.items() if re.search(pattern, text)]
        found += [f"{name}: {what}" for what in _publishing(lines) + _wide(text)]
    return found


def _publishing(lines: list[str]) -> list[str]:
    """A release for posted, one for taken, and a barrier on every path between them and a store of data."""
    found = []
    if sum(bool(_RELEASE.search(line)) for line in lines) < 6:
        found.append(
            "too few release stores: posted, taken, a call's start and end, a failure, and that all stop"
        )
    if sum(bool(_ACQUIRE.search(line)) for line in lines) < 4:
        found.append("too few acquire loads: two waits poll, and look whether a rank has failed")
    if sum(bool(_BARRIER.search(line)) for line in lines) < 4:
        found.append(
            "too few barriers: at the start, behind the waits of a move, at its end, behind a failure's NaN"
        )
    return found + _unfenced_releases(lines)


def _unfenced_releases(lines: list[str]) -> list[str]:
    """Follows every path: after a store of data no release may come before a barrier."""
    blocks, after = _control_flow(lines)
    dirty = [False] * len(blocks)  # whether a path brings stores of data to the start of the block
    unfenced: set[int] = set()
    work = list(range(len(blocks)))
    while work:
        number = work.pop()
        stored = dirty[number]
        for i in blocks[number]:
            if _BARRIER.search(lines[i]):
                stored = False
            elif _DATA_STORE.search(lines[i]):
                stored = True
            elif stored and _RELEASE.search(lines[i]):
                unfenced.add(i)
        for target in after[number]:
            if stored and not dirty[target]:
                dirty[target] = True
                work.append(target)
    return [f"no barrier between a store of data and the release in line {i}" for i in sorted(unfenced)]


def _control_flow(lines: list[str]) -> tuple[list[range], list[list[int]]]:
    """Basic blocks as ranges of lines, and those that may follow each."""
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"\s*(\$\w+):", line))}
    jumps = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)|\bbrx\.idx|\bret\b|\bexit\b|\btrap\b")
    starts = sorted({0, *labels.values(), *(i + 1 for i, line in enumerate(lines) if jumps.search(line))})
    blocks = [range(begin, end) for begin, end in pairwise([*starts, len(lines)])]
    block_at = {block.start: number for number, block in enumerate(blocks)}
    tables = re.findall(r"(\$\w+):\s*\.branchtargets\s+([^;]+);", "\n".join(lines))
    targets_of = {name: re.findall(r"\$\w+", text) for name, text in tables}
    after: list[list[int]] = []
    for number, block in enumerate(blocks):
        last = lines[block[-1]] if len(block) else ""
        jump = jumps.search(last)
        targets = [jump.group(1)] if jump and jump.group(1) else []
        if "brx.idx" in last:
            targets = [name for table, names in targets_of.items() if table in last for name in names]
        falls_through = jump is None or last.strip().startswith("@")
        following = [block_at[labels[target]] for target in targets]
        after.append(following + ([number + 1] if falls_through and number + 1 < len(blocks) else []))
    return blocks, after


def _wide(text: str) -> list[str]:
    """Slots and aligned tensors in 16 bytes an access."""
    counts = {
        "loads of slots": len(re.findall(r"\bld\.global\.cg\.v4\.[bu]32", text)),
        "loads of tensors": len(re.findall(r"\bld\.global\.cs\.v4\.[bu]32", text)),
        "stores of slots": len(re.findall(r"\bst\.global\.cg\.v4\.[bu]32", text)),
        "stores of tensors": len(re.findall(r"\bst\.global\.cs\.v4\.[bu]32", text)),
    }
    return [f"only {count} {what} of 16 bytes" for what, count in counts.items() if count < 8]


def check_this_tree() -> str:
    """For `make gpu-check`: as test_cuda_lint does, with this machine's nvcc."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    with tempfile.TemporaryDirectory() as directory:
        ptx, spills = compile_kernels(ROOT / "csrc", nvcc, Path(directory))
    found = faults(ptx)
    assert not found, "\n".join(found)
    assert len(spills) == KERNELS, spills
    assert not any(spills.values()), spills
    return f"{KERNELS} kernels"
