"""DeepSpeed's CPU all-reduce over shared memory (csrc/cpu/comm/shm.cpp), built and bound by DeepSpeed's own builder."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import Op, Peer, Place

if TYPE_CHECKING:
    import torch

OP_NAME = "deepspeed_shm_comm"
BUILD = f"{sys.executable} -c 'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load()'"
SHARED_MEMORY = Path("/dev/shm")
WORKSPACE_BYTES = 67 << 20  # of each rank: two halves of 32 MB and of 1 MB, and the states
MOST_BYTES = (2 << 30) - (64 << 20)  # it counts bytes in an int, 32 MB at a time


def _dtypes() -> frozenset[str]:
    """What this processor can reduce: float32 takes AVX2, 16-bit floats AVX-512BW, without which the process dies."""
    if platform.machine() != "x86_64":
        return frozenset({"float32", "float16", "bfloat16"})
    flags = set(re.findall(r"\bavx\w*", Path("/proc/cpuinfo").read_text()))
    floats16 = {"float16", "bfloat16"} if "avx512bw" in flags else set()
    return frozenset({"float32"} | floats16 if "avx2" in flags else floats16)


class DeepSpeedPeer(Peer):
    """``torch.ops.deepspeed.inference_all_reduce_``: SUM in place. A mean is a second pass, as its users do it.

    The op returns without a word, and without a sum, for types that it does not know; so this class refuses them.
    """

    name = "deepspeed"
    ops: tuple[Op, ...] = (Op.SUM, Op.MEAN)
    reduces = True
    devices = frozenset({"cpu"})
    dtypes = _dtypes()

    @staticmethod
    def missing(device: str) -> str | None:
        """DeepSpeed, what it builds its op with, or the built op: a build takes minutes, which no rank should wait."""
        spec = importlib.util.find_spec("deepspeed")
        if spec is None or spec.origin is None:
            return "DeepSpeed is not installed: pip install deepspeed"
        if shutil.which("ninja", path=_path()) is None:
            return "DeepSpeed's op needs ninja: pip install ninja"
        if shutil.which(os.environ.get("CXX", "c++")) is None:
            return "DeepSpeed's op needs a C++ compiler: apt-get install g++"
        if not DeepSpeedPeer.dtypes:
            return "DeepSpeed's op needs a processor with AVX2"
        if lock := next(_built("lock"), None):
            return f"DeepSpeed's op is being built, or a build was killed: in that case remove {lock}"
        if not any(_built(f"{OP_NAME}.so")):
            return f"DeepSpeed's op is not built yet: {BUILD}"
        return None

    def setup(self, place: Place) -> None:
        """Loads the op and maps all ranks' memory. A process can join one world only: DeepSpeed never leaves it."""
        import torch

        os.environ["PATH"] = _path()
        builder: Any = importlib.import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder()
        op: Any = builder.load()
        self._reducible = tuple(getattr(torch, name) for name in sorted(self.dtypes))
        # OpenMP's number of threads, where torch brings an OpenMP of its own and the op has another.
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(torch.get_num_threads())
        if place.rank == 0:
            _check_room(place.world)
            place.store.set("token", secrets.token_hex(8))
        token = place.store.get("token").decode()
        with _environment(LOCAL_SIZE=str(place.world), MASTER_ADDR=token, MASTER_PORT="0"):
            op.initialize(place.world, place.rank)
        # Only now has every rank mapped all, and set the state that the others wait for. Nothing may stay in /dev/shm.
        _meet(place)
        for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{token}_0_{place.rank}"):
            path.unlink()
        self._reduce, self._world = torch.ops.deepspeed.inference_all_reduce_.default, place.world

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        """Out of place is a copy, then in place. Raises ``TypeError``, ``ValueError`` for what it can't reduce."""
        if x.dtype not in self._reducible:
            raise TypeError(f"deepspeed: its op can't reduce {x.dtype} here, only {self._reducible}")
        if x.nbytes > MOST_BYTES:
            raise ValueError(f"deepspeed: its op reduces {MOST_BYTES} bytes at most, not {x.nbytes}")
        if out is not x:
            out.copy_(x)
        self._reduce(out)
        if op is Op.MEAN:
            out.div_(self._world)

    def bytes_sent(self) -> int | None:
        """DeepSpeed does not tell."""
        return None

    def close(self) -> None:
        """Nothing: DeepSpeed's memory has no name any more, and ends with the process."""


def _path() -> str:
    """PATH with the programs of this environment first, among which ninja may be."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _built(name: str) -> Iterator[Path]:
    """Files of that name where torch.utils.cpp_extension keeps the op."""
    if own := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(own).glob(f"{OP_NAME}/{name}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return (cache / "torch_extensions").glob(f"{python}*/{OP_NAME}/{name}")


def _check_room(world: int) -> None:
    """DeepSpeed itself would go on, and die of SIGBUS."""
    needed, free = world * WORKSPACE_BYTES, shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise OSError(
            f"deepspeed: {SHARED_MEMORY} has {free >> 20} MB free, {world} ranks need {needed >> 20}: enlarge it "
            "(docker run --shm-size=1g)"
        )


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _meet(place: Place) -> None:
    """Returns when all ranks are here; the store's time-out bounds it."""
    if place.store.add("initialized", 1) == place.world:
        place.store.set("all", "1")
    place.store.wait(["all"])
