"""``ring-reduce verify``: exit statuses, JSON, what can't be checked, and what ends a run before its time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from ring_reduce.verification import command as verify_command
from verify_files import EXAMPLES, GOOD, run_command, with_step, write


def test_the_worst_group_decides(tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    done = run_command(EXAMPLES / "wrong_short_group.py", "--json", written, folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("RIGHT:") == 1
    assert "a short group, 2 micro-batches on each of 2 ranks where 3 are planned" in done.stdout
    assert "WRONG: gradient is 0.6667 = k/N = 2/3 (k = 2 micro-batches of N = 3 planned)" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "the step" in done.stderr
    found = json.loads(written.read_text())
    assert (found["exit_status"], found["right"]) == (1, False)
    assert [group["exit_status"] for group in found["groups"]] == [0, 1]
    assert [group["micro_batches"] for group in found["groups"]] == [3, 2]
    assert not list(tmp_path.glob("ring-reduce-verify-*"))


def test_right_alone_with_a_sample(tmp_path: Path, command: Command) -> None:
    path = write(tmp_path, GOOD + "\nprint('printed by the file')\n")
    done = command(
        "verify", path, "--world", 1, "--micro-batches", 4, "--short", 0, "--sample", 2, "--tolerance", "1e-5"
    )
    assert done.returncode == 0, done.stderr
    assert "Elements compared: 3 of 4 (a sample); relative differences up to 1.0e-05" in done.stdout
    assert "short group" not in done.stdout
    assert "printed by the file" not in done.stdout
    assert "printed by the file" in done.stderr


@pytest.mark.parametrize(
    ("planned", "world", "short"),
    [(3, 2, 2), (3, 4, 2), (4, 3, 2), (5, 4, 3), (2, 1, 1), (2, 2, 1), (1, 2, 0)],
)
def test_the_default_short_group(planned: int, world: int, short: int) -> None:
    """One less than planned, and not the world where that can be helped without a group of one."""
    assert verify_command._short_by_default(planned, world) == short


@pytest.mark.parametrize(
    ("statuses", "worst"), [([0, 0], 0), ([0, 2], 2), ([2, 1], 1), ([1, 0], 1), ([0], 0)]
)
def test_wrong_is_worse_than_untold(statuses: list[int], worst: int) -> None:
    assert verify_command._worst(statuses) == worst


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no-such-file.py"], "there is no file 'no-such-file.py'"),
        ([__file__, "--world", "0"], "0 is not between 1 and 64"),
        ([__file__, "--micro-batches", "two"], "'two' is not a whole number"),
        (
            [__file__, "--micro-batches", "2", "--short", "2"],
            "--short is 2 and --micro-batches 2; a short group has",
        ),
        ([__file__, "--tolerance", "1.5"], "1.5 is not between 0 and 1"),
        ([__file__, "--timeout", "0"], "0 is no number of seconds above 0"),
        ([__file__, "--json", "no-such-folder/file.json"], "does not exist"),
    ],
)
def test_wrong_options_are_2(options: list[str], message: str, command: Command) -> None:
    done = command("verify", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message", "trace"),
    [
        ("import torch\n", "lacks model() and batches() and losses() and step():", False),
        ("import no_such_module\n", "could not be imported: ModuleNotFoundError: No module named 'no_such_", True),
        ("def model(:\n", "could not be imported: SyntaxError", True),
        (GOOD.replace("nn.Linear(3, 1)", "nn.Linear()"), "mine.py: model() failed: TypeError: Linear", True),
        (with_step("raise ValueError('mine')"), "step() raised ValueError: mine", True),
        (with_step("if job.rank: raise ValueError(1)\nright_step(model, batches, job)"), "rank 1: step() raised", True),
        (GOOD.replace(".flatten()", ".mean()"), "a tensor of shape () for micro-batch 0 of rank 0; it has", False),
        (with_step("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "ended by signal 9 (SIGKILL)", False),
    ],
)  # fmt: skip
def test_what_can_not_be_checked_is_2(
    text: str, message: str, trace: bool, tmp_path: Path, command: Command
) -> None:
    written = tmp_path / "found.json"
    done = command("verify", write(tmp_path, text), "--micro-batches", 1, "--json", written)
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert message in done.stderr
    assert ("Traceback" in done.stderr) == trace
    assert not trace or "mine.py" in done.stderr
    found = json.loads(written.read_text())
    assert (found["exit_status"], found["right"]) == (2, None)
    assert message in found["error"]
    assert not list(tmp_path.glob("ring-reduce-verify-*"))


# What fails in the process that was started


def test_a_report_that_can_not_be_written_is_2(tmp_path: Path, command: Command) -> None:
    path = write(tmp_path, with_step("right_step(model, batches, job)"))
    done = command("verify", path, "--micro-batches", 1, "--json", "/dev/full")
    assert done.returncode == 2
    assert "RIGHT:" in done.stdout
    assert done.stderr.splitlines()[-1] == "ring-reduce: [Errno 28] No space left on device"
    assert "Traceback" not in done.stderr


def test_no_files_left_to_open_is_2(tmp_path: Path) -> None:
    line = f"ulimit -n 8; exec {sys.executable} -m ring_reduce verify {write(tmp_path, GOOD)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("ring-reduce: [Errno 24] Too many open files\n")
    assert "Traceback" not in done.stderr


# What ends a run before its time


def test_a_rank_that_hangs_is_named(tmp_path: Path, command: Command) -> None:
    path = write(tmp_path, with_step("time.sleep(0 if job.rank else 1000)\nright_step(model, batches, job)"))
    done = command("verify", path, "--timeout", 8, "--micro-batches", 1)
    assert done.returncode == 2
    assert "ring-reduce verify: not done in 8 s (rank 0 is at: " in done.stderr


def test_ranks_meet_where_nothing_can_be_left(tmp_path: Path) -> None:
    """Not in a folder that a killed parent would leave, or that a rank would wait for if it were gone."""
    body = "import os\nassert os.listdir(os.environ['TMPDIR']) == []\nright_step(model, batches, job)"
    path, folder = write(tmp_path, with_step(body)), tmp_path / "tmp"
    folder.mkdir()
    done = run_command(path, "--micro-batches", 1, folder=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    path = write(tmp_path, with_step("print('in the step', flush=True); time.sleep(1000)"))
    line: list[Any] = [sys.executable, "-m", "ring_reduce", "verify", str(path)]
    folder = tmp_path / "tmp"
    folder.mkdir()
    # The ranks inherit this pipe: it ends when the last of them has.
    with subprocess.Popen(
        line,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("in the step" in line for line in process.stdout)
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    assert "Traceback" not in rest
    assert not list(folder.glob("ring-reduce-verify-*"))
