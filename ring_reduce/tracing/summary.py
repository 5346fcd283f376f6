"""Where the time of each rank went, and who held it up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .links import Links
from .recorder import Event, RankTrace


@dataclass(frozen=True)
class RankSummary:
    """The time of one rank's lanes, added up."""

    rank: int
    calls_ns: int  # in calls, from the first event of each to its last
    seconds_by_category: dict[str, float]  # "wait", "pass", "push"
    longest_wait: Event | None
    held_up_by: (
        int | None
    )  # the rank behind the longest wait; this one, if it was slow to see that it was over

    def percent(self, category: str) -> float:
        """Of the time in calls."""
        share = self.seconds_by_category.get(category, 0.0) * 1e9
        return 100 * share / self.calls_ns if self.calls_ns else 0.0


def summarize(traces: Sequence[RankTrace]) -> list[RankSummary]:
    """One for each rank, in the order given."""
    return [_summary(trace, traces) for trace in traces]


def _summary(trace: RankTrace, traces: Sequence[RankTrace]) -> RankSummary:
    seconds: dict[str, float] = defaultdict(float)
    bounds: dict[tuple[int, int], tuple[int, int]] = {}
    longest: tuple[Event, int] | None = None
    for lane, recorded in enumerate(trace.lanes):
        for event in recorded.events:
            seconds[event.category] += event.duration_ns / 1e9
            first_ns, _ = bounds.get((lane, event.call), (event.start_ns, 0))
            bounds[lane, event.call] = first_ns, event.end_ns
            if event.category == "wait" and (longest is None or event.duration_ns > longest[0].duration_ns):
                longest = event, lane
    calls_ns = sum(end_ns - first_ns for first_ns, end_ns in bounds.values())
    if longest is None:
        return RankSummary(trace.rank, calls_ns, dict(seconds), None, None)
    wait, lane = longest
    return RankSummary(trace.rank, calls_ns, dict(seconds), wait, held_up_by(traces, trace.rank, lane, wait))


def held_up_by(traces: Sequence[RankTrace], rank: int, lane: int, wait: Event) -> int:
    """The rank behind a wait of ``rank``.

    It is the one that the wait is for; or, if that waited as well most of the time, the one behind that; or ``rank``
    itself, if what it waited for was there most of the time: it had no core to see it.
    """
    links, by_rank = Links(traces), {trace.rank: trace for trace in traces}
    for _ in traces:
        push = links.answer(lane, wait)
        ready_ns = wait.end_ns if push is None else min(push.start_ns, wait.end_ns)
        if 2 * (ready_ns - wait.start_ns) < wait.duration_ns:
            return rank
        rank = wait.peer
        if rank not in by_rank:
            return rank
        waits = [each for each in by_rank[rank].lanes[lane].events if each.category == "wait"]
        behind = max(waits, key=lambda each: _overlap_ns(each, wait.start_ns, ready_ns), default=None)
        if behind is None or 2 * _overlap_ns(behind, wait.start_ns, ready_ns) <= ready_ns - wait.start_ns:
            return rank
        wait = behind
    return rank


def _overlap_ns(event: Event, start_ns: int, end_ns: int) -> int:
    return max(0, min(event.end_ns, end_ns) - max(event.start_ns, start_ns))
