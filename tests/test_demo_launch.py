"""The launcher of ranks, with the demo's: whoever fails or is killed is named, and nothing is left."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_reduce import processes
from ring_reduce.demo import data
from ring_reduce.processes import Failure, RanksFailed, Severity

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None and os.environ.get("RING_REDUCE_REQUIRE_TOOLS") != "1",
    reason="scikit-learn is not installed: pip install '.[demo]' in ring_reduce's source",
)


def test_the_likely_cause_comes_first() -> None:
    echo = Failure(0, "rank 0 failed: PeerLost: rank 2 ended\nmore", "", Severity.ECHO)
    cause = Failure(2, "rank 2 failed: ended by signal 9 (SIGKILL)", "", Severity.SILENT)
    assert str(RanksFailed([echo, cause])).splitlines() == [
        "rank 2 failed: ended by signal 9 (SIGKILL)",
        "then rank 0 failed: PeerLost: rank 2 ended",
    ]


def run_job(folder: Path, show: Callable[[str], None], **changes: Any) -> None:
    job = data.Job(world=2, epochs=1, cores=2, store_path=str(folder / "store"), digits=data.load_digits())
    main = "ring_reduce.demo.rank:run_rank"
    processes.run_ranks(2, main, replace(job, **changes), str(folder), timeout=None, show=show)


@pytest.fixture
def started(forked_ranks: None, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that the launcher starts during the test."""
    found = []
    start = processes._start

    def start_and_note(rank: int) -> processes._Rank:
        noted = start(rank)
        found.append(noted.process)
        return noted

    monkeypatch.setattr(processes, "_start", start_and_note)
    return found


def assert_all_ended(started: list[subprocess.Popen[bytes]], *, count: int) -> None:
    assert len(started) == count
    for process in started:
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


@needs_sklearn
def test_a_rank_that_raises_is_shown_and_nothing_is_left(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    digits = data.load_digits()
    # Label 10 does not exist: the rank that meets it raises, in the first epoch.
    bad = replace(
        digits, train_labels=np.where(np.arange(len(digits.train_labels)) == 5, 10, digits.train_labels)
    )
    with pytest.raises(RanksFailed, match=r"rank [01] failed: IndexError: Target 10 is out of bounds"):
        run_job(tmp_path, lambda text: None, digits=bad)
    assert_all_ended(started, count=2)


@needs_sklearn
def test_a_rank_that_is_killed_is_named_and_nothing_is_left(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    def kill_one(text: str) -> None:
        if text.startswith("epoch  1"):
            started[1].kill()

    with pytest.raises(RanksFailed, match=r"rank 1 failed: ended by signal 9 \(SIGKILL\)"):
        run_job(tmp_path, kill_one, epochs=1000)
    assert_all_ended(started, count=2)


@needs_sklearn
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
    assert list(tmp_path.glob("*ring*")) == []
