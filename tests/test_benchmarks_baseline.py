"""A run beside an earlier one: which rows meet, what is called slower, and which differences are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_cases import measurement, plan, report
from ring_reduce.benchmarks.baseline import BadBaseline, compare_with, differences, read_baseline, verdict
from ring_reduce.benchmarks.report import document, figures_of


def of(medians: dict[str, float]) -> tuple[dict[str, Any], Any]:
    """The document and the rows of a run."""
    made = report(measurement(1024, medians))
    figures = figures_of(plan(), made)
    return document(plan(), made, figures, 0.0), figures.rows


@pytest.mark.parametrize(
    ("now", "then", "told"),
    [
        ((110, 120), (90, 109), "slower"),
        ((80, 89), (90, 109), "faster"),
        ((100, 110), (90, 100), "same"),
        ((None, None), (90, 100), "?"),
        ((90, 100), (None, None), "?"),
    ],
)
def test_verdict_needs_intervals_that_do_not_meet(now: Any, then: Any, told: str) -> None:
    sides = [dict(zip(("time_us_low", "time_us_high"), side, strict=True)) for side in (now, then)]
    assert verdict(*sides) == told


def test_rows_meet_by_what_was_measured() -> None:
    then, _ = of({"ring sum in": 50.0, "gloo sum in": 900.0, "copy sum out": 40.0, "mpi sum in": 7.0})
    now, ours = of({"ring sum in": 100.0, "gloo sum in": 900.0, "copy sum out": 50.0, "ring sum out": 1.0})
    then["rows"][0]["time_us_low"] = None
    lines = compare_with(then, now, ours)
    figures = [line.split() for line in lines if not line.startswith("#")]
    assert figures == [
        ["ring", "1024", "float", "sum", "in", "50.00", "100.00", "2.000", "1.250", "?"],
        ["gloo", "1024", "float", "sum", "in", "900.00", "900.00", "1.000", "1.250", "same"],
    ]
    assert lines[-1] == "# 2 rows in both: 0 slower, 0 faster, 1 same, 1 ?"


def test_other_machines_and_plans_are_told_but_not_another_load() -> None:
    now, _ = of({"ring sum in": 1.0})
    then = json.loads(json.dumps(now))
    then["machine"] |= {"processor": "another", "load_at_start": 9.0}
    then["plan"] |= {"calls": 7, "sizes": [1, 2]}
    assert differences(now, then) == [
        f"# the machine differs: processor was another, is {now['machine']['processor']}",
        "# the plan differs: calls was 7, is 20",
    ]


def test_a_file_is_read_back_and_an_older_one_too(tmp_path: Path) -> None:
    written, _ = of({"ring sum in": 1.0, "copy sum out": 1.0})
    path = tmp_path / "run.json"
    path.write_text(json.dumps(written))
    assert read_baseline(path) == written
    older = json.loads(json.dumps(written))
    for row in older["rows"]:
        for name in ("time_us_low", "time_us_high", "copy_us"):
            del row[name]
    path.write_text(json.dumps(older))
    now, ours = of({"ring sum in": 1.0})
    assert (
        compare_with(read_baseline(path), now, ours)[-1]
        == "# 1 rows in both: 0 slower, 0 faster, 0 same, 1 ?"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_us", None),
        ("time_us", 0),
        ("time_us", -1.0),
        ("time_us", "1"),
        ("copy_us", 0.0),
        ("time_us_low", True),
    ],
)
def test_times_that_are_none_are_refused(name: str, value: object, tmp_path: Path) -> None:
    written, _ = of({"ring sum in": 1.0, "copy sum out": 1.0})
    written["rows"][0][name] = value
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(written))
    with pytest.raises(BadBaseline, match=rf"broken\.json.*ring has the {name} {value!r}"):
        read_baseline(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": [{}], "machine": {}, "plan": {}}', '{"rows": []}']
)
def test_other_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BadBaseline, match=r"other\.json"):
        read_baseline(path)
