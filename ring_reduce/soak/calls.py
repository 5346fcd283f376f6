"""Checked calls: made by plan, several in flight, every element of every result compared."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from ring_reduce.arrays import ELEMENT_TYPES
from ring_reduce.ring import Ring

from .check import input_problem_of, problem_of
from .outcome import Outcome
from .plan import CallPlan, Episode, Orders, call_of
from .tensors import Placed, digest, values_in, values_of

ITEM_BYTES = {name: 2 if name.endswith("16") else 8 if name.endswith("64") else 4 for name in ELEMENT_TYPES}


@dataclass
class _Pending:
    """A call whose result is not checked yet."""

    plan: CallPlan
    place: int  # of its digest
    world: int
    member: int
    source: Placed
    target: Placed
    work: Any  # None: it is done


class Caller:
    """Makes the checked calls of one rank in one episode. Problems go into the outcome; errors of a ring raise."""

    def __init__(
        self, orders: Orders, episode: Episode, rank: int, rings: list[Ring | None], outcome: Outcome
    ) -> None:
        self._orders = orders
        self._episode = episode
        self._rank = rank
        self._rings = rings
        self._outcome = outcome
        self._pending: deque[_Pending] = deque()

    def run(self) -> None:
        """All of them, until every result is checked."""
        for number in range(self._episode.calls):
            plan = call_of(self._orders, self._episode, number)
            self._outcome.digests.append(0)
            ring = self._rings[plan.ring]
            if ring is not None:
                self._make(plan, ring)
            while len(self._pending) >= self._episode.in_flight:
                self._finish()
        while self._pending:
            self._finish()

    def _make(self, plan: CallPlan, ring: Ring) -> None:
        members = self._episode.rings[plan.ring].members
        member, world = members.index(self._rank), len(members)
        if plan.late == member:
            time.sleep(plan.late_s)
        source = Placed(plan, plan.elements)
        source.put(values_of(plan, member))
        elements = {"reduce_scatter": plan.elements // world, "all_gather": plan.elements * world}
        separate = plan.out_of_place or plan.operation != "all_reduce"
        target = Placed(plan, elements.get(plan.operation, plan.elements)) if separate else source
        work = _call(ring, plan, member, source, target if separate else None)
        self._pending.append(
            _Pending(plan, len(self._outcome.digests) - 1, world, member, source, target, work)
        )
        if member == 0:
            self._outcome.calls += 1
            self._outcome.nbytes += plan.elements * ITEM_BYTES[plan.dtype]

    def _finish(self) -> None:
        """Waits for the oldest call, and checks it."""
        call = self._pending.popleft()
        if call.work is not None:
            call.work.wait()
        got = values_in(call.target.tensor)
        problem = problem_of(call.plan, call.world, call.member, got)
        if problem is None and call.target is not call.source:
            problem = input_problem_of(call.plan, call.member, values_in(call.source.tensor))
        if problem is None and not (call.source.untouched_around() and call.target.untouched_around()):
            problem = "something beside the tensor was written"
        if problem is not None:
            self._outcome.problems.append(f"{call.plan}: rank {self._rank}: {problem}")
        if call.plan.operation != "reduce_scatter":  # of which every rank has another part
            self._outcome.digests[call.place] = digest(got)


def _call(ring: Ring, plan: CallPlan, member: int, source: Placed, target: Placed | None) -> Any:
    """The work of an asynchronous call; None once a synchronous one is done."""
    out = None if target is None else target.tensor
    options: dict[str, Any] = {"out": out, "async_op": plan.async_op}
    if plan.operation != "all_gather":
        options["normalization"] = plan.normalization
        options["count"] = None if plan.counts is None else plan.counts[member]
    result = getattr(ring, plan.operation)(source.tensor, **options)
    return result if plan.async_op else None
