"""Timelines of all ranks in Chrome's trace event format, which Perfetto and chrome://tracing open.

A process is a rank and a thread is a lane. An arrow goes from each push to the waits that it ends.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .links import Links, events_of
from .recorder import Event, RankTrace, Span, Track

# Threads of their own, above the lanes, whose numbers go up to 63; the highest is shown first.
TRACK_THREADS = {Track.CALLS: 100, Track.BUCKETS: 101, Track.STEPS: 102}

Json = dict[str, Any]


def chrome_trace(traces: Sequence[RankTrace]) -> Json:
    """The JSON object of a trace file. Microseconds since the first event; the clock needs no alignment."""
    starts = [event.start_ns for trace in traces for lane in trace.lanes for event in lane.events]
    starts += [span.start_ns for trace in traces for span in trace.spans]
    origin_ns = min(starts, default=0)
    events: list[Json] = []
    for trace in traces:
        events += _names(trace)
        for lane, recorded in enumerate(trace.lanes):
            events += (_slice(trace.rank, lane, event, origin_ns) for event in recorded.events)
        for number, span in enumerate(trace.spans):
            events += _span(trace.rank, number, span, origin_ns)
    events += _arrows(traces, origin_ns)
    dropped = {str(trace.rank): trace.dropped for trace in traces if trace.dropped}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"dropped_events_by_rank": dropped}}


def write(path: Path | str, traces: Sequence[RankTrace]) -> None:
    """Writes the trace file. ``OSError`` where it can't."""
    text = json.dumps(chrome_trace(traces), separators=(",", ":"), allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _us(time_ns: int, origin_ns: int) -> float:
    return (time_ns - origin_ns) / 1000


def _names(trace: RankTrace) -> Iterator[Json]:
    """What the viewer calls the rank and its threads, and their order."""
    threads = [
        (thread, track.value, -thread) for track, thread in TRACK_THREADS.items() if _has(trace, track)
    ]
    threads += [(lane, f"lane {lane}", lane) for lane in range(len(trace.lanes))]
    yield _metadata(trace.rank, 0, "process_name", name=f"rank {trace.rank}")
    yield _metadata(trace.rank, 0, "process_sort_index", sort_index=trace.rank)
    for thread, name, order in threads:
        yield _metadata(trace.rank, thread, "thread_name", name=name)
        yield _metadata(trace.rank, thread, "thread_sort_index", sort_index=order)


def _has(trace: RankTrace, track: Track) -> bool:
    return any(span.track is track for span in trace.spans)


def _metadata(rank: int, thread: int, kind: str, **args: Any) -> Json:
    return {"ph": "M", "pid": rank, "tid": thread, "ts": 0, "name": kind, "args": args}


def _slice(rank: int, lane: int, event: Event, origin_ns: int) -> Json:
    args: Json = {"call": event.call, "step": event.step, "segment": event.segment, "chunk": event.chunk}
    args["bytes"] = event.bytes
    if event.peer >= 0:
        args["for rank" if event.category == "wait" else "to rank"] = event.peer
    return {
        "ph": "X",
        "pid": rank,
        "tid": lane,
        "ts": _us(event.start_ns, origin_ns),
        "dur": _us(event.end_ns, event.start_ns),
        "name": event.name,
        "cat": event.category,
        "args": args,
    }


def _span(rank: int, number: int, span: Span, origin_ns: int) -> Iterator[Json]:
    common = {"pid": rank, "tid": TRACK_THREADS[span.track], "name": span.name, "cat": span.track.value}
    start, end = _us(span.start_ns, origin_ns), _us(span.end_ns, origin_ns)
    if span.track is not Track.BUCKETS:
        yield {"ph": "X", "ts": start, "dur": _us(span.end_ns, span.start_ns), **common}
        return
    # Buckets wait for one another, and slices of one thread must not overlap: these get a row each.
    identity = f"bucket {rank} {number}"
    yield {"ph": "b", "ts": start, "id": identity, **common}
    yield {"ph": "e", "ts": end, "id": identity, **common}


def _arrows(traces: Sequence[RankTrace], origin_ns: int) -> Iterator[Json]:
    """From each push to the waits that it ends. A wait whose push was not recorded has none."""
    links = Links(traces)
    numbers = itertools.count(1)
    for trace, lane, wait in events_of(traces, "wait"):
        push = links.answer(lane, wait)
        if push is None:
            continue
        common = {"cat": "answer", "name": push.name, "id": next(numbers)}
        start = _us(push.start_ns, origin_ns)
        # Within the slice, whose end belongs to the next.
        end = _us(max(wait.start_ns, wait.end_ns - 1), origin_ns)
        yield {"ph": "s", "pid": wait.peer, "tid": lane, "ts": start, **common}
        yield {"ph": "f", "bp": "e", "pid": trace.rank, "tid": lane, "ts": end, **common}
