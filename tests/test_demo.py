"""``ring-reduce demo``: its options, and the whole command end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from test_demo_launch import needs_sklearn


def run_demo(*options: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user does."""
    command = [sys.executable, "-m", "ring_reduce", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda"], "this version's ring runs on CPU only: use --device cpu"),
        (["--device", "tpu"], "'tpu' is none of auto, cpu, cuda"),
        (["--world", "0"], "0 is not between 1 and 16"),
        (["--world", "17"], "17 is not between 1 and 16"),
        (["--world", "two"], "'two' is not a whole number"),
        (["--epochs", "-1"], "-1 is not between 1 and 1000"),
        (["--json", "missing/folder/file.json"], "does not exist"),
        (["--plot", "."], "is a folder"),
    ],
)
def test_bad_options_get_a_clear_error(options: list[str], message: str, command: Command) -> None:
    finished = command("demo", *options)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_help_lists_the_options(command: Command) -> None:
    finished = command("demo", "--help")
    assert finished.returncode == 0
    for option in ("--world", "--device", "--epochs", "--plot", "--json"):
        assert option in finished.stdout


def test_a_missing_package_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    finished = command("demo", "--world", "1", "--epochs", "1")
    assert finished.returncode == 2
    assert "sklearn.datasets is missing: pip install '.[demo]' in ring_reduce's source" in finished.stderr


@needs_sklearn
def test_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="matplotlib is not installed: pip install '.[demo]' in ring_reduce's source"
    )
    picture, measured = tmp_path / "demo.png", tmp_path / "demo.json"
    finished = run_demo("--epochs", "1", "--json", str(measured), "--plot", str(picture))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "epoch  1 of 1" in finished.stdout
    assert "\x1b[" not in finished.stdout  # plain when piped
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    check_measured(json.loads(measured.read_text()))


def check_measured(found: dict[str, Any]) -> None:
    n = 4  # as in the README
    assert (found["world"], found["device"]) == (n, "cpu")
    assert found["ok"]
    assert 0.5 < found["test_accuracy"] <= 1
    assert 0 < found["max_relative_gradient_error"] < 1e-5
    assert len(found["gradient_errors"]) == 23  # ceil(1437 / 64)
    cases = {(case["loss"], case["normalization"]): case for case in found["cases"]}
    factors = {
        ("divided by the global batch", "SUM"): 1,
        ("divided by the global batch", "MEAN"): 1 / n,
        ("local mean", "SUM"): n,
        ("local mean", "MEAN"): 1,
    }
    assert {key: case["factor"] for key, case in cases.items()} == pytest.approx(factors, rel=1e-5)
    # Measured, and so not exact in every digit.
    assert any(case["factor"] != factors[key] for key, case in cases.items())
    assert {key for key, case in cases.items() if case["right"]} == {
        key for key, f in factors.items() if f == 1
    }

    right = {(case["loss"], case["normalization"]) for case in found["unequal_cases"] if case["right"]}
    assert right == {
        ("divided by the global batch", "SUM"),
        ("local mean", "WEIGHTED_MEAN"),
        ("local sum", "DIVIDE_BY_COUNT"),
    }
    assert found["bytes_formula"] == 2 * (n - 1) * found["gradient_bytes"] / n
    # A rank sends s and two chunks more, each less than two packs of 16 bytes off s/n.
    assert all(abs(sent - found["bytes_formula"]) <= 64 for sent in found["bytes_sent_by_rank"])
    assert found["bytes_sent"] == max(found["bytes_sent_by_rank"])
    assert sum(found["bytes_sent_by_rank"]) == n * found["bytes_formula"]
    for key in ("ring_us", "gloo_us", "sum_us", "mean_us"):
        assert found[key] > 0


@needs_sklearn
def test_a_world_of_one(tmp_path: Path, command: Command) -> None:
    measured = tmp_path / "demo.json"
    finished = command("demo", "--world", "1", "--epochs", "1", "--json", measured)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(measured.read_text())
    assert [case["right"] for case in found["cases"]] == [True] * 4
    assert (found["bytes_sent"], found["bytes_formula"]) == (0, 0)
