"""Tools that only some tests need: a skip that names the installing command, or a failure where skips are forbidden.

RING_REDUCE_REQUIRE_TOOLS=1    a missing tool fails the test (.ci/run sets it)
RING_REDUCE_ALLOW_MISSING=a,b  except these tools, which still skip
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

# Tools that are headers, not programs.
HEADERS = {"relacy": "relacy/relacy.hpp"}
# Tools that are Python packages.
MODULES = ("triton", "mpi4py")


def find_tool(name: str) -> str | None:
    """Where the program or package is, or the include directory of a header; None when it is not installed."""
    if name in MODULES:
        spec = importlib.util.find_spec(name)
        return None if spec is None else spec.origin
    if name not in HEADERS:
        return shutil.which(name)
    listed = [part for var in ("CPATH", "CPLUS_INCLUDE_PATH") for part in os.environ.get(var, "").split(":")]
    for directory in [*filter(None, listed), "/usr/local/include", "/usr/include"]:
        if (Path(directory) / HEADERS[name]).is_file():
            return directory
    return None


def require_tool(name: str, install_command: str) -> str:
    """Where the tool is. Without it the test is skipped, or fails if RING_REDUCE_REQUIRE_TOOLS=1."""
    found = find_tool(name)
    if found is not None:
        return found
    reason = f"{name} is not installed: {install_command}"
    allowed = os.environ.get("RING_REDUCE_ALLOW_MISSING", "").split(",")
    if os.environ.get("RING_REDUCE_REQUIRE_TOOLS") == "1" and name not in allowed:
        pytest.fail(f"{reason} (a skip is forbidden by RING_REDUCE_REQUIRE_TOOLS=1)", pytrace=False)
    pytest.skip(reason)


# What csrc/passes.cpp asks for, as the kernel names it. Read here, and not from the core: that is what is tested.
ISA_FLAGS: dict[str, set[str]] = {
    "baseline": set(),
    "avx2": {"avx2"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}


def require_isa(isa: str) -> None:
    """Skips the test where the processor has not these vectors."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split(":")[1].split()}
    if not ISA_FLAGS[isa] <= flags:
        pytest.skip(f"this processor has no {isa}")
