"""``ring-reduce demo``: the names of factors, the launcher's failures, and the whole command end to end."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from ring_reduce.benchmarks.summary import Ratio
from ring_reduce.demo import data, launch, report
from ring_reduce.demo.factors import Case, Loss, name_factor, predict_factor
from ring_reduce.demo.results import Duel, Result, Timings, Traffic, Training


def run_demo(*options: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user does."""
    command = [sys.executable, "-m", "ring_reduce", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


# The names of factors


@pytest.mark.parametrize(
    ("factor", "symbol", "words"),
    [
        (1.0, "1", "right"),
        (1 / 4, "1/n", "1/n: divided twice"),
        (4.0, "n", "n: never divided"),
        (96.0, "B", "B: never divided"),
        (1 / 96, "1/B", "1/B: divided twice"),
        (24.0, "B/n", "B/n: divided by n, not by B"),
        (1 / 24, "n/B", "n/B: divided by B, not by n"),
        (3.0, None, "a factor of 3, which is no product of n and B"),
    ],
)
def test_factor_is_named(factor: float, symbol: str | None, words: str) -> None:
    verdict = name_factor(factor * (1 + 1e-6), 1e-6, world=4, global_batch=96)
    assert (verdict.right, verdict.symbol, str(verdict)) == (symbol == "1", symbol, words)


def test_a_factor_that_is_nearly_one_is_not_right() -> None:
    assert not name_factor(1.01, 0.0, world=4, global_batch=96).right


@pytest.mark.parametrize("residual", [0.02, math.nan])
def test_no_factor_fits_a_gradient_of_another_direction(residual: float) -> None:
    verdict = name_factor(1.0, residual, world=4, global_batch=96)
    assert not verdict.right
    assert "weighted wrongly" in str(verdict)


def test_all_products_that_match_are_named() -> None:
    assert name_factor(4.0, 0.0, world=4, global_batch=4).symbol == "B = n"
    assert name_factor(4.0, 0.0, world=4, global_batch=16).symbol == "n = B/n"


def test_a_world_of_one_has_no_factor_n() -> None:
    assert name_factor(1.0, 0.0, world=1, global_batch=8).right
    assert name_factor(1 / 8, 0.0, world=1, global_batch=8).symbol == "1/B"


@pytest.mark.parametrize(
    "normalization", [rr.SUM, rr.MEAN, rr.divide_by(40), rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN], ids=repr
)
@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("counts", [(10, 10, 10, 10), (4, 8, 12, 16), (40,)], ids=str)
def test_prediction_agrees_with_arithmetic(
    counts: Sequence[int], loss: Loss, normalization: rr.Normalization
) -> None:
    """The prediction against an all-reduce written out in NumPy on random per-example gradients."""
    examples = [np.random.default_rng(rank).normal(size=(count, 50)) for rank, count in enumerate(counts)]
    batch = sum(counts)
    local = [each.sum(axis=0) / loss.divisor(len(each), batch) for each in examples]
    total = sum(c * x for c, x in zip(counts, local, strict=True))
    plain = sum(local)
    reduced = {
        rr.SUM: plain,
        rr.MEAN: plain / len(counts),
        rr.divide_by(40): plain / 40,
        rr.DIVIDE_BY_COUNT: plain / batch,
        rr.WEIGHTED_MEAN: total / batch,
    }[normalization]
    reference = np.concatenate(examples).mean(axis=0)
    factor = reduced.dot(reference) / reference.dot(reference)
    residual = np.linalg.norm(reduced - factor * reference) / np.linalg.norm(reduced)

    predicted = predict_factor(loss, normalization, counts)
    if residual > 1e-9:
        assert predicted is None
    else:
        assert predicted == pytest.approx(factor)


def test_even_counts_cover_the_batch() -> None:
    assert data.even_counts(64, 4) == [16, 16, 16, 16]
    assert data.even_counts(29, 4) == [8, 7, 7, 7]
    batch = np.arange(29)
    parts = [data.split_batch(batch, [8, 7, 7, 7], rank) for rank in range(4)]
    assert np.concatenate(parts).tolist() == batch.tolist()


# What fails the demo


def make_case(loss: Loss, normalization: rr.Normalization, factor: float, residual: float = 0.0) -> Case:
    counts = (16, 16)
    verdict = name_factor(factor, residual, world=2, global_batch=32)
    predicted = predict_factor(loss, normalization, counts)
    return Case(loss, repr(normalization), counts, factor, residual, predicted, verdict)


def make_result() -> Result:
    """A result in which everything is as it must be."""
    duel = Duel(1000, 10.0, 20.0, Ratio(2.0, 1.9, 2.1))
    cases = [make_case(Loss.GLOBAL, rr.SUM, 1.0), make_case(Loss.GLOBAL, rr.MEAN, 0.5)]
    return Result(
        transport="shm",
        parameters=250,
        training=Training([2.0, 1.0], 1, [0.9, 0.97], [1e-6]),
        equal_cases=cases,
        unequal_cases=[],
        traffic=Traffic(1000, [1008, 992]),
        timings=Timings(1000, [duel], [duel]),
    )


def test_a_result_as_it_must_be_has_no_failures() -> None:
    assert report.find_failures(make_result(), accuracy_counts=True) == []


def test_low_accuracy_fails_unless_it_does_not_count() -> None:
    result = replace(make_result(), training=Training([2.0], 1, [0.94], [1e-6]))
    assert "94.00%" in report.find_failures(result, accuracy_counts=True)[0]
    assert report.find_failures(result, accuracy_counts=False) == []


@pytest.mark.parametrize("error", [1e-3, math.inf])
def test_a_gradient_that_differs_fails(error: float) -> None:
    result = replace(make_result(), training=Training([2.0], 1, [0.97], [1e-6, error]))
    assert "differs" in report.find_failures(result, accuracy_counts=True)[0]


def test_a_training_that_diverged_is_still_json() -> None:
    result = replace(make_result(), training=Training([math.nan], 1, [0.1], [math.inf]))
    found = report.as_json(result, [], seconds=1.0)
    assert (found["losses"], found["max_relative_gradient_error"]) == ([None], None)
    json.dumps(found, allow_nan=False)


def test_a_wrong_verdict_fails() -> None:
    wrong = [
        make_case(Loss.GLOBAL, rr.SUM, 0.5),
        make_case(Loss.GLOBAL, rr.MEAN, 1.0),
        make_case(Loss.LOCAL_MEAN, rr.MEAN, 1.0, 0.1),
    ]
    failures = report.find_failures(replace(make_result(), equal_cases=wrong), accuracy_counts=True)
    assert len(failures) == 3
    assert "measured factor 0.5" in failures[0]
    assert "predicted factor 1" in failures[0]


def test_too_many_bytes_fail() -> None:
    result = replace(make_result(), traffic=Traffic(1000, [1000, 1033]))
    assert "[1000, 1033] bytes" in report.find_failures(result, accuracy_counts=True)[0]


# The launcher


@pytest.fixture
def _sklearn() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'ring-reduce[demo]'")


def test_the_likely_cause_comes_first() -> None:
    echo = launch.Failure(0, "PeerLost: rank 2 ended\nmore", "", severity=2)
    cause = launch.Failure(2, "ended by signal 9 (SIGKILL)", "", severity=0)
    assert str(launch.RanksFailed([echo, cause])).splitlines() == [
        "rank 2 failed: ended by signal 9 (SIGKILL)",
        "then rank 0: PeerLost: rank 2 ended",
    ]


def make_job(folder: Path, **changes: Any) -> launch.Job:
    job = launch.Job(world=2, epochs=1, cores=2, store_path=str(folder / "store"), digits=data.load_digits())
    return replace(job, **changes)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that the launcher starts during the test."""
    processes = []
    start = launch._start

    def start_and_note(rank: int) -> launch._Rank:
        noted = start(rank)
        processes.append(noted.process)
        return noted

    monkeypatch.setattr(launch, "_start", start_and_note)
    return processes


def assert_all_ended(processes: list[subprocess.Popen[bytes]], *, count: int) -> None:
    assert len(processes) == count
    for process in processes:
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


@pytest.mark.usefixtures("_sklearn")
def test_a_rank_that_raises_is_shown_and_nothing_is_left(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    digits = data.load_digits()
    # Label 10 does not exist: the rank that meets it raises, in the first epoch.
    bad = replace(
        digits, train_labels=np.where(np.arange(len(digits.train_labels)) == 5, 10, digits.train_labels)
    )
    with pytest.raises(launch.RanksFailed, match=r"rank [01] failed: IndexError: Target 10 is out of bounds"):
        launch.run_ranks(make_job(tmp_path, digits=bad), lambda text: None)
    assert_all_ended(started, count=2)


@pytest.mark.usefixtures("_sklearn")
def test_a_rank_that_is_killed_is_named_and_nothing_is_left(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    def kill_one(text: str) -> None:
        if text.startswith("epoch  1"):
            started[1].kill()

    with pytest.raises(launch.RanksFailed, match=r"rank 1 failed: ended by signal 9 \(SIGKILL\)"):
        launch.run_ranks(make_job(tmp_path, epochs=1000), kill_one)
    assert_all_ended(started, count=2)


@pytest.mark.usefixtures("_sklearn")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_parent_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "ring_reduce", "demo", "--world", "2", "--epochs", "1000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    # The ranks inherit this pipe: it ends when the last of them has.
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout is not None
        assert any("epoch" in line for line in demo.stdout)
        demo.send_signal(number)
        rest = demo.stdout.read()
    assert (
        demo.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    )
    assert "Traceback" not in rest
    assert list(tmp_path.glob("ring-reduce-demo-*")) == []


# The command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda"], "this version's ring runs on CPU only: use --device cpu"),
        (["--device", "tpu"], "'tpu' is none of auto, cpu, cuda"),
        (["--world", "0"], "0 is not between 1 and 16"),
        (["--world", "17"], "17 is not between 1 and 16"),
        (["--world", "two"], "'two' is not an integer"),
        (["--epochs", "-1"], "-1 is not between 1 and 1000"),
        (["--json", "missing/folder/file.json"], "does not exist"),
        (["--plot", "."], "is a folder"),
    ],
)
def test_bad_options_get_a_clear_error(options: list[str], message: str) -> None:
    finished = run_demo(*options)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_help_lists_the_options() -> None:
    finished = run_demo("--help")
    assert finished.returncode == 0
    for option in ("--world", "--device", "--epochs", "--plot", "--json"):
        assert option in finished.stdout


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('no sklearn', name='sklearn')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "ring_reduce", "demo", "--world", "1", "--epochs", "1"]
    finished = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert finished.returncode == 1
    assert "sklearn is missing: pip install 'ring-reduce[demo]'" in finished.stderr


@pytest.mark.usefixtures("_sklearn")
def test_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'ring-reduce[demo]'")
    picture, measured = tmp_path / "demo.png", tmp_path / "demo.json"
    finished = run_demo("--world", "2", "--epochs", "1", "--json", str(measured), "--plot", str(picture))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "epoch  1 of 1" in finished.stdout
    assert "\x1b[" not in finished.stdout  # plain when piped
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    check_measured(json.loads(measured.read_text()))


def check_measured(found: dict[str, Any]) -> None:
    n = 2
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
    # Each of the two chunks left out of 2s differs from s/n by less than a pack of 16 bytes.
    assert all(abs(sent - found["bytes_formula"]) <= 32 for sent in found["bytes_sent_by_rank"])
    assert found["bytes_sent"] == max(found["bytes_sent_by_rank"])
    assert sum(found["bytes_sent_by_rank"]) == n * found["bytes_formula"]
    for key in ("ring_us", "gloo_us", "sum_us", "mean_us"):
        assert found[key] > 0


@pytest.mark.usefixtures("_sklearn")
def test_a_world_of_one(tmp_path: Path) -> None:
    measured = tmp_path / "demo.json"
    finished = run_demo("--world", "1", "--epochs", "1", "--json", str(measured))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(measured.read_text())
    assert [case["right"] for case in found["cases"]] == [True] * 4
    assert (found["bytes_sent"], found["bytes_formula"]) == (0, 0)
