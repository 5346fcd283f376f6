"""One rank, in a process of its own: episode after episode until the judge ends it, or a fault does."""

from __future__ import annotations

import contextlib
import faulthandler
import time

import numpy as np

from ring_reduce.errors import RingError, text_of
from ring_reduce.probe import DirectoryStore
from ring_reduce.ring import Ring

from .calls import Caller
from .faults import Struck
from .outcome import Outcome, say_here, store_of, tell
from .plan import Episode, Orders, RingPlan, episode_of

STACKS_S = 100.0  # an episode that takes longer prints where it is


def serve(rank: int, orders: Orders, first: int) -> None:
    """Runs episodes from ``first`` on."""
    number, word = first, b"go"
    while word == b"go":
        store = store_of(orders.folder, number)
        say_here(store, rank)
        faulthandler.dump_traceback_later(STACKS_S)
        outcome = Outcome(rank)
        try:
            run_episode(rank, orders, episode_of(orders, number), store, outcome)
        except Exception as error:
            outcome.problems.append(f"rank {rank}: {text_of(error)}")
        faulthandler.cancel_dump_traceback_later()
        tell(store, outcome)
        word = store.get("next")
        number += 1


def run_episode(rank: int, orders: Orders, episode: Episode, store: DirectoryStore, outcome: Outcome) -> None:
    """Rings, checked calls, then the fault. Raises what no fault explains."""
    fault = episode.fault
    is_victim = fault is not None and fault.victim == rank
    if fault is not None and is_victim and fault.kind == "late":
        time.sleep(fault.after_s)
    if fault is not None and fault.kind == "never":
        if not is_victim:
            _hear_that_no_ring_is_made(rank, episode.rings[0], store, outcome)
        return
    with contextlib.ExitStack() as stack:
        rings: list[Ring | None] = []
        for index, plan in enumerate(episode.rings):
            ring = make_ring(rank, plan, f"ring {index}", store) if rank in plan.members else None
            if ring is not None:
                stack.callback(ring.close)
            rings.append(ring)
        Caller(orders, episode, rank, rings, outcome).run()
        base = rings[0]
        assert base is not None  # it has all ranks
        base.all_reduce(np.ones(1))  # all are there, so that the fault finds them in a call
        struck = Struck(base, store, outcome, episode.steady)
        if fault is not None and is_victim and fault.kind != "late":
            struck.strike(fault)
        elif fault is not None and fault.kind == "mismatch":
            struck.differ_or_not()
        else:
            struck.suffer()


def make_ring(rank: int, plan: RingPlan, name: str, store: DirectoryStore) -> Ring:
    """A member's end of a ring."""
    return Ring(
        store,
        rank=plan.members.index(rank),
        world=len(plan.members),
        name=name,
        timeout=plan.timeout,
        lanes=plan.lanes,
        algorithm=plan.algorithm,
        _tuning=plan.tuning,
    )


def _hear_that_no_ring_is_made(rank: int, plan: RingPlan, store: DirectoryStore, outcome: Outcome) -> None:
    outcome.fault_at = time.monotonic()
    try:
        make_ring(rank, plan, "ring 0", store).close()
    except RingError as error:
        outcome.heard_at = time.monotonic()
        outcome.error, outcome.text = type(error).__name__, str(error)
