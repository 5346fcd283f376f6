"""Compares what all ranks tell of an episode with each other, and with what its fault has to lead to."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from ring_reduce.bootstrap import GRACE_S

from .faults import EXPECTED
from .outcome import Outcome, end, folder_of, is_at, store_of, told
from .plan import HARMLESS, HURRIED_S, OPERATIONS, Episode, Fault, Orders, call_of, episode_of
from .report import Report

HANG_S = 150.0  # that an episode may take; above every deadline in it
POLL_S = 0.002


class Judge:
    """Goes from episode to episode until one has problems, the time is over, or there were faults enough."""

    def __init__(self, orders: Orders, *, minutes: float, injections: int | None, detection_s: float) -> None:
        self._orders = orders
        self._seconds = 60 * minutes
        self._injections = injections
        self._detection_s = detection_s
        self._stopped = False
        self.report = Report(world=orders.world, seed=orders.seed)

    def stop(self) -> None:
        """From another thread: the ranks have failed, and nobody will tell anything more."""
        self._stopped = True

    def run(self, show: Callable[[Report], None]) -> None:
        """Judges; ``show`` is called once a minute. Ends the ranks in every case."""
        try:
            self._wait_for_all()
            number, shown = self._orders.first, 1
            while self._judge(number):
                number += 1
                if self.report.seconds >= 60 * shown:
                    shown += 1
                    show(self.report)
        finally:
            end(self._orders.folder)

    def _wait_for_all(self) -> None:
        """The time begins when all ranks have: they import torch, which can take long."""
        while not self._stopped and not all(
            is_at(self._orders.folder, self._orders.first, rank) for rank in range(self._orders.world)
        ):
            time.sleep(POLL_S)
        self.report.started_at = time.monotonic()

    def _judge(self, number: int) -> bool:
        """Whether there is to be another episode."""
        store = store_of(self._orders.folder, number)
        outcomes = self._gather(number)
        if self._stopped:
            return False
        episode = episode_of(self._orders, number)
        problems = problems_of(self._orders, episode, outcomes, self._detection_s)
        self.report.add(number, episode.fault, outcomes, problems, detection_of(episode.fault, outcomes))
        enough = self._injections is not None and self.report.injected >= self._injections
        more = not (problems or enough or self.report.seconds >= self._seconds)
        if more:
            folder_of(self._orders.folder, number + 1).mkdir()
        store.set("next", b"go" if more else b"end")
        if number >= self._orders.first + 2:  # all have heard of what came after it
            shutil.rmtree(folder_of(self._orders.folder, number - 2))
        return more

    def _gather(self, number: int) -> list[Outcome]:
        store, deadline = store_of(self._orders.folder, number), time.monotonic() + HANG_S
        found: dict[int, Outcome] = {}
        while len(found) < self._orders.world and not self._stopped:
            for rank in range(self._orders.world):
                if rank not in found and (outcome := told(store, rank)) is not None:
                    found[rank] = outcome
            if time.monotonic() > deadline:
                for rank in set(range(self._orders.world)) - set(found):
                    text = f"rank {rank} told nothing of episode {number} in {HANG_S:g} s: it hangs"
                    found[rank] = Outcome(rank, problems=[text])
            time.sleep(POLL_S)
        return [found[rank] for rank in sorted(found)]


def problems_of(
    orders: Orders, episode: Episode, outcomes: list[Outcome], detection_s: float = 1.0
) -> list[str]:
    """What was wrong, by any rank or between them."""
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    problems += _differences(orders, episode, outcomes)
    fault = episode.fault
    if fault is None or fault.kind in HARMLESS:
        return problems + [
            f"rank {each.rank} raised {each.error}, which nothing explains: {each.text}"
            for each in outcomes
            if each.error
        ]
    others = [each for each in outcomes if each.rank != fault.victim]
    for each in others:
        problems += _unexpected(fault, each)
    texts = {each.text for each in others}
    if len(texts) > 1 and fault.kind != "never":  # there each rank tells its own part of it
        problems.append(f"the ranks raise different texts: {sorted(texts)}")
    detection = detection_of(fault, outcomes)
    if detection is not None and detection > detection_s:
        problems.append(f"it took {detection:.2f} s until every rank knew, and {detection_s:g} s are allowed")
    return problems


def detection_of(fault: Fault | None, outcomes: list[Outcome]) -> float | None:
    """The longest that a rank was in a call that could not succeed: after the fault, or after the deadline.

    None where nothing has to be noticed, or was not.
    """
    if fault is None or fault.kind in HARMLESS:
        return None
    others = [each for each in outcomes if each.rank != fault.victim]
    if any(not each.error for each in others):
        return None
    # A call can't succeed from the fault on, or where it is a call that is made otherwise, from the last rank's on.
    struck_at = max(
        each.fault_at for each in outcomes if fault.kind == "mismatch" or each.rank == fault.victim
    )
    allowed = HURRIED_S if fault.kind in ("stop", "absent", "never") else 0.0
    if fault.kind == "never" and fault.victim == 0:
        allowed += GRACE_S  # the others wait for rank 0, which could know better, so much longer
    if fault.kind in ("absent", "never"):
        struck_at = max(each.fault_at for each in others)
    return max(max(0.0, each.heard_at - max(struck_at, each.fault_at) - allowed) for each in others)


def _unexpected(fault: Fault, outcome: Outcome) -> list[str]:
    error, names = EXPECTED[fault.kind]
    names = names.format(victim=fault.victim)
    blames_another = fault.kind == "stop" and outcome.text.startswith(f"rank {fault.victim}:")
    if outcome.error == error and names in outcome.text and not blames_another:
        return []
    got = f"{outcome.error}: {outcome.text}" if outcome.error else "nothing"
    return [f"rank {outcome.rank} should raise {error} that says {names!r}, and raised {got}"]


def _differences(orders: Orders, episode: Episode, outcomes: list[Outcome]) -> list[str]:
    """Calls whose results are not the same bits on all members."""
    problems = []
    for number in range(episode.calls):
        plan = call_of(orders, episode, number)
        if plan.operation not in OPERATIONS or plan.operation == "reduce_scatter":
            continue
        members = episode.rings[plan.ring].members
        found = {each.digests[number] for each in outcomes if each.rank in members and each.digests}
        if len(found) > 1:
            problems.append(f"{plan}: the ranks of {members} got different bits")
    return problems
