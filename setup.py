"""Builds ring_reduce._core, the C++ core; everything else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ROOT = Path(__file__).parent

# Bits are part of the contract: no fused multiply-add and no fast-math on any machine. No -march either: the core
# holds its passes in several vector widths and chooses at run time, so one wheel serves every processor.
COMPILE_FLAGS = [
    "-O3",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-Wall",
    "-Wextra",
    "-Werror=switch",
    "-pthread",
]


def core_extension() -> Pybind11Extension:
    """Every source of csrc/ but the CUDA bindings, rebuilt when any header changes."""
    csrc = ROOT / "csrc"
    sources = [path for path in csrc.glob("*.cpp") if path.name != "bind_cuda.cpp"]
    return Pybind11Extension(
        "ring_reduce._core",
        sources=sorted(str(path.relative_to(ROOT)) for path in sources),
        depends=sorted(str(path.relative_to(ROOT)) for path in csrc.glob("*.h")),
        cxx_std=20,
        extra_compile_args=COMPILE_FLAGS,  # Pybind11Extension adds -fvisibility=hidden and -g0
        extra_link_args=["-pthread"],
    )


ParallelCompile("RING_REDUCE_BUILD_JOBS").install()
setup(ext_modules=[core_extension()])
