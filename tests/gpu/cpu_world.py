"""The CPU ring as the reference: its ranks as threads of this process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

import ring_reduce as rr
from ring_reduce.normalization import Normalization
from ring_reduce.probe import DirectoryStore


class CpuWorld:
    """``world`` CPU ranks; a context manager."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._directory = tempfile.TemporaryDirectory(prefix="ring-reduce-gpu-")
        store = DirectoryStore(Path(self._directory.name), timeout=60)
        self._pool = ThreadPoolExecutor(world)
        self._rings = list(
            self._pool.map(
                lambda rank: rr.Ring(store, rank=rank, world=world, timeout=60, lanes=1, algorithm="ring"),
                range(world),
            )
        )

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], normalization: Normalization, counts: Sequence[float] | None
    ) -> torch.Tensor:
        """The result, which all ranks have; the tensors, on the CPU, stay as they are."""

        def one(rank: int) -> torch.Tensor:
            out = torch.empty_like(tensors[rank])
            count = None if counts is None else counts[rank]
            self._rings[rank].all_reduce(tensors[rank], normalization, out=out, count=count)
            return out

        return next(iter(list(self._pool.map(one, range(self.world)))))

    def __enter__(self) -> CpuWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        list(self._pool.map(lambda ring: ring.close(), self._rings))
        self._pool.shutdown()
        self._directory.cleanup()
