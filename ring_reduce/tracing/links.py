"""Which push of one rank ended which wait of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .recorder import Event, RankTrace

# By wait. Of an algorithm's phases too: csrc/trace.h names them.
ANSWERS = {
    "wait posted": "post",
    "wait taken": "take",
    "wait inputs": "post inputs",
    "wait results": "post results",
}


class Links:
    """The pushes of all ranks, to be asked for by wait."""

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self._pushes = {
            (event.name, trace.rank, lane, event.number): event
            for trace, lane, event in events_of(traces, "push")
        }

    def answer(self, lane: int, wait: Event) -> Event | None:
        """The push that the wait was for; None if it was not recorded, or the wait had nothing to wait for."""
        return self._pushes.get((ANSWERS[wait.name], wait.peer, lane, wait.number))


def events_of(traces: Sequence[RankTrace], category: str) -> Iterator[tuple[RankTrace, int, Event]]:
    """Trace, lane and event of all events of a category."""
    for trace in traces:
        for lane, recorded in enumerate(trace.lanes):
            for event in recorded.events:
                if event.category == category:
                    yield trace, lane, event
