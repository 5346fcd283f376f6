"""The recorder: which events, in which order and when, and that it changes nothing."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught
from ring_reduce.tracing import RankTrace, Recorder, Track, held_up_by
from trace_cases import (
    Link,
    Shape,
    all_gather_events,
    all_reduce_events,
    direct_events,
    one_shot_events,
    without_times,
)

SEGMENT_BYTES = 256
DEPTH, WINDOW = 4, 2
LANE_BYTES = 256 << 10  # of a chunk: from there on a call has lanes


def ring_of(seat: Seat, *, lanes: int = 1, segment_bytes: int = SEGMENT_BYTES) -> rr.Ring:
    """A ring with several segments in little data."""
    return seat.ring(algorithm="ring", lanes=lanes, segment_bytes=segment_bytes, depth=DEPTH, window=WINDOW)


def elements_of(world: int, segments: int) -> int:
    """Float32 elements whose chunks are of so many segments each."""
    return world * segments * SEGMENT_BYTES // 4


def record_all_reduces(seat: Seat, segments: int, calls: int) -> RankTrace:
    with ring_of(seat) as ring, Recorder(ring) as recorder:
        for _ in range(calls):
            ring.all_reduce(np.ones(elements_of(seat.world, segments), np.float32))
    return recorder.trace


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_event_of_an_all_reduce_in_order(run: Run, world: int) -> None:
    segments, calls = 5, 2
    for rank, trace in enumerate(run(world, record_all_reduces, segments, calls)):
        (lane,) = trace.lanes
        shape, link = Shape(world, segments, WINDOW, DEPTH), Link()
        expected = [each for _ in range(calls) for each in all_reduce_events(rank, shape, link)]
        assert len(expected) == calls * segments * (10 * world - 9)
        assert without_times(lane.events) == expected
        assert [event.call for event in lane.events] == sorted(event.call for event in lane.events)
        assert {event.call for event in lane.events} == {1, 2}
        assert {event.bytes for event in lane.events} == {SEGMENT_BYTES}
        assert trace.dropped == 0


def record_all_gather(seat: Seat, segments: int) -> RankTrace:
    with ring_of(seat) as ring, Recorder(ring) as recorder:
        ring.all_gather(np.ones(segments * SEGMENT_BYTES // 4, np.float32))
    return recorder.trace


def test_an_all_gather_sends_headers_before(run: Run) -> None:
    for rank, trace in enumerate(run(3, record_all_gather, 3)):
        expected = all_gather_events(rank, Shape(3, 3, WINDOW, DEPTH), Link())
        assert without_times(trace.lanes[0].events) == expected


def record_direct(seat: Seat, steps: int) -> RankTrace:
    part_bytes = SEGMENT_BYTES
    ring = seat.ring(algorithm="direct", lanes=1, part_bytes=part_bytes, one_shot_bytes=part_bytes)
    with ring, Recorder(ring) as recorder:
        ring.all_reduce(np.ones(seat.world * steps * part_bytes // 4, np.float32))
        ring.all_reduce(np.ones(4 * seat.world, np.float32))
    return recorder.trace


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_event_of_a_direct_all_reduce_in_order(run: Run, world: int) -> None:
    steps = 3
    for rank, trace in enumerate(run(world, record_direct, steps)):
        expected = direct_events(rank, world, steps) + one_shot_events(rank, world, steps)
        assert without_times(trace.lanes[0].events) == expected


def record_lanes(seat: Seat) -> RankTrace:
    x = np.ones(seat.world * 2 * LANE_BYTES // 4, np.float32)
    with ring_of(seat, lanes=2, segment_bytes=16 << 10) as ring, Recorder(ring) as recorder:
        ring.all_reduce(x)
        ring.all_reduce(x[:100])
    return recorder.trace


def test_events_are_inside_their_call_and_do_not_overlap(run: Run) -> None:
    for trace in run(2, record_lanes):
        assert len(trace.lanes) == 2
        calls = [span for span in trace.spans if span.track is Track.CALLS]
        assert [span.name for span in calls] == [
            "ring_reduce all_reduce 1048576 B SUM shm",
            "ring_reduce all_reduce 400 B SUM shm",
        ]
        for lane in trace.lanes:
            before = 0
            for event in lane.events:
                call = calls[event.call - 1]
                assert call.start_ns <= event.start_ns <= event.end_ns <= call.end_ns
                assert before <= event.start_ns
                before = event.end_ns
        # The second call is too small for two lanes.
        assert [{event.call for event in lane.events} for lane in trace.lanes] == [{1, 2}, {1}]


DELAYS_S = (0.02, 0.1, 0.5, 2.0)


def record_late(seat: Seat, late: int) -> list[tuple[RankTrace, int]]:
    """A call for each delay, and when this rank began it."""
    found = []
    with ring_of(seat) as ring:
        for delay_s in DELAYS_S:
            seat.meet(f"before {delay_s}")
            with Recorder(ring) as recorder:
                if seat.rank == late:
                    time.sleep(delay_s)
                start_ns = time.monotonic_ns()
                ring.all_reduce(np.ones(4, np.float32))
            found.append((recorder.trace, start_ns))
    return found


def test_a_wait_names_the_late_rank(run: Run) -> None:
    """On a loaded machine others may be later than the late rank, or slow to see that it came: not at every delay."""
    late, world = 1, 3
    blamed = []
    for attempt in zip(*run(world, record_late, late), strict=True):
        traces = [trace for trace, _ in attempt]
        _, late_start_ns = attempt[late]
        causes = []
        for rank in (0, 2):
            waits = [event for event in traces[rank].lanes[0].events if event.category == "wait"]
            longest = max(waits, key=lambda event: event.duration_ns)
            first = next(event for event in waits if event.name == "wait posted")
            assert first.peer == (rank - 1) % world
            # What the late rank sends comes to all, at the latest with its second segment.
            assert max(event.end_ns for event in waits) > late_start_ns
            if longest.start_ns < late_start_ns < longest.end_ns:
                causes.append((longest.peer, held_up_by(traces, rank, 0, longest)))
        blamed.append(causes)
    assert [(2, late), (late, late)] in blamed


def reduce_beside_recorder(seat: Seat) -> list[Any]:
    x = np.random.default_rng(seat.rank).standard_normal(elements_of(seat.world, 5)).astype(np.float32)
    with ring_of(seat) as ring:
        before = ring.all_reduce(x.copy(), rr.MEAN)
        with Recorder(ring) as recorder:
            during = ring.all_reduce(x.copy(), rr.MEAN)
        after = ring.all_reduce(x.copy(), rr.MEAN)
        with Recorder(ring) as nothing:
            pass
        with Recorder(ring) as again:
            ring.all_reduce(x.copy())
    return [before, during, after, recorder.trace, nothing.trace, again.trace]


def test_only_what_is_asked_for_is_recorded_and_the_bits_are_the_same(run: Run) -> None:
    for before, during, after, recorded, nothing, again in run(2, reduce_beside_recorder):
        assert before.tobytes() == during.tobytes() == after.tobytes()
        assert {event.call for event in recorded.lanes[0].events} == {2}
        assert len(recorded.spans) == 1
        assert nothing.lanes[0].events == []
        assert nothing.spans == []
        assert {event.call for event in again.lanes[0].events} == {4}


def record_too_much(seat: Seat, limit: int) -> tuple[RankTrace, RankTrace]:
    with ring_of(seat) as ring:
        with Recorder(ring, limit=limit) as recorder:
            ring.all_reduce(np.ones(elements_of(seat.world, 3), np.float32))
        with Recorder(ring) as whole:
            ring.all_reduce(np.ones(elements_of(seat.world, 3), np.float32))
    return recorder.trace, whole.trace


@pytest.mark.parametrize("limit", [1, 7])
def test_events_beyond_the_limit_are_counted(run: Run, limit: int) -> None:
    for rank, (trace, whole) in enumerate(run(2, record_too_much, limit)):
        expected = all_reduce_events(rank, Shape(2, 3, WINDOW, DEPTH), Link())
        assert without_times(trace.lanes[0].events) == expected[:limit]
        assert trace.dropped == len(expected) - limit
        assert whole.dropped == 0


def record_aborted(seat: Seat) -> tuple[RankTrace, str]:
    ring = ring_of(seat)
    with Recorder(ring) as recorder:
        ring.all_reduce(np.ones(4, np.float32))
        if seat.rank == 1:
            ring.abort("enough")
        error = caught(lambda: ring.all_reduce(np.ones(4, np.float32)))
    return recorder.trace, str(error)


def test_a_call_that_fails_leaves_its_last_wait(run: Run) -> None:
    (trace, error), _ = run(2, record_aborted)
    assert "enough" in error
    last = trace.lanes[0].events[-1]
    assert all(event.end_ns >= event.start_ns > 0 for event in trace.lanes[0].events)
    # Rank 0 may have been told before it began.
    assert (last.call, last.step) == (1, 2) or (last.name, last.call, last.step) == ("wait posted", 2, -1)


def test_one_recorder_at_a_time() -> None:
    with rr.Ring(rank=0, world=1) as ring:
        with Recorder(ring) as first:
            with pytest.raises(RuntimeError, match="recorded already"), Recorder(ring):
                pass
            ring.all_reduce(np.ones(4))
            with pytest.raises(RuntimeError, match="after the recorder's with block"):
                _ = first.trace
        assert len(first.trace.spans) == 1
        assert len(first.trace.lanes[0].events) == 1
        with Recorder(ring):  # it has ended
            pass


@pytest.mark.parametrize("limit", [0, -1, 1 << 25])
def test_a_limit_has_bounds(limit: int) -> None:
    with rr.Ring(rank=0, world=1) as ring, pytest.raises(ValueError, match=f"limit={limit}"):
        Recorder(ring, limit=limit)


def test_spans_are_steps_and_close_by_an_error() -> None:
    with rr.Ring(rank=0, world=1) as ring, Recorder(ring) as recorder:
        with recorder.span("outer"), pytest.raises(KeyError), recorder.span("inner"):
            raise KeyError
        ring.all_reduce(np.ones(4))
    assert [(span.track, span.name) for span in recorder.trace.spans[:2]] == [
        (Track.STEPS, "inner"),
        (Track.STEPS, "outer"),
    ]
    inner, outer, call = recorder.trace.spans
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns <= call.start_ns
    late = recorder.trace.since(call.start_ns)
    assert late.spans == [call]
    assert late.lanes == recorder.trace.lanes
    assert recorder.trace.since(call.end_ns + 1).lanes[0].events == []
