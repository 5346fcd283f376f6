"""The DeepSpeed peer: what it says when it can't be measured, and that its sums are right."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import FileStore

from launch import Seat, spawn
from peer_sums import check_sums
from ring_reduce.benchmarks.peers import Op, Place
from ring_reduce.benchmarks.peers import deepspeed as module
from ring_reduce.benchmarks.peers.deepspeed import DeepSpeedPeer


def _tool(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch(0o755)


def test_each_thing_that_is_missing_is_told_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(DeepSpeedPeer, "dtypes", frozenset({"float32"}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert DeepSpeedPeer.missing("cpu") == "DeepSpeed is not installed: pip install deepspeed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=name))
    assert DeepSpeedPeer.missing("cpu") == "DeepSpeed's op needs ninja: pip install ninja"
    _tool(tmp_path / "bin" / "ninja")
    assert DeepSpeedPeer.missing("cpu") == "DeepSpeed's op needs a C++ compiler: apt-get install g++"
    _tool(tmp_path / "system" / "c++")
    assert DeepSpeedPeer.missing("cpu") == f"DeepSpeed's op is not built yet: {module.BUILD}"
    built = tmp_path / "deepspeed_shm_comm"
    _tool(built / "deepspeed_shm_comm.so")
    assert DeepSpeedPeer.missing("cpu") is None
    _tool(built / "lock")
    assert str(DeepSpeedPeer.missing("cpu")).endswith(f"in that case remove {built / 'lock'}")
    monkeypatch.setattr(DeepSpeedPeer, "dtypes", frozenset())
    assert DeepSpeedPeer.missing("cpu") == "DeepSpeed's op needs a processor with AVX2"


@pytest.mark.parametrize(
    ("flags", "dtypes"),
    [("sse4_2", set()), ("avx avx2", {"float32"}), ("avx2 avx512bw", {"float32", "float16", "bfloat16"})],
)
def test_types_are_those_that_the_processor_can_reduce(
    flags: str, dtypes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : fpu {flags} bmi2\n")
    assert module._dtypes() == dtypes


def test_too_little_shared_memory_is_an_error_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    with pytest.raises(OSError, match="has 64 MB free, 4 ranks need 268"):
        module._check_room(4)


def test_the_environment_is_as_before() -> None:
    before = dict(os.environ)
    with module._environment(LOCAL_SIZE="2", PATH="/nowhere"):
        assert (os.environ["LOCAL_SIZE"], os.environ["PATH"]) == ("2", "/nowhere")
    assert dict(os.environ) == before


def _sums(seat: Seat, store: str, world: int) -> None:
    rank = seat.rank
    torch.set_num_threads(1)
    peer = DeepSpeedPeer()
    peer.setup(Place(rank, world, FileStore(store, world), 0, torch.device("cpu"), rank))
    for name in sorted(peer.dtypes):
        for op in Op:
            check_sums(peer, rank, world, getattr(torch, name), op)
    double = torch.ones(4, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):
        peer.all_reduce(double, double, Op.SUM)
    peer.close()


@pytest.mark.parametrize("world", [2, 4])
def test_its_sums_and_means_are_exact_and_nothing_stays(tmp_path: Path, world: int) -> None:
    if (reason := DeepSpeedPeer.missing("cpu")) is not None:
        pytest.skip(reason)
    spawn(world, _sums, str(tmp_path / "store"), world)
    assert not list(module.SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*"))
