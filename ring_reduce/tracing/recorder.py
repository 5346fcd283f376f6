"""Records what one rank's ring does. All times are nanoseconds of CLOCK_MONOTONIC, which the ranks of a host share."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ring_reduce.checks import whole
from ring_reduce.ranges import end_with_future
from ring_reduce.ring import Ring

if TYPE_CHECKING:
    from ring_reduce.ranges import Ending

DEFAULT_LIMIT = 1 << 16
MOST_EVENTS = 1 << 24  # 1.2 GB a lane


class Event(NamedTuple):
    """What a lane did: a wait, a pass over a segment, or the push that tells another rank of it."""

    name: str
    category: str  # "wait", "pass" or "push"
    call: int  # number of the call, from 1
    step: int  # of the schedule; -1 if the call failed before
    chunk: int  # -1: several
    segment: int
    bytes: int  # of the segment
    peer: int  # the rank that a wait is for or a push tells; -1: none, or all
    number: int  # of what is awaited, on its link, the same for a wait and the push that ends it; negative: nothing
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


class LaneEvents(NamedTuple):
    """The events of one lane in order, and how many more there were than the limit."""

    events: list[Event]
    dropped: int


class Track(enum.Enum):
    """Where a span belongs."""

    CALLS = "calls"  # one after another
    STEPS = "steps"  # nested
    BUCKETS = "buckets"  # may overlap


class Span(NamedTuple):
    """A range with a name: a call, a bucket, or what the caller names."""

    track: Track
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded. Pickles, so that ranks can send it."""

    rank: int
    world: int
    lanes: list[LaneEvents]
    spans: list[Span]

    @property
    def dropped(self) -> int:
        """Events beyond the limit, of all lanes."""
        return sum(lane.dropped for lane in self.lanes)

    def since(self, start_ns: int) -> RankTrace:
        """Only what began at this time or later."""
        lanes = [
            LaneEvents([event for event in lane.events if event.start_ns >= start_ns], lane.dropped)
            for lane in self.lanes
        ]
        return RankTrace(
            self.rank, self.world, lanes, [span for span in self.spans if span.start_ns >= start_ns]
        )


class Recorder:
    """Records the calls of a ring on this rank while it is entered. Once; its memory is there before.

    Results are the same bits. Each event costs two looks at the clock, about 0.1 us.

    Args:
        ring: whose calls; asynchronous ones have to be waited for before the end.
        limit: events a lane that are kept, 72 bytes each; the rest is counted (``trace.dropped``).

    Raises ``RuntimeError`` on entering if another recorder records the ring.
    """

    def __init__(self, ring: Ring, *, limit: int = DEFAULT_LIMIT) -> None:
        if not 1 <= whole(limit, "limit") <= MOST_EVENTS:
            raise ValueError(f"limit={limit}: a recorder keeps 1 to {MOST_EVENTS} events a lane")
        self._ring = ring
        self._limit = limit
        self._spans: list[Span] = []
        self._trace: RankTrace | None = None

    @property
    def trace(self) -> RankTrace:
        """What was recorded. ``RuntimeError`` before the end of the ``with`` block."""
        if self._trace is None:
            raise RuntimeError("the trace is there after the recorder's with block")
        return self._trace

    def __enter__(self) -> Recorder:
        if not self._ring._engine.start_trace(self._limit):
            raise RuntimeError(f"{self._ring!r} is being recorded already; end that recorder first")
        self._ring._ranges.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ring._ranges.remove(self)
        lanes = [
            LaneEvents([_event(each) for each in lane.events()], lane.dropped)
            for lane in self._ring._engine.take_trace()
        ]
        self._trace = RankTrace(self._ring.rank, self._ring.world, lanes, self._spans)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Marks what the ``with`` block does, such as ``"forward"``."""
        return self._span(Track.STEPS, name)

    def range(self, name: str) -> AbstractContextManager[None]:
        """As a listener of ``ranges``: a call."""
        return self._span(Track.CALLS, name)

    def begin(self, name: str) -> Ending:
        """As a listener of ``ranges``: a bucket."""
        start_ns = time.monotonic_ns()
        return end_with_future(lambda: self._add(Track.BUCKETS, name, start_ns))

    @contextlib.contextmanager
    def _span(self, track: Track, name: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._add(track, name, start_ns)

    def _add(self, track: Track, name: str, start_ns: int) -> None:
        self._spans.append(Span(track, name, start_ns, time.monotonic_ns()))


def _event(event: Any) -> Event:
    return Event(*(getattr(event, field) for field in Event._fields))
