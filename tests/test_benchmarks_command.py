"""The benchmark's command on real ranks: started by it, by torchrun and by an mpirun, and with planted faults."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmark_cases import ROW_KEYS, measurement, plan, report
from conftest import Command
from ring_reduce import cli
from ring_reduce.benchmarks import launch
from ring_reduce.benchmarks.launch import MPI_VARIABLES, STORE_VARIABLE, Seat, seat_of
from ring_reduce.benchmarks.plan import Plan
from ring_reduce.benchmarks.progress import progress
from ring_reduce.benchmarks.report import document, figures_of

TESTS = Path(__file__).parent
TINY = ["-b", "64", "-e", "4K", "-f", "64", "-n", "10", "--rotate", "16K"]
SMALLEST = ["-b", "64", "-e", "64", "-n", "10", "--rotate", "1K"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

# Starts a rank for each process that is asked for, as Open MPI's would: mpirun N PROGRAM...
MPIRUN = """\
import os, subprocess, sys
world = sys.argv[1]
ranks = [
    subprocess.Popen(
        sys.argv[2:],
        env=os.environ | {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": world, "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)
        },
    )
    for rank in range(int(world))
]
sys.exit(max(rank.wait() for rank in ranks))
"""


def bench(*argv: str, launcher: list[str] | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """``ring-reduce bench`` in a process of its own, whose ranks find the planted peers of these tests."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", STORE_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in unset} | more
    start = [*launcher, "-m", "ring_reduce"] if launcher else [sys.executable, "-m", "ring_reduce"]
    return subprocess.run(
        [*start, "bench", *argv],
        env=environment | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def test_a_tiny_run_measures_all_contenders(tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    done = bench(*TINY, "--backend", "ring,gloo", "-o", "all", "--json", str(file), "--plot", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    rows = rows_of(file)
    assert all(set(row) == ROW_KEYS for row in rows)
    seen = {(row["bytes"], row["backend"], row["op"], row["in_place"]): row for row in rows}
    reducing = [
        (backend, op, in_place)
        for backend in ("ring", "gloo")
        for op in ("SUM", "MEAN")
        for in_place in (False, True)
    ]
    assert set(seen) == {(n, *each) for n in (64, 4096) for each in [*reducing, ("copy", "SUM", False)]}
    assert all(0 < row["time_us_min"] <= row["time_us"] <= row["time_us_p99"] for row in rows)
    for row in rows:
        assert row["wrong"] == (None if row["backend"] == "copy" else 0)
        # Two ranks round once; a mean's division may round once more.
        assert row["backend"] == "copy" or 0 < row["max_relative_error"] < 2**-23
        assert row["bytes_sent"] == {"ring": row["bytes"], "gloo": None, "copy": 0}[row["backend"]]
        assert (row["world"], row["calls"]) == (2, 10)
    lines = done.stdout.splitlines()
    assert lines.count("# Out of bounds values : 0 OK") == 2
    assert sum(line.startswith("# Avg bus bandwidth    : ") for line in lines) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_types_are_exact_and_counted(command: Command) -> None:
    options = ["-b", "1040", "-e", "1040", "-n", "2", "--rotate", "4K", "-d", "all", "--world", "3"]
    done = command("bench", *options, "--backend", "ring")
    assert done.returncode == 0, done.stderr
    figures = [line.split() for line in done.stdout.splitlines() if line.split()[1:2] and "(" not in line]
    types_seen = [words[2] for words in figures if words[0] == "1040" and len(words) == 19]
    assert types_seen == ["double", "float", "half", "bfloat16", "int32", "int64"]


def test_wrong_results_are_counted_and_are_1(tmp_path: Path, command: Command) -> None:
    """Faults of every call, of later calls, of the input, and lost bits."""
    file = tmp_path / "rows.json"
    peers = ("WrongPeer", "SpoilingPeer", "WrongLaterPeer", "RoughPeer")
    wrong, spoiling, later, rough = names = [f"benchmark_cases:{peer}" for peer in peers]
    done = command("bench", *SMALLEST, "--backend", ",".join(names), "--json", file)
    assert done.returncode == 1, done.stderr
    each = 8  # an element, of two ranks, in four calls
    random = 2  # the same in the call with random data
    counted = {(row["backend"], row["in_place"]): row["wrong"] for row in rows_of(file)}
    assert (counted[wrong, False], counted[wrong, True]) == (each + random, each + random)
    assert (counted[spoiling, False], counted[spoiling, True]) == (each, 0)
    assert counted["copy", False] is None
    for in_place in (False, True):
        assert counted[later, in_place] == 4  # an element, of two ranks, in the two calls behind the others
        assert 16 <= counted[rough, in_place] <= 32  # of two ranks' 16 random sums
    footers = [line for line in done.stdout.splitlines() if line.startswith("# Out of bounds values")]
    totals = [counted[name, False] + counted[name, True] for name in names]
    assert footers == [f"# Out of bounds values : {total} FAILED" for total in totals]


def test_the_file_is_written_before_anything_is_printed(tmp_path: Path, command: Command) -> None:
    """A reader that is gone, or a full disk behind stdout, loses no measurement."""
    file = tmp_path / "rows.json"
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        done = command("bench", *SMALLEST, "--backend", "gloo", "--json", file)
    assert done.returncode == 2, done.stderr
    assert {row["backend"] for row in rows_of(file)} == {"gloo", "copy"}


@pytest.mark.parametrize(
    ("peer", "cause"),
    [
        ("FailingPeer", "rank 1 failed: OSError: the planted fault"),
        ("DyingPeer", "rank 1 failed: ended with exit status 7 and without a word, at: 64 bytes of float32"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_cause(peer: str, cause: str, command: Command) -> None:
    done = command("bench", *SMALLEST, "--backend", f"benchmark_cases:{peer}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ring-reduce bench: {cause}")


def test_a_rank_that_hangs_ends_the_run_and_is_named(command: Command) -> None:
    done = command("bench", *SMALLEST, "--backend", "benchmark_cases:HangingPeer", "--timeout", "10")
    assert (done.returncode, done.stdout) == (2, "")
    assert "rank 1 failed" in done.stderr
    assert "at: 64 bytes of float32" in done.stderr
    assert "in fail" in done.stderr  # where it hangs
    assert "then rank 0 failed: RingTimeout" in done.stderr


def test_under_torchrun_every_process_is_a_rank_and_rank_0_prints(tmp_path: Path) -> None:
    file, baseline = tmp_path / "rows.json", tmp_path / "earlier.json"
    earlier = report(measurement(128, {"ring sum in": 5.0}))  # a size that is not measured now
    written = document(plan(), earlier, figures_of(plan(), earlier), 0.0)
    baseline.write_text(json.dumps(written))
    options = ["--json", str(file), "--baseline", str(baseline)]
    done = bench(*TINY, "--backend", "ring,gloo", *options, launcher=[*TORCHRUN, "2"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# ring-reduce bench: 2 ranks on cpu") == 1
    assert {row["backend"] for row in rows_of(file)} == {"ring", "gloo", "copy"}
    assert all(not row["wrong"] for row in rows_of(file))
    assert done.stdout.splitlines()[-1].startswith("# 0 rows in both")


def test_under_torchrun_a_rank_that_fails_ends_the_others() -> None:
    done = bench(*TINY, "--backend", "benchmark_cases:FailingPeer", launcher=[*TORCHRUN, "2"])
    assert done.returncode != 0
    assert "OSError: the planted fault" in done.stderr


@pytest.fixture
def mpirun(tmp_path: Path) -> list[str]:
    path = tmp_path / "mpirun.py"
    path.write_text(MPIRUN)
    return [sys.executable, str(path)]


def test_under_mpirun_the_ranks_meet_where_they_are_told(mpirun: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {STORE_VARIABLE: f"127.0.0.1:{port}"}
    done = bench(*TINY, "--backend", "ring", launcher=[*mpirun, "2", sys.executable], **told)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# ring-reduce bench: 2 ranks on cpu") == 1
    lost = bench(*TINY, "--backend", "ring", launcher=[*mpirun, "1", sys.executable])
    assert lost.returncode == 2
    assert f"set {STORE_VARIABLE}=HOST:PORT" in lost.stderr


@pytest.mark.parametrize("peer", ["RingPeer", "FailingPeer"])
def test_with_mpi_the_ranks_are_started_by_mpirun(
    peer: str, mpirun: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a program in place of mpirun, and with peers in place of MPI's, so that this needs no MPI."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    module = types.ModuleType("ring_reduce.benchmarks.mpirun")
    module.command = lambda world: [*mpirun, str(world)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ring_reduce.benchmarks.mpirun", module)
    monkeypatch.setattr("ring_reduce.benchmarks.mpirun", module, raising=False)
    backends = (f"benchmark_cases:{peer}", "copy")
    asked = Plan(world=2, sizes=(64,), backends=backends, calls=10, rotate_bytes=1024)
    store = launch.new_store(asked)
    if peer == "RingPeer":
        measured = launch.start_under_mpirun(asked, store.port, lambda _: None)
        assert [each.nbytes for each in measured.measurements] == [64]
        return
    with pytest.raises(launch.LaunchError, match="mpirun ended with exit status 2; rank 0 was at: 64 bytes"):
        launch.start_under_mpirun(asked, store.port, lambda _: None)
    assert "OSError: the planted fault" in capfd.readouterr().err


def test_seats_are_found_in_the_environment() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    assert seat_of(torchrun) == Seat(3, 8, 1, "torchrun")
    for rank, world, local_rank in MPI_VARIABLES:
        assert seat_of({rank: "3", world: "8", local_rank: "1"}) == Seat(3, 8, 1, "mpirun")
        assert seat_of({rank: "3", world: "8"}) == Seat(3, 8, 3, "mpirun")
    assert seat_of({"RANK": "3"}) is None
    assert seat_of({}) is None


@pytest.mark.parametrize("command", ["ddp", "scale"])
@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
def test_commands_that_start_their_ranks_refuse_a_launcher(
    command: str,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ring_reduce.benchmarks.ddp.run_ranks", lambda *_, **__: pytest.fail("started ranks"))
    monkeypatch.setattr("ring_reduce.benchmarks.scale.start", lambda *_: pytest.fail("started ranks"))
    assert cli.main(["bench", command]) == 2
    launcher = "torchrun" if "RANK" in environment else "mpirun"
    assert f"{launcher} started this process as rank 1 of 4" in capsys.readouterr().err


def test_progress_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress() as show:
        show("round 1")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress() as show:
        show("round 1")
    assert capsys.readouterr().err == "\r\x1b[Kround 1\r\x1b[K"


def test_help_of_bench_imports_no_torch() -> None:
    code = (
        "import sys; from ring_reduce.cli import main\n"
        "try: main(['bench', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_errors_of_usage_come_before_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ring_reduce.benchmarks.launch.start", lambda *_: pytest.fail("started ranks"))
    assert cli.main(["bench", "-b", "4K", "-e", "1K"]) == 2
