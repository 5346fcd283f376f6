"""``ring_reduce._cuda`` over the fake CUDA runtime of tests/native/fake_cuda.h, in ranks that are processes.

What is built are the host's own sources, without a change, linked with the fake in place of libcudart.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import os
import runpy
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pybind11
import torch

import programs
import reference
import ring_reduce as rr
from cases import Case
from cuda_lint import INSTALL_NVCC
from launch import Seat
from ring_reduce.arrays import ELEMENT_TYPES
from ring_reduce.bootstrap import Member
from ring_reduce.call import ALL_REDUCE
from ring_reduce.cuda_ipc import CudaIpcEngine, IpcTuning, open_cuda_ipc
from tools import require_tool

_OTHERS = ("call.cpp", "process.cpp", "shared_memory.cpp")
_FAKE = ("fake_cuda_devices.cpp", "fake_cuda_memory.cpp", "fake_cuda_streams.cpp", "fake_cuda_ring.cpp")

# Small enough that a few thousand elements fill every slot many times over.
SMALL = IpcTuning(segment_bytes=128, depth=3, window=2)


def header_options() -> list[str]:
    """Where CUDA's headers are, as setup.py finds them."""
    nvcc = require_tool("nvcc", INSTALL_NVCC)
    directories = runpy.run_path(str(programs.ROOT / "setup.py"))["include_directories"](Path(nvcc))
    return [f"-isystem{path}" for path in directories]


def build(csrc: Path, directory: Path) -> Path:
    """The module, made of ``csrc``, which may be a copy with a fault."""
    options = ["-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", *header_options()]
    options += [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    hosts = [csrc / "bind_cuda.cpp", *sorted(csrc.glob("cuda_*.cpp")), *(csrc / name for name in _OTHERS)]
    sources = [*hosts, *(programs.NATIVE / name for name in _FAKE)]
    objects = programs.compile_objects(sources, csrc, directory, *options)
    return programs.link(objects, directory / "_cuda.so", "-shared")


@functools.cache
def built() -> Path:
    """The module as it is, built once a session."""
    directory = Path(tempfile.mkdtemp(prefix="ring_reduce-fake_cuda-"))
    atexit.register(shutil.rmtree, directory, True)
    return build(programs.CSRC, directory)


def load(module: Path) -> ctypes.CDLL:
    """Makes it ``ring_reduce._cuda`` of this process; returns its runtime, for what the fake itself has."""
    loaded = sys.modules.get("ring_reduce._cuda")
    if getattr(loaded, "__file__", None) != str(module):
        spec = importlib.util.spec_from_file_location("ring_reduce._cuda", module)
        assert spec is not None
        assert spec.loader is not None
        extension: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
        sys.modules["ring_reduce._cuda"] = extension
        rr._cuda = extension
    return ctypes.CDLL(str(module))


@dataclass
class Gpu:
    """What a rank's job has of the fake: its streams, and what it holds."""

    seat: Seat
    runtime: ctypes.CDLL
    directory: Path
    current: int = 0  # the stream
    kept: list[torch.Tensor] = field(
        default_factory=list
    )  # a call may still run when nobody else has its tensors

    def stream(self) -> int:
        """A new one."""
        handle = ctypes.c_void_p()
        self.runtime.cudaStreamCreate(ctypes.byref(handle))
        assert handle.value is not None
        return handle.value

    def synchronize(self) -> None:
        """Waits for all streams."""
        assert self.runtime.cudaDeviceSynchronize() == 0

    def wait_for(self, sign: str, seconds: float = 20.0) -> None:
        """Until the ledger has it, or for so long."""
        deadline = time.monotonic() + seconds
        while not any(sign in line for line in ledger(self.directory)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def held(self) -> int:
        """Allocations, mappings and so on that were not given back."""
        return int(self.runtime.fake_cuda_held())

    def capture(self, number: int) -> None:
        """The current stream is captured, in the capture of that number; 0: no more."""
        self.runtime.fake_cuda_capture(ctypes.c_void_p(self.current), ctypes.c_ulonglong(number))

    def replay(self, number: int) -> None:
        """Enqueues what was captured in that capture on the current stream."""
        self.runtime.fake_cuda_replay(ctypes.c_void_p(self.current), ctypes.c_ulonglong(number))

    def open(
        self, name: str = "ring", *, timeout: float = 20.0, device: int = 0, tuning: IpcTuning = SMALL
    ) -> CudaIpcEngine:
        """This rank's end of a new ring."""
        member = Member(self.seat.rank, self.seat.world, name)
        return open_cuda_ipc(member, self.seat.store, timeout, 2, torch.device("cuda", device), tuning)


@contextlib.contextmanager
def gpu(seat: Seat, module: Path, **environment: str) -> Iterator[Gpu]:
    """A rank's GPU for a job. Leaves nothing of the fake's in the process."""
    directory = seat.directory / f"gpu{seat.job}"
    directory.mkdir(exist_ok=True)
    settings = {"FAKE_CUDA_DIR": str(directory), "FAKE_CUDA_FAULTS": "", **environment}
    with mock.patch.dict(os.environ, settings):
        mine = Gpu(seat, load(module), directory)

        def current_stream(device: object) -> SimpleNamespace:
            return SimpleNamespace(cuda_stream=mine.current)

        # What an engine asks of torch's CUDA, which is not there.
        with (
            mock.patch.object(torch.cuda, "current_stream", current_stream),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        ):
            yield mine


def violations(directory: Path) -> list[str]:
    """What should not have happened, of all ranks."""
    return [line for line in ledger(directory) if " violation" in line]


def ledger(directory: Path) -> list[str]:
    """What the ranks did."""
    path = directory / "ledger"
    return path.read_text().splitlines() if path.exists() else []


class _Addresses:
    """The part of ``arrays.Library`` that an engine asks for: the fake's kernels reach the host's own memory."""

    def address(self, x: torch.Tensor) -> int:
        return x.data_ptr()


def call_on(
    x: torch.Tensor,
    out: torch.Tensor,
    normalization: rr.Normalization,
    count: Any = 1.0,
    operation: int = ALL_REDUCE,
) -> Any:
    """What an engine reads of a :class:`ring_reduce.call.Call`, of what stands for device tensors."""
    return SimpleNamespace(
        operation=operation,
        element_type=ELEMENT_TYPES[str(x.dtype).removeprefix("torch.")],
        normalization=normalization,
        count=count,
        input=x,
        output=out,
        elements=max(x.numel(), out.numel()),
        arrays=_Addresses(),
    )


def to_device(values: np.ndarray, case: Case) -> torch.Tensor:
    """A tensor of the case's type; exact."""
    return torch.from_numpy(values).to(getattr(torch, case.type))


def start(engine: CudaIpcEngine, gpu: Gpu, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueues a case's call; what it reads and what it writes, which is poisoned."""
    rank = gpu.seat.rank
    x = to_device(case.input(rank), case)
    out = torch.full_like(x, 77) if case.out_of_place else x
    count = case.counts[rank] if case.counts is not None else 1.0
    gpu.kept += [x, out]
    engine.run(call_on(x, out, case.normalization, count), False)
    return x, out


def values(out: torch.Tensor, case: Case) -> np.ndarray:
    """In the type that is computed in."""
    array: np.ndarray = out.to(getattr(torch, np.dtype(case.element.compute).name)).numpy()
    return array


def difference(out: torch.Tensor, case: Case, world: int) -> str:
    """How a result differs from the reference, or an empty text."""
    got, expected = values(out, case), case.expected(world)
    if reference.same_bits(got, expected):
        return ""
    return f"{case}: {reference.first_difference(got, expected)}"
