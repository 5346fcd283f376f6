"""Time a byte of types and sizes that are measured in the same rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_cases import measurement, plan, report
from conftest import Command
from ring_reduce.benchmarks.cost import costs
from ring_reduce.benchmarks.plan import Case
from ring_reduce.benchmarks.report import figures_of
from ring_reduce.benchmarks.table import table


def test_all_types_and_sizes_are_one_group_together_and_one_each_otherwise() -> None:
    asked = {"sizes": (1024, 4096), "dtypes": ("float32", "float16")}
    cases = [Case(dtype, nbytes) for dtype in ("float32", "float16") for nbytes in (1024, 4096)]
    assert plan(**asked, together=True).groups() == [cases]
    assert plan(**asked).groups() == [[case] for case in cases]


def test_together_every_size_has_the_rounds_of_the_largest() -> None:
    both = plan(sizes=(1024, 64 << 20), calls=None, together=True)
    assert both.repeats(1024) == both.repeats(64 << 20) == plan(calls=None).repeats(64 << 20)
    assert both.repeats(1024) != plan(calls=None).repeats(1024)


def test_time_a_byte_is_over_the_first_type_and_over_the_least_size() -> None:
    together = plan(sizes=(1000, 4000), dtypes=("float32", "float16"), together=True)
    measured = [
        measurement(1000, {"ring sum in": 10.0, "copy sum out": 5.0}),
        measurement(4000, {"ring sum in": 44.0, "copy sum out": 20.0}),
        measurement(1000, {"ring sum in": 12.0}, dtype="float16"),
        measurement(4000, {"ring sum in": 60.0}, dtype="float16"),
    ]
    found = {
        (cost.backend, cost.dtype, cost.bytes): [
            None if ratio is None else pytest.approx(ratio.value)
            for ratio in (cost.over_first_type, cost.over_least_size)
        ]
        for cost in costs(together, measured)
    }
    assert found == {
        ("ring", "float32", 1000): [None, None],
        ("ring", "float32", 4000): [None, 1.1],
        ("ring", "float16", 1000): [1.2, None],
        ("ring", "float16", 4000): [60 / 44, 1.25],
        ("copy", "float32", 1000): [None, None],
        ("copy", "float32", 4000): [None, 1.0],
    }


def test_what_the_first_type_does_not_have_is_over_nothing() -> None:
    together = plan(sizes=(1000,), dtypes=("int32", "float32", "float16"), together=True)
    measured = [
        measurement(1000, {"ring sum in": 10.0}, dtype="int32"),
        measurement(1000, {"ring sum in": 11.0, "ring avg in": 20.0}),
        measurement(1000, {"ring sum in": 12.0, "ring avg in": 30.0}, dtype="float16"),
    ]
    over = {(cost.op, cost.dtype): cost.over_first_type for cost in costs(together, measured)}
    assert over["MEAN", "float32"] is over["MEAN", "float16"] is None
    assert over["SUM", "float16"] is not None
    assert over["SUM", "float16"].value == pytest.approx(1.2)


def test_the_table_shows_it_only_where_it_was_measured_together() -> None:
    measured = report(measurement(1000, {"ring sum in": 10.0}), measurement(4000, {"ring sum in": 44.0}))
    for together in (False, True):
        asked = plan(sizes=(1000, 4000), backends=("ring",), together=together)
        lines = table(asked, figures_of(asked, measured))
        assert any("Time a byte" in line for line in lines) is together
        assert any("1.1 [1.1, 1.1]" in line for line in lines) is together


def test_a_run_of_types_and_sizes_together(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["-b", "1K", "-e", "4K", "-f", "4", "-d", "float,bfloat16", "-n", "10", "--rotate", "16K"]
    done = command("bench", *options, "--backend", "ring", "--together", "--json", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(file.read_text())
    assert document["plan"]["together"] is True
    assert all(not row["wrong"] for row in document["rows"])
    ring = [cost for cost in document["time_a_byte"] if cost["backend"] == "ring" and cost["in_place"]]
    assert [(cost["dtype"], cost["bytes"]) for cost in ring] == [
        (dtype, nbytes) for dtype in ("float32", "bfloat16") for nbytes in (1024, 4096)
    ]
    known = [(cost["over_first_type"] is not None, cost["over_least_size"] is not None) for cost in ring]
    assert known == [(False, False), (False, True), (True, False), (True, True)]
