"""Where the ranks are aligned: in memory that has no name, or through the store where they can't share it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ring_reduce.benchmarks import alignment
from ring_reduce.benchmarks.alignment import Alignment, StoreBarrier, aligned
from ring_reduce.benchmarks.barrier import Barrier

WORLD, TURNS = 3, 20


def on_ranks(store: HashStore, body: Callable[[int, Alignment], None] = lambda *_: None) -> list[Alignment]:
    """What each rank, a thread, is aligned by."""
    made: dict[int, Alignment] = {}

    def run(rank: int) -> None:
        made[rank] = aligned(store, rank=rank, world=WORLD, timeout=60)
        body(rank, made[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(WORLD)]


def nobody_leaves_before_all_have_come(store: HashStore) -> list[Alignment]:
    arrived = [0] * WORLD
    early: list[tuple[int, int]] = []

    def run(rank: int, barrier: Alignment) -> None:
        for turn in range(1, TURNS + 1):
            arrived[rank] = turn
            barrier.align()
            if min(arrived) < turn:
                early.append((rank, turn))

    made = on_ranks(store, run)
    assert (early, arrived) == ([], [TURNS] * WORLD)
    return made


def test_ranks_of_a_host_share_memory() -> None:
    before = set(Path("/dev/shm").iterdir())
    assert all(isinstance(each, Barrier) for each in nobody_leaves_before_all_have_come(HashStore()))
    assert set(Path("/dev/shm").iterdir()) <= before


def test_ranks_that_cannot_open_the_memory_use_the_store_and_leave_few_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alignment, "_open", lambda store, size: None)
    store = HashStore()
    before = store.num_keys()
    made = nobody_leaves_before_all_have_come(store)
    assert all(isinstance(each, StoreBarrier) for each in made)
    assert store.num_keys() - before < TURNS
    assert all(each.hop_ns() != each.hop_ns() for each in made)  # NaN


def test_one_rank_elsewhere_is_enough_for_all_to_use_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_once(store: Any, size: int) -> Any:
        opened.append(size)
        return None if len(opened) == 1 else original(store, size)

    original = alignment._open
    monkeypatch.setattr(alignment, "_open", open_once)
    assert all(isinstance(each, StoreBarrier) for each in on_ranks(HashStore()))


def test_ranks_agree_on_whether_each_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a start that another doesn't name would wait for ever."""
    granted = iter([64.0, WORLD - 0.5, 64.0])
    monkeypatch.setattr(alignment, "granted_cores", lambda: next(granted))
    made: Any = nobody_leaves_before_all_have_come(HashStore())
    assert [barrier._oversubscribed for barrier in made] == [True] * WORLD


@pytest.mark.parametrize("kind", ["nothing", "other memory", "shorter memory"])
def test_another_processs_file_is_not_taken_for_the_memory(kind: str, tmp_path: Path) -> None:
    """In another container the same path may lead anywhere."""
    path, size = tmp_path / "memory", 4096
    if kind != "nothing":
        path.write_bytes(b"x" * (size if kind == "other memory" else 8))
    store: Any = HashStore()
    store.set("alignment memory", os.urandom(alignment.NONCE_BYTES) + str(path).encode())
    assert alignment._open(store, size) is None
