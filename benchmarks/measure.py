"""Interleaved timing of all contenders on all ranks of this host.

The method:

- One run measures all contenders. In every round each of them gets a burst of calls, in an order that is drawn anew for
  every round (alike on all ranks), so that drift of the machine and traces in the caches hit all alike.
- All ranks make the same calls, their number a function of the size alone.
- Before each call the ranks are aligned (barrier.py). The timed part is the user's call and nothing else. A call takes
  what its slowest rank takes.
- Every call gets another buffer and another input, made outside of the timed part (buffers.py).
- The first call of a burst of small tensors is not counted: it pays for the eviction that the contender before caused.
- One warm-up round; the results of two calls of each contender are checked, element by element.
- With a core for every rank, each rank's calling thread is moved to a core of its own before every burst, and is free
  to move again at once. Some schedulers leave two spinning ranks on one core for a second, which would measure the
  scheduler; ranks bound for good would have to share their core with their helper threads, which Gloo has more of.
- torch runs one thread a rank: its threads would compete with the other ranks for the cores.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, TCPStore
from torch.multiprocessing.spawn import spawn

from .barrier import Barrier, words_needed
from .buffers import RotatedBuffers
from .peers import PEERS, Op, Peer, Place
from .summary import Times, slowest_rank

TRAFFIC_BYTES = 2 << 30  # a contender's calls at one size, together, before the limits below
MOST_CALLS, LEAST_CALLS = 1600, 40
CHECKED_CALLS = 2


@dataclass(frozen=True)
class Plan:
    """What to measure. ``calls`` overrides how often; ``rotate_bytes`` should exceed the last-level cache."""

    world: int
    sizes: tuple[int, ...]
    dtype: str = "float32"
    peers: tuple[str, ...] = ("ring", "gloo", "copy")
    calls: int | None = None
    rotate_bytes: int = 64 << 20
    spread: bool = True

    def repeats(self, nbytes: int) -> tuple[int, int]:
        """(rounds, counted calls a round) of every contender at a size: a function of the size alone."""
        calls = self.calls or min(MOST_CALLS, max(LEAST_CALLS, TRAFFIC_BYTES // max(1, nbytes)))
        burst = 16 if nbytes <= 256 << 10 else 4 if nbytes <= 4 << 20 else 1
        burst = min(burst, calls)
        return -(-calls // burst), burst


@dataclass(frozen=True)
class Contender:
    """A peer with an operation."""

    peer: Peer
    op: Op

    @property
    def label(self) -> str:
        """The contender's key in measurements: ``ring SUM``."""
        return f"{self.peer.name} {self.op.value}"


@dataclass(frozen=True)
class Measurement:
    """All contenders at one size: times by label, wrong elements (None for a peer that doesn't reduce), and the time of
    a hop between cores in each round (barrier.py)."""

    nbytes: int
    times: dict[str, Times]
    wrong: dict[str, int | None]
    hops_ns: Times


