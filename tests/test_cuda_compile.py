"""The schedule compiles for GPUs as it stands: nvcc, warnings as errors, and no register spills."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cuda_lint import INSTALL_NVCC, spilled_bytes
from tools import require_tool

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("tests/native/schedule_device.cu")
KERNELS = {"schedule_all_gather", "schedule_all_reduce", "schedule_reduce_scatter"}
ARCHITECTURES = ["sm_80", "sm_90"]


def compile_for(
    architecture: str, tree: Path, output: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Compiles SOURCE of `tree`; the text of ptxas is in stderr."""
    nvcc = require_tool("nvcc", INSTALL_NVCC)
    command = [nvcc, "-std=c++20", f"-arch={architecture}", "--fmad=false", "-Werror", "all-warnings"]
    command += ["-Xptxas", "-v", *options, "-cubin", "-o", str(output / "schedule.cubin"), str(tree / SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout, done.stdout + done.stderr)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_schedule_compiles_without_spills(architecture: str, tmp_path: Path) -> None:
    done = compile_for(architecture, ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert spilled_bytes(done.stderr) == dict.fromkeys(KERNELS, 0)


def test_spills_are_seen(tmp_path: Path) -> None:
    """The gate can fail: too few registers for the kernels must show as spills."""
    done = compile_for("sm_80", ROOT, tmp_path, "-maxrregcount=24")
    assert done.returncode == 0, done.stderr
    assert spilled_bytes(done.stderr).keys() == KERNELS
    assert sum(spilled_bytes(done.stderr).values()) > 0


def test_a_schedule_for_the_host_alone_is_refused(tmp_path: Path) -> None:
    """The gate can fail: without its __device__ mark run_ring must not compile into a kernel."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / SOURCE.parent).mkdir(parents=True)
    shutil.copy(ROOT / SOURCE, tmp_path / SOURCE)
    header = tmp_path / "csrc" / "ring_schedule.h"
    text = header.read_text()
    mutant = text.replace("RING_REDUCE_PORTABLE void run_ring", "void run_ring")
    assert mutant != text
    header.write_text(mutant)
    done = compile_for("sm_80", tmp_path, tmp_path)
    assert done.returncode != 0
    assert "run_ring" in done.stderr, done.stderr
