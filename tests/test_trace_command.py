"""``ring-reduce trace``, from the command line to the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from ring_reduce import cli
from trace_cases import slices


def in_a_new_interpreter(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ring_reduce", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)


def traced(command: Command, path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The file and what was printed."""
    done = command("trace", "--out", path, *options)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done.stdout


@pytest.mark.parametrize(("option", "new"), [("--late=1", True), ("--dtype=bfloat16", False)])
def test_calls_of_two_ranks(tmp_path: Path, command: Command, option: str, new: bool) -> None:
    path = tmp_path / "trace.json"
    options = ["--world", "2", "--size", "64K", "--calls", "2", "--normalization", "WEIGHTED_MEAN", option]
    document, printed = traced(in_a_new_interpreter if new else command, path, *options)
    assert {entry["pid"] for entry in document["traceEvents"]} == {0, 1}
    for rank in (0, 1):
        calls = slices(document, ph="X", cat="calls", pid=rank)
        assert [call["name"] for call in calls] == ["ring_reduce all_reduce 65536 B WEIGHTED_MEAN shm"] * 2
        # Neither those that warm up nor the one that aligns the ranks.
        numbers = [entry["args"]["call"] for entry in slices(document, ph="X", pid=rank, tid=0)]
        assert sorted(set(numbers)) == [5, 6]
        assert slices(document, ph="X", cat="pass", pid=rank)
    assert slices(document, ph="s")
    assert [line.split()[0] for line in printed.splitlines()[1:3]] == ["0", "1"]
    assert printed.splitlines()[-1] == f"{path}: open it at ui.perfetto.dev"


def test_a_step_of_ddp(tmp_path: Path, command: Command) -> None:
    options = ["--ddp", "--size", "64K", "--normalization", "DIVIDE_BY_COUNT"]
    document, _ = traced(command, tmp_path / "trace.json", *options)
    for rank in (0, 1):
        steps = slices(document, ph="X", cat="steps", pid=rank)
        assert [step["name"] for step in steps] == ["forward", "backward", "optimizer"]
        _, backward, _ = steps
        begins, ends = slices(document, ph="b", pid=rank), slices(document, ph="e", pid=rank)
        calls = slices(document, ph="X", cat="calls", pid=rank)
        assert len(begins) == len(ends) == len(calls) >= 2
        ends.sort(key=lambda end: end["id"])
        for index, (begin, call) in enumerate(zip(sorted(begins, key=lambda e: e["ts"]), calls, strict=True)):
            size = call["name"].split()[2]
            assert call["name"] == f"ring_reduce all_reduce {size} B DIVIDE_BY_COUNT shm"
            assert begin["name"] == f"ring_reduce bucket {index} {size} B DIVIDE_BY_COUNT"
            (end,) = [end for end in ends if end["id"] == begin["id"]]
            assert backward["ts"] <= begin["ts"] <= call["ts"]
            assert call["ts"] + call["dur"] <= end["ts"] + 0.001


def test_more_events_than_the_limit(tmp_path: Path, command: Command) -> None:
    document, printed = traced(command, tmp_path / "trace.json", "--size", "4K", "--limit", "5")
    assert set(document["otherData"]["dropped_events_by_rank"]) == {"0", "1"}
    assert "raise the limit" in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--out"),
        (["--out", "/no/such/folder/t.json"], "does not exist"),
        (["--out", "t.json", "--world", "0"], "not between 1 and 16"),
        (["--out", "t.json", "--size", "4X"], "4X"),
        (["--out", "t.json", "--dtype", "int32"], "int32"),
        (["--out", "t.json", "--normalization", "AVG"], "AVG"),
        (["--out", "t.json", "--calls", "0"], "not between 1 and 1000"),
        (["--out", "t.json", "--limit", "0"], "not between 1"),
        (["--out", "t.json", "--late", "2"], "there is no such rank among 2"),
    ],
)
def test_bad_arguments(
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(["trace", *options])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("RING_REDUCE_NVTX", "yes")
    done = command("trace", "--out", tmp_path / "t.json", "--world", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("ring-reduce trace: rank 0 failed: ValueError: RING_REDUCE_NVTX is 'yes'")
    assert list(tmp_path.iterdir()) == []
