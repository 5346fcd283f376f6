"""The benchmark's command: its options and exit status, and tiny runs through all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ring_reduce.benchmarks import compare as cli
from ring_reduce.benchmarks.measure import Plan, measure
from ring_reduce.benchmarks.report import MB, RATIOS
from test_benchmarks_report import ROW_KEYS, measurement


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("16K", 16384), ("64m", 64 * MB), ("1G", 1 << 30)]
)
def test_sizes_are_parsed_and_printed(text: str, nbytes: int) -> None:
    assert cli.parse_size(text) == nbytes
    assert cli.parse_size(cli.size_text(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sizes", "0"),
        ("--sizes", "1X"),
        ("--sizes", "1K,1024"),
        ("--peers", "nickel"),
        ("--world", "0"),
        ("--calls", "0"),
    ],
)
def test_bad_arguments_end_with_a_usage_error(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([option, value])
    message = capsys.readouterr().err.splitlines()[-1]
    assert option in message
    assert value in message


@pytest.mark.parametrize(("wrong", "status"), [(0, 0), (5, 1)])
def test_wrong_results_are_shown_and_set_the_exit_status(
    wrong: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measurement(1024, ring_SUM=1.0)
    found.wrong["ring SUM"] = wrong
    monkeypatch.setattr(cli, "measure", lambda plan, progress: [found])
    assert cli.main(["--sizes", "1K"]) == status
    assert ("WRONG RESULTS: ring SUM at 1K: 5 elements" in capsys.readouterr().out) is bool(wrong)


def test_a_tiny_run_measures_all_contenders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--world", "2", "--sizes", "64,4K", "--calls", "3", "--rotate", "16K", "--json", str(file)]
    assert cli.main(arguments) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert set(found) == {"machine", "plan", "rows", "comparisons"}
    assert all(set(row) == ROW_KEYS for row in found["rows"])
    seen = {(row["bytes"], row["backend"], row["op"]): row for row in found["rows"]}
    contenders = {("ring", "SUM"), ("ring", "MEAN"), ("gloo", "SUM"), ("copy", "SUM")}
    assert set(seen) == {(nbytes, *contender) for nbytes in (64, 4096) for contender in contenders}
    assert all(0 < row["time_us_min"] <= row["time_us"] <= row["time_us_p99"] for row in found["rows"])
    assert all(row["wrong"] == (None if row["backend"] == "copy" else 0) for row in found["rows"])
    assert all(set(size["ratios"]) == set(RATIOS) for size in found["comparisons"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("world 2, float32, in place")
    assert [line.split()[0] for line in lines[2:]] == ["64", "4K"]


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types_give_exact_results(dtype: str) -> None:
    found = measure(Plan(world=3, sizes=(1040,), dtype=dtype, peers=("ring",), calls=2, rotate_bytes=4096))
    assert found[0].wrong == {"ring SUM": 0, "ring MEAN": 0}


def test_a_rank_that_fails_ends_the_run() -> None:
    """The other ranks must not be waited for; here both fail, for want of the peer."""
    with pytest.raises(Exception, match="no-such-peer"):
        measure(Plan(world=2, sizes=(64,), peers=("no-such-peer",), calls=1))
