"""What a trace of the ring has to hold, from the table of moves in docs/architecture.md; and made-up traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ring_reduce.tracing import Event, LaneEvents, RankTrace, Span


class Expected(NamedTuple):
    """An event but for its times."""

    name: str
    category: str
    step: int
    chunk: int
    segment: int
    peer: int
    number: int


class Shape(NamedTuple):
    """Of a lane's part of a call: every step takes up to ``window`` segments through ``depth`` slots."""

    world: int
    segments: int
    window: int
    depth: int


class Link:
    """Segments that a rank has got from left and sent to right so far."""

    def __init__(self) -> None:
        self.received = self.sent = 0


def all_reduce_events(rank: int, shape: Shape, link: Link) -> list[Expected]:
    """Of a whole all_reduce."""
    return list(_events(rank, shape, range(2 * shape.world - 1), link, passes=True))


def all_gather_events(rank: int, shape: Shape, link: Link) -> list[Expected]:
    """Of an all_gather: a round of headers, then the chunks."""
    n = shape.world
    headers = shape._replace(segments=1)
    return [
        *_events(rank, headers, range(n), link, passes=False),
        *_events(rank, shape, range(n - 1, 2 * n - 1), link, passes=True),
    ]


def _events(rank: int, shape: Shape, steps: range, link: Link, *, passes: bool) -> Iterator[Expected]:
    n = shape.world
    left, right = (rank - 1) % n, (rank + 1) % n
    for start in range(0, shape.segments, shape.window):
        for k in steps:
            for segment in range(start, min(start + shape.window, shape.segments)):
                place = (k, (rank - 1 - k) % n, segment)
                if k != steps[0]:
                    yield Expected("wait posted", "wait", *place, left, link.received)
                if k != steps[-1]:
                    # Negative while slots are free that were never used.
                    yield Expected("wait taken", "wait", *place, right, link.sent - shape.depth)
                if passes:
                    name = "reduce" if k < n - 1 else "finish" if k == n - 1 else "gather"
                    yield Expected(name, "pass", *place, -1, -1)
                if k != steps[0]:
                    yield Expected("take", "push", *place, left, link.received)
                    link.received += 1
                if k != steps[-1]:
                    yield Expected("post", "push", *place, right, link.sent)
                    link.sent += 1


def direct_events(rank: int, world: int, steps: int) -> list[Expected]:
    """Of a direct all_reduce: each step reads all others' inputs of the own chunk, then their results."""
    others = [(rank + away) % world for away in range(1, world)]
    expected = [Expected("post inputs", "push", 0, -1, 0, -1, 0)]
    for step in range(steps):
        expected += [Expected("wait inputs", "wait", step, -1, step, peer, step) for peer in others]
        if step + 1 < steps:
            expected.append(Expected("post inputs", "push", step + 1, -1, step + 1, -1, step + 1))
        expected.append(Expected("reduce", "pass", step, rank, step, -1, -1))
        expected.append(Expected("post results", "push", step, rank, step, -1, step))
        expected += [Expected("wait results", "wait", step, peer, step, peer, step) for peer in others]
        expected += [Expected("gather", "pass", step, peer, step, -1, -1) for peer in others]
    return expected


def one_shot_events(rank: int, world: int, number: int) -> list[Expected]:
    """Of an all_reduce in one shot: every rank reduces all chunks."""
    others = [(rank + away) % world for away in range(1, world)]
    return [
        Expected("post inputs", "push", 0, -1, 0, -1, number),
        *(Expected("wait inputs", "wait", 0, -1, 0, peer, number) for peer in others),
        *(Expected("reduce", "pass", 0, chunk, 0, -1, -1) for chunk in range(world)),
    ]


def without_times(events: list[Event]) -> list[Expected]:
    """To be compared with what was expected."""
    return [Expected(*(getattr(event, field) for field in Expected._fields)) for event in events]


def event(
    name: str, start_us: float, end_us: float, *, peer: int = -1, number: int = -1, call: int = 1
) -> Event:
    """A made-up event of step 1."""
    category = "wait" if name.startswith("wait") else "push" if name in ("post", "take") else "pass"
    start_ns, end_ns = round(1000 * start_us), round(1000 * end_us)
    return Event(name, category, call, 1, 0, 0, 64, peer, number, start_ns, end_ns)


def trace(
    rank: int, world: int, *lanes: list[Event], spans: tuple[Span, ...] = (), dropped: int = 0
) -> RankTrace:
    """A made-up trace; ``dropped`` is of lane 0."""
    recorded = [LaneEvents(events, dropped if lane == 0 else 0) for lane, events in enumerate(lanes)]
    return RankTrace(rank, world, recorded, list(spans))


def slices(document: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    """The entries of a trace file that have these values."""
    return [
        entry
        for entry in document["traceEvents"]
        if all(entry.get(key) == value for key, value in wanted.items())
    ]
