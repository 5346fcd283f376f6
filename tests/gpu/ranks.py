"""A step whose ranks are processes with a ring of a GPU: for each transport that can be tried here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from findings import attempt, failed, skipped

import ring_reduce as rr

RANKS_TIMEOUT_S = 75.0
# Ranks that share a GPU take turns of milliseconds.
RING_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Setting:
    """How ranks meet and reduce. One rank a device; two of them may be the same."""

    transport: str
    backend: str  # of the group that DDP uses, and the ring meets in
    devices: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.transport}, {self.backend}, GPU {', '.join(map(str, self.devices))}"


SETTINGS = (
    Setting("process_group", "nccl", (0,)),
    Setting("cuda_ipc", "gloo", (0, 0)),
    Setting("process_group", "nccl", (0, 1)),
    Setting("cuda_ipc", "nccl", (0, 1)),
)


def run(checks: Callable[[rr.Ring, Setting], None]) -> None:
    """Main function of a step: ``checks`` on every rank of every setting, each in a process of its own.

    ``checks`` is called with the ring and the setting, and tells its findings.
    """
    if len(sys.argv) > 1:
        _run_rank(checks, SETTINGS[int(sys.argv[1])], int(sys.argv[2]), sys.argv[3])
        return
    for index, setting in enumerate(SETTINGS):
        if max(setting.devices) < torch.cuda.device_count():
            _start_ranks(index, setting)
        else:
            skipped(str(setting), f"this machine has {torch.cuda.device_count()} GPU")


def _start_ranks(index: int, setting: Setting) -> None:
    with tempfile.TemporaryDirectory(prefix="ring-reduce-gpu-") as directory:
        command = [sys.executable, sys.argv[0], str(index)]
        where = str(Path(directory) / "store")
        ranks = [subprocess.Popen([*command, str(rank), where]) for rank in range(len(setting.devices))]
        deadline = time.monotonic() + RANKS_TIMEOUT_S
        for rank, process in enumerate(ranks):
            try:
                status: int | str = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = f"no end after {RANKS_TIMEOUT_S:.0f} s"
            if status != 0:
                failed(f"{setting}, rank {rank} ended", str(status))


def _run_rank(checks: Callable[[rr.Ring, Setting], None], setting: Setting, rank: int, where: str) -> None:
    device = setting.devices[rank]
    torch.cuda.set_device(device)
    dist.init_process_group(
        setting.backend, init_method=f"file://{where}", rank=rank, world_size=len(setting.devices)
    )
    try:
        with rr.Ring.from_group(
            device=f"cuda:{device}", transport=setting.transport, timeout=RING_TIMEOUT_S
        ) as ring:
            assert ring.transport == setting.transport
            checks(ring, setting)
    finally:
        dist.destroy_process_group()


def check(ring: rr.Ring, setting: Setting, name: str, function: Callable[[rr.Ring], str | None]) -> None:
    """``attempt`` with a name that tells the setting and the rank."""
    attempt(f"{name} ({setting}, rank {ring.rank})", lambda: function(ring))
