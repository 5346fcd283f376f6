"""What the ranks are aligned by: the barrier in shared memory, or the store where they don't share a host."""

from __future__ import annotations

import math
import mmap
import os
import secrets
from typing import Any, Protocol

from ring_reduce.machine import granted_cores

from .barrier import Barrier, words_needed

WORD_BYTES = 8
NONCE_BYTES = 16  # at the end of the memory: proves that a path led to this memory and no other


class Alignment(Protocol):
    """Starts the ranks of a call together."""

    def align(self) -> None:
        """Returns on all ranks at nearly the same time; raises when a rank doesn't arrive."""
        ...

    def hop_ns(self) -> float:
        """What a word takes from core to core; NaN where that isn't timed."""
        ...


class StoreBarrier:
    """For ranks of several hosts: they leave it within a round trip or two of the network, not of a cache line."""

    def __init__(self, store: Any, *, world: int) -> None:
        self._store = store
        self._world = world
        self._turn = 0

    def align(self) -> None:
        """Waits for a key that the last rank sets. Raises what the store raises when that takes too long."""
        self._turn += 1
        key = f"barrier {self._turn}"
        if self._store.add(key, 1) == self._world:
            self._store.set(f"{key} open", b"")
            # All ranks have come here, and so have left the turn before.
            self._store.delete_key(f"barrier {self._turn - 1}")
            self._store.delete_key(f"barrier {self._turn - 1} open")
        self._store.wait([f"{key} open"])

    def hop_ns(self) -> float:
        """Not timed between hosts."""
        return math.nan


def aligned(store: Any, *, rank: int, world: int, timeout: float) -> Alignment:
    """The best alignment that all ranks can have, the same kind on every rank. Collective.

    The memory has no name, so that nothing is left whatever ends a rank: the others open rank 0's descriptor through
    /proc, which the system allows to processes of the same user.
    """
    size = WORD_BYTES * words_needed(world) + NONCE_BYTES
    memory = _create(store, size) if rank == 0 else _open(store, size)
    store.set(f"alignment {rank}", "" if memory is None else str(granted_cores()))
    told = [store.get(f"alignment {peer}").decode() for peer in range(world)]
    if memory is None or not all(told):
        return StoreBarrier(store, world=world)
    words: Any = memoryview(memory)[:-NONCE_BYTES].cast("q")
    # Ranks may be granted different cores, and must agree on whether there is one for each.
    return Barrier(words, rank=rank, world=world, cores=min(map(float, told)), timeout=timeout)


def _create(store: Any, size: int) -> mmap.mmap:
    # Left open until the process ends: the others may still be about to open it.
    descriptor = os.memfd_create("ring-reduce-bench-barrier")
    os.truncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[-NONCE_BYTES:] = nonce
    store.set("alignment memory", nonce + f"/proc/{os.getpid()}/fd/{descriptor}".encode())
    return memory


def _open(store: Any, size: int) -> mmap.mmap | None:
    told: bytes = store.get("alignment memory")
    try:
        descriptor = os.open(told[NONCE_BYTES:], os.O_RDWR)
    except OSError:  # another host, or another container
        return None
    try:
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError):  # whatever has that number there
        return None
    finally:
        os.close(descriptor)
    return memory if memory[-NONCE_BYTES:] == told[:NONCE_BYTES] else None
