"""`make gpu-check` without a GPU: whatever a step does, its findings are told, and the next one runs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
PRINTS = """print('@@{"outcome": "passed", "name": "x", "detail": ""}'); print("more", flush=True)"""


def load(name: str) -> ModuleType:
    """A module of tests/gpu."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", TESTS / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = load("check")
    monkeypatch.setattr(module, "LOGS", tmp_path)
    monkeypatch.setattr(module, "OUTPUT", tmp_path)
    return module


@pytest.mark.parametrize(
    ("code", "timeout", "counts", "said"),
    [
        (PRINTS, 60.0, (1, 0, 0), ""),
        (f"{PRINTS}; raise SystemExit(3)", 60.0, (1, 1, 0), "3\nmore"),
        ("import os; os.kill(os.getpid(), 9)", 60.0, (0, 1, 0), "-9"),
        ("pass", 60.0, (0, 1, 0), "0"),  # it found nothing, which is not what it is for
        ("import time; time.sleep(100)", 0.5, (0, 1, 0), "no end after 0 s"),
    ],
)
def test_how_a_step_may_end(
    check: Any, code: str, timeout: float, counts: tuple[int, int, int], said: str
) -> None:
    step = check.Step("step", [sys.executable, "-c", code], timeout)
    result = check.run(step, time.monotonic() + 100)
    assert tuple(result.count(outcome) for outcome in ("passed", "failed", "skipped")) == counts
    failures = [finding["detail"] for finding in result.findings if finding["outcome"] == "failed"]
    assert all(failure.startswith(said) for failure in failures)


def test_a_step_for_which_no_time_is_left_is_skipped(check: Any) -> None:
    result = check.run(check.Step("step", ["/nothing"], 60.0), time.monotonic())
    assert [finding["outcome"] for finding in result.findings] == ["skipped"]


def test_it_ends_in_counts_and_writes_what_it_found(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        check.Step(name, [sys.executable, "-c", code], 60.0) for name, code in (("a", PRINTS), ("b", "pass"))
    ]
    monkeypatch.setattr(check, "STEPS", steps)
    assert check.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"
    written = json.loads((check.OUTPUT / "gpu-check.json").read_text())
    assert written["card"] == "unknown"
    assert [step["step"] for step in written["steps"]] == ["a", "b"]
    assert check.main(["a"]) == 0


def test_every_step_is_a_program_that_the_document_explains(check: Any) -> None:
    text = (TESTS.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", text, re.MULTILINE))))
    for step in check.STEPS:
        assert Path(step.command[1]).is_file(), step
        assert step.name in explained
    assert check.BUDGET_S < 600


def test_bench_tells_of_each_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "gpu"))
    row = {
        "world": 2,
        "bytes": 1 << 20,
        "dtype": "bfloat16",
        "op": "SUM",
        "in_place": True,
        "busbw_GBps": 9.0,
    }
    load("bench").tell([{**row, "backend": "ring", "wrong": 0}, {**row, "backend": "nccl", "wrong": 7}])
    told = [json.loads(line[2:]) for line in capsys.readouterr().out.splitlines()]
    assert [(each["outcome"], each["name"].split(",")[0]) for each in told] == [
        ("figure", "ring"),
        ("figure", "nccl"),
        ("passed", "bench of ring"),
        ("failed", "bench of nccl"),
        ("skipped", "bench of symm_mem"),
    ]
