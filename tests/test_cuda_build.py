"""When setup.py builds ring_reduce._cuda, and what it then says on a machine without a GPU."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import builds
from cuda_lint import INSTALL_NVCC
from programs import ROOT
from tools import require_tool


@pytest.fixture(scope="module")
def setup_py() -> dict[str, Any]:
    """The names of setup.py, which as a module builds nothing."""
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.mark.parametrize(
    ("wanted", "has_nvcc", "has_gpu", "reason"),
    [
        ("", True, True, None),
        ("", True, False, "no GPU is visible; RING_REDUCE_CUDA=1 builds it all the same"),
        ("", False, True, "there is no nvcc"),
        ("", False, False, "there is no nvcc"),
        ("1", True, True, None),
        ("1", True, False, None),
        ("0", True, True, "RING_REDUCE_CUDA=0"),
        ("0", False, False, "RING_REDUCE_CUDA=0"),
    ],
)
def test_choice(
    setup_py: dict[str, Any], wanted: str, has_nvcc: bool, has_gpu: bool, reason: str | None
) -> None:
    """What is not asked for costs an install no compiler's time where there is no GPU."""
    choose = setup_py["why_no_cuda_extension"]
    assert choose(wanted, has_nvcc=has_nvcc, has_gpu=has_gpu) == reason


@pytest.mark.parametrize(("wanted", "text"), [("1", "there is no nvcc"), ("yes", "RING_REDUCE_CUDA=yes")])
def test_a_choice_that_cannot_be_had(setup_py: dict[str, Any], wanted: str, text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        setup_py["why_no_cuda_extension"](wanted, has_nvcc=False, has_gpu=True)


def choose_extensions(setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch, wanted: str) -> list[Any]:
    """The extensions on a machine with a compiler and a GPU."""
    functions = setup_py["extensions"].__globals__
    monkeypatch.setenv("RING_REDUCE_CUDA", wanted)
    monkeypatch.setitem(functions, "find_nvcc", lambda: Path("/bin/true"))
    monkeypatch.setitem(functions, "gpu_is_visible", lambda: True)
    found: list[Any] = functions["extensions"]()
    return found


def test_what_was_not_asked_for_may_fail(setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Setuptools warns of an optional extension that does not compile, and goes on."""
    core, tried = choose_extensions(setup_py, monkeypatch, "")
    assert not core.optional
    assert tried.optional
    _, asked = choose_extensions(setup_py, monkeypatch, "1")
    assert not asked.optional
    assert len(choose_extensions(setup_py, monkeypatch, "0")) == 1


def test_the_core_holds_no_cuda(setup_py: dict[str, Any]) -> None:
    core = setup_py["core_extension"]()
    assert not [path for path in [*core.sources, *core.depends] if "cuda" in path]


# Builds _cuda alone, then asks it. The module is loaded by its path: beside it lies no package.
BUILD = """
import runpy, sys
from pathlib import Path
from setuptools import setup
names = runpy.run_path("setup.py")
directory = sys.argv[2]
setup(
    name="ring-reduce",
    ext_modules=[names["cuda_extension"](Path(sys.argv[1]))],
    cmdclass={"build_ext": names["BuildExtensions"]},
    script_args=["-q", "build_ext", "--build-lib", directory, "--build-temp", directory + "/temp"],
)
"""
ASK = """
import importlib.util, sys
import ring_reduce
spec = importlib.util.spec_from_file_location("ring_reduce._cuda", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
ring_reduce._cuda = sys.modules["ring_reduce._cuda"] = module
from ring_reduce import cuda
print(cuda.why_unavailable())
try:
    cuda.VirtualRing(2)
except ring_reduce.RingError as error:
    print(error)
"""


def build_cuda(nvcc: str, directory: Path) -> None:
    build = [sys.executable, "-c", BUILD, nvcc, str(directory)]
    environment = {**os.environ, "RING_REDUCE_CUDA_ARCH": "90"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_builds_and_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """It loads without a driver. Where there is a GPU it is hidden."""
    nvcc = require_tool("nvcc", INSTALL_NVCC)
    built = builds.once("_cuda", "built", tmp_path, lambda directory: build_cuda(nvcc, directory))
    builds.stop_ahead()
    (module,) = (built / "ring_reduce").glob("_cuda*.so")
    ask = [sys.executable, "-c", ASK, str(module)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(ask, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reason, error = done.stdout.splitlines()
    assert reason in (
        "there is no NVIDIA driver on this machine",
        "the NVIDIA driver sees no GPU; is CUDA_VISIBLE_DEVICES set?",
    )
    assert error == f"no ring on a GPU: {reason}"
