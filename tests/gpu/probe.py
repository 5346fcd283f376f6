"""What this machine has."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess

from findings import failed, passed, skipped

PACKAGES = ("torch", "triton", "numpy", "cupy", "cupy-cuda13x", "pybind11", "setuptools", "pip")


def output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
    card = output("nvidia-smi", query, "--format=csv,noheader")
    if card:
        passed("card", card)
    else:
        failed("card", "nvidia-smi shows no GPU")
    nvcc = output(os.environ.get("NVCC", "nvcc"), "--version").splitlines()
    if nvcc:
        passed("nvcc", nvcc[-1])
    else:
        failed("nvcc", "there is no nvcc on PATH")
    for package in PACKAGES:
        try:
            passed(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            skipped(package, "is not installed")
    for tool in ("compute-sanitizer", "cuobjdump"):
        where = shutil.which(tool)
        if where:
            passed(tool, where)
        else:
            skipped(tool, "is not on PATH")


if __name__ == "__main__":
    main()