def measure(plan: Plan, progress: Callable[[str], None] | None = None) -> list[Measurement]:
    """Starts the ranks as processes, runs the plan, and returns a measurement for each size.

    ``progress`` is called in rank 0's process and must therefore pickle.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = multiprocessing.get_context("spawn").RawArray("q", words_needed(plan.world))
    with tempfile.TemporaryDirectory(prefix="ring-reduce-bench-") as folder:
        arguments = (plan, words, store.port, Path(folder), progress)
        spawn(_run_rank, arguments, nprocs=plan.world)
        return [_gather(plan, nbytes, Path(folder)) for nbytes in plan.sizes]


def _gather(plan: Plan, nbytes: int, folder: Path) -> Measurement:
    ranks = [np.load(_result_path(folder, rank, nbytes)) for rank in range(plan.world)]
    labels = [str(label) for label in ranks[0]["labels"]]
    times = slowest_rank(np.stack([rank["times"] for rank in ranks]))
    wrong = np.stack([rank["wrong"] for rank in ranks])
    return Measurement(
        nbytes,
        dict(zip(labels, times, strict=True)),
        {label: None if (w := wrong[:, i]).min() < 0 else int(w.sum()) for i, label in enumerate(labels)},
        ranks[0]["hops_ns"],
    )


def _result_path(folder: Path, rank: int, nbytes: int) -> Path:
    return folder / f"rank{rank}-{nbytes}.npz"


def _run_rank(
    rank: int, plan: Plan, words: Any, port: int, folder: Path, progress: Callable[[str], None] | None
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    peers = [PEERS[name]() for name in plan.peers]
    for peer in peers:
        peer.setup(Place(rank, plan.world, PrefixStore(peer.name, store), plan.rotate_bytes))
    contenders = [Contender(peer, op) for peer in peers for op in peer.ops]
    barrier = Barrier(words, rank=rank, world=plan.world)
    for nbytes in plan.sizes:
        if rank == 0 and progress is not None:
            progress(f"{nbytes} bytes: {', '.join(contender.label for contender in contenders)}")
        np.savez(_result_path(folder, rank, nbytes), **_Timing(plan, nbytes, rank, barrier, contenders).run())
    # A peer may end its process group without waiting for others that still use it.
    barrier.align()
    for peer in reversed(peers):
        peer.close()


class _Timing:
    """One rank's part in measuring all contenders at one size."""

    def __init__(
        self, plan: Plan, nbytes: int, rank: int, barrier: Barrier, contenders: list[Contender]
    ) -> None:
        dtype = getattr(torch, plan.dtype)
        self._nbytes = nbytes
        self._rounds, self._burst = plan.repeats(nbytes)
        self._barrier = barrier
        self._contenders = contenders
        self._cores = sorted(os.sched_getaffinity(0))
        self._core = self._cores[rank] if plan.spread and plan.world <= len(self._cores) else None
        self._buffers = RotatedBuffers(
            rank=rank,
            world=plan.world,
            count=nbytes // dtype.itemsize,
            dtype=dtype,
            rotate_bytes=plan.rotate_bytes,
        )

    def run(self) -> dict[str, Any]:
        """Microseconds by (contender, round, call), and wrong elements by contender, -1 where it doesn't reduce."""
        hops_ns = np.zeros(self._rounds)
        times = np.zeros((len(self._contenders), self._rounds, self._burst))
        wrong = np.array([self._count_wrong(contender) for contender in self._contenders], dtype=np.int64)
        # The collector would run in the timed part of whichever contender allocates most.
        gc.collect()
        gc.disable()
        try:
            for turn in range(-1, self._rounds):  # -1: the warm-up
                hops_ns[max(turn, 0)] = self._barrier.hop_ns()
                order = list(range(len(self._contenders)))
                random.Random(self._nbytes * 1_000_003 + turn).shuffle(order)
                for index in order:
                    self._run_burst(self._contenders[index], times[index, max(turn, 0)])
        finally:
            gc.enable()
        labels = [contender.label for contender in self._contenders]
        return {"labels": labels, "times": times, "wrong": wrong, "hops_ns": hops_ns}

    def _run_burst(self, contender: Contender, row: Times) -> None:
        """Fills ``row`` with the times of its calls, in microseconds."""
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})
            os.sched_setaffinity(0, self._cores)
        if self._burst > 1:
            self._call(contender)
        for call in range(self._burst):
            row[call] = self._call(contender) / 1e3

    def _call(self, contender: Contender) -> int:
        """Nanoseconds of one aligned call; the buffer gets its next input after them."""
        x = self._buffers.take()
        all_reduce, op = contender.peer.all_reduce, contender.op
        self._barrier.align()
        start_ns = time.perf_counter_ns()
        all_reduce(x, op)
        elapsed_ns = time.perf_counter_ns() - start_ns
        self._buffers.refill()
        return elapsed_ns

    def _count_wrong(self, contender: Contender) -> int:
        wrong = 0
        for _ in range(CHECKED_CALLS):
            contender.peer.all_reduce(self._buffers.take(), contender.op)
            wrong += self._buffers.wrong(contender.op)
            self._buffers.refill()
        return wrong if contender.peer.reduces else -1
