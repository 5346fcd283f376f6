"""The trace file and the summary, from made-up traces: numbers that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ring_reduce.tracing import RankTrace, Span, Track, chrome_trace, held_up_by, summarize, write
from ring_reduce.tracing.command import format_summary
from trace_cases import event, slices, trace


def two_ranks() -> list[RankTrace]:
    """Rank 1 waits from 2 to 5 us for what rank 0 posts at 4."""
    return [
        trace(
            0,
            2,
            [event("reduce", 1, 4), event("post", 4, 4.5, peer=1, number=7)],
            spans=(
                Span(Track.CALLS, "call", 1000, 6000),
                Span(Track.BUCKETS, "one", 1000, 5000),
                Span(Track.BUCKETS, "two", 2000, 6000),
            ),
        ),
        trace(1, 2, [event("wait posted", 2, 5, peer=0, number=7), event("gather", 5, 6)]),
    ]


def test_slices_have_what_the_format_asks_for() -> None:
    document = chrome_trace(two_ranks())
    assert document["otherData"] == {"dropped_events_by_rank": {}}
    required = {"X": {"dur"}, "M": {"args"}, "s": {"id"}, "f": {"id", "bp"}, "b": {"id"}, "e": {"id"}}
    assert {entry["ph"] for entry in document["traceEvents"]} == required.keys()
    for entry in document["traceEvents"]:
        assert {"ph", "pid", "tid", "ts", "name"} | required[entry["ph"]] <= entry.keys()
        assert entry["ts"] >= 0
    (wait,) = slices(document, ph="X", name="wait posted")
    assert wait == {
        "ph": "X",
        "pid": 1,
        "tid": 0,
        "ts": 1.0,
        "dur": 3.0,
        "name": "wait posted",
        "cat": "wait",
        "args": {"call": 1, "step": 1, "segment": 0, "chunk": 0, "bytes": 64, "for rank": 0},
    }
    (post,) = slices(document, ph="X", name="post")
    assert post["args"]["to rank"] == 1
    (reduce,) = slices(document, ph="X", name="reduce")
    assert reduce["args"].keys() == {"call", "step", "segment", "chunk", "bytes"}


def test_ranks_and_lanes_have_names() -> None:
    document = chrome_trace([trace(3, 4, [], [event("reduce", 1, 2)])])
    assert [(e["pid"], e["args"]["name"]) for e in slices(document, name="process_name")] == [(3, "rank 3")]
    names = {e["tid"]: e["args"]["name"] for e in slices(document, name="thread_name")}
    assert names == {0: "lane 0", 1: "lane 1"}
    named = {
        e["tid"]: e["args"]["name"] for e in slices(chrome_trace(two_ranks()), name="thread_name", pid=0)
    }
    assert sorted(named.values()) == ["buckets", "calls", "lane 0"]
    (call,) = slices(chrome_trace(two_ranks()), ph="X", name="call")
    assert named[call["tid"]] == "calls"


def test_buckets_may_overlap() -> None:
    document = chrome_trace(two_ranks())
    begins, ends = slices(document, ph="b"), slices(document, ph="e")
    assert [(e["name"], e["ts"]) for e in begins] == [("one", 0.0), ("two", 1.0)]
    assert [(e["name"], e["ts"]) for e in ends] == [("one", 4.0), ("two", 5.0)]
    assert [e["id"] for e in begins] == [e["id"] for e in ends]
    assert len({e["id"] for e in begins}) == 2


def test_an_arrow_goes_from_the_push_to_its_wait() -> None:
    document = chrome_trace(two_ranks())
    (start,), (end,) = slices(document, ph="s"), slices(document, ph="f")
    assert (start["pid"], start["ts"]) == (0, 3.0)
    # A nanosecond before the end of the wait, so that it is in it.
    assert (end["pid"], end["ts"], end["bp"]) == (1, 3.999, "e")
    for key in ("id", "name", "cat"):
        assert start[key] == end[key]


@pytest.mark.parametrize(
    "wait",
    [
        event("wait posted", 2, 5, peer=0, number=8),  # another segment
        event("wait posted", 2, 5, peer=1, number=7),  # of another rank
        event("wait taken", 2, 5, peer=0, number=7),  # for another push
        event("wait taken", 2, 5, peer=0, number=-1),  # for nothing
    ],
)
def test_no_arrow_without_its_push(wait: object) -> None:
    first, _ = two_ranks()
    second = trace(1, 2, [wait])  # type: ignore[list-item]
    assert slices(chrome_trace([first, second]), ph="s") == []


def test_arrows_stay_in_their_lane() -> None:
    first = trace(0, 2, [event("post", 1, 2, peer=1, number=0)], [event("post", 3, 4, peer=1, number=0)])
    second = trace(
        1,
        2,
        [event("wait posted", 1, 3, peer=0, number=0)],
        [event("wait posted", 1, 5, peer=0, number=0)],
    )
    document = chrome_trace([first, second])
    assert [(e["tid"], e["ts"]) for e in slices(document, ph="s")] == [(0, 0.0), (1, 2.0)]
    assert [(e["tid"], e["ts"]) for e in slices(document, ph="f")] == [(0, 1.999), (1, 3.999)]


def test_a_file_is_json_and_says_what_was_dropped(tmp_path: Path) -> None:
    traces = [*two_ranks(), trace(2, 3, [event("reduce", 0.5, 1)], dropped=12)]
    write(tmp_path / "trace.json", traces)
    document = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert document == json.loads(json.dumps(chrome_trace(traces)))
    assert document["otherData"] == {"dropped_events_by_rank": {"2": 12}}
    assert "rank 2: 12 later events did not fit; raise the limit" in format_summary(traces)
    assert "did not fit" not in format_summary(two_ranks())


def test_no_events_are_a_file_too() -> None:
    assert [e["ph"] for e in chrome_trace([trace(0, 1, [])])["traceEvents"]] == ["M"] * 4


def test_the_summary_adds_up() -> None:
    lane = [
        event("wait posted", 0, 6, peer=1, number=0),
        event("reduce", 6, 8),
        event("post", 8, 9, peer=1, number=0),
        event("wait posted", 20, 21, peer=1, number=1, call=2),
        event("reduce", 21, 30, call=2),
    ]
    other = [event("reduce", 0, 1)]
    (summary,) = summarize([trace(0, 2, lane, other)])
    assert summary.calls_ns == 9000 + 10000 + 1000
    assert summary.percent("wait") == pytest.approx(100 * 7 / 20)
    assert summary.percent("pass") == pytest.approx(100 * 12 / 20)
    assert summary.percent("push") == pytest.approx(100 * 1 / 20)
    assert summary.longest_wait == lane[0]
    assert summary.held_up_by == 1
    assert format_summary([trace(0, 2, lane, other)]).splitlines()[1] == (
        "   0    0.02 ms    35.0%   60.0%     5.0%  6.0 us for rank 1 (call 1, step 1, segment 0)"
    )


@pytest.mark.parametrize(("microseconds", "blamed"), [(1, False), (2, True)])
def test_a_look_at_what_had_arrived_blames_no_core(microseconds: int, blamed: bool) -> None:
    first = trace(0, 2, [event("wait posted", 9, 9 + microseconds, peer=1, number=0)])
    second = trace(1, 2, [event("post", 1, 2, peer=0, number=0)])
    line = format_summary([first, second]).splitlines()[1]
    assert ("no core was free here" in line) is blamed
    assert f"{microseconds}.0 us for rank 1" in line


def test_the_summary_of_nothing() -> None:
    (summary,) = summarize([trace(0, 1, [])])
    assert (summary.percent("wait"), summary.longest_wait, summary.held_up_by) == (0.0, None, None)
    assert format_summary([trace(0, 1, [])]).splitlines()[1].endswith("-")


def chain() -> list[RankTrace]:
    """0 waits for 2, which waits for 1, which computes until 9 us."""
    return [
        trace(0, 3, [event("wait posted", 1, 11, peer=2, number=0)]),
        trace(1, 3, [event("reduce", 0, 9), event("post", 9, 9.5, peer=2, number=0)]),
        trace(
            2,
            3,
            [event("wait posted", 2, 10, peer=1, number=0), event("post", 10, 10.5, peer=0, number=0)],
        ),
    ]


def test_a_wait_is_followed_to_the_rank_behind_it() -> None:
    traces = chain()
    assert held_up_by(traces, 0, 0, traces[0].lanes[0].events[0]) == 1
    assert held_up_by(traces, 2, 0, traces[2].lanes[0].events[0]) == 1
    assert [summary.held_up_by for summary in summarize(traces)] == [1, None, 1]
    text = format_summary(traces).splitlines()
    assert text[1].endswith("10.0 us for rank 2 (call 1, step 1, segment 0), held up by rank 1")
    assert text[3].endswith("8.0 us for rank 1 (call 1, step 1, segment 0)")


def test_a_neighbour_that_waited_for_less_than_half_is_the_cause() -> None:
    first, second, _ = chain()
    busy = trace(
        2, 3, [event("wait posted", 8, 10, peer=1, number=0), event("post", 10, 11, peer=0, number=0)]
    )
    assert held_up_by([first, second, busy], 0, 0, first.lanes[0].events[0]) == 2


def test_a_rank_that_sleeps_on_holds_itself_up() -> None:
    """What it waited for was there at 4 us, and it went on at 20."""
    first = trace(0, 2, [event("wait posted", 2, 20, peer=1, number=0)])
    second = trace(1, 2, [event("reduce", 0, 4), event("post", 4, 5, peer=0, number=0)])
    assert held_up_by([first, second], 0, 0, first.lanes[0].events[0]) == 0
    assert format_summary([first, second]).splitlines()[1].endswith("no core was free here")


def test_a_circle_of_waits_ends() -> None:
    traces = [
        trace(0, 2, [event("wait posted", 0, 10, peer=1, number=0)]),
        trace(1, 2, [event("wait posted", 0, 10, peer=0, number=0)]),
    ]
    assert held_up_by(traces, 0, 0, traces[0].lanes[0].events[0]) in (0, 1)
