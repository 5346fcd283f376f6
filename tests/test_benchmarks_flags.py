"""The options of ``ring-reduce bench``: nccl-tests' meaning of each, and what is refused with which words."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from ring_reduce import cli
from ring_reduce.benchmarks import command, flags
from ring_reduce.benchmarks.flags import UsageError
from ring_reduce.benchmarks.host import KB, MB
from ring_reduce.benchmarks.launch import Seat
from ring_reduce.benchmarks.plan import Plan
from ring_reduce.benchmarks.table import size_text


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


def planned(*argv: str, seat: Seat | None = None) -> tuple[Plan, list[str]]:
    notes: list[str] = []
    return command.plan_of(parsed(*argv), seat, notes), notes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("16K", 16384), ("64m", 64 * MB), ("1G", 1 << 30)]
)
def test_sizes_are_parsed_and_printed(text: str, nbytes: int) -> None:
    assert flags.size(text) == nbytes
    assert flags.size(size_text(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ((), (KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB)),
        (("-b", "8", "-e", "64", "-f", "2"), (8, 16, 32, 64)),
        (("-b", "8", "-e", "64", "-f", "3"), (8, 24)),
        (("--minbytes", "1K", "--maxbytes", "4K", "--stepbytes", "1K"), (KB, 2 * KB, 3 * KB, 4 * KB)),
        (("-b", "256M"), (256 * MB,)),
        (("-e", "512"), (512,)),
    ],
)
def test_size_range_steps_as_nccl_tests_does(argv: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    assert flags.size_range(parsed(*argv)) == sizes


def test_sizes_are_whole_elements_each_once() -> None:
    plan, _ = planned("-b", "10", "-e", "15", "-i", "1", "-d", "float,double", "--backend", "ring")
    assert plan.cases() == [("float32", 8), ("float32", 12), ("float64", 8)]


def test_names_of_types_and_operations_are_nccl_tests_or_torchs() -> None:
    assert parsed("-d", "half,float64").datatype == ("float16", "float64")
    assert parsed("-d", "all").datatype == ("float64", "float32", "float16", "bfloat16", "int32", "int64")
    assert parsed("-o", "avg").op == ("MEAN",)
    assert parsed("--op", "all").op == ("SUM", "MEAN")


def test_counts_of_calls() -> None:
    plan, _ = planned("-n", "20", "-w", "3", "--backend", "ring")
    assert (plan.repeats(1024), plan.warm_up_rounds(1024)) == ((10, 2), 2)
    assert plan.repeats(64 * MB) == (20, 1)
    default, _ = planned("--backend", "ring")
    assert (default.repeats(1024), default.warm_up_rounds(1024)) == ((100, 16), 1)
    assert default.repeats(64 * MB) == (40, 1)
    assert planned("-w", "0", "-n", "3", "--backend", "ring")[0].warm_up_rounds(1024) == 0
    assert planned("-n", "3", "--backend", "ring")[0].repeats(1024) == (3, 1)


def test_the_copy_is_always_measured_and_once() -> None:
    assert planned("--backend", "gloo,ring")[0].backends == ("gloo", "ring", "copy")
    assert planned("--backend", "copy,ring,copy")[0].backends == ("ring", "copy")


def test_what_is_absent_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command, "missing", lambda name, device: None if name in ("ring", "gloo") else f"no {name}: get it"
    )
    plan, notes = planned()
    assert plan.backends == ("ring", "gloo", "copy")
    assert notes == ["# not measured: mpi: no mpi: get it", "# not measured: deepspeed: no deepspeed: get it"]
    with pytest.raises(UsageError, match="--backend mpi: no mpi: get it"):
        planned("--backend", "ring,mpi")


def test_under_torchrun_mpi_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "missing", lambda name, device: None)
    seat = Seat(rank=0, world=3, local_rank=0, launcher="torchrun")
    plan, notes = planned(seat=seat)
    assert (plan.world, plan.backends) == (3, ("ring", "gloo", "deepspeed", "copy"))
    assert "torchrun started the ranks" in notes[0]
    with pytest.raises(UsageError, match="must be started by mpirun"):
        planned("--backend", "mpi", seat=seat)
    under_mpirun = Seat(rank=0, world=3, local_rank=0, launcher="mpirun")
    assert "mpi" in planned(seat=under_mpirun)[0].backends


def test_world_is_the_launchers_and_must_not_contradict_it() -> None:
    seat = Seat(rank=0, world=3, local_rank=0, launcher="torchrun")
    assert planned("--world", "3", "--backend", "ring", seat=seat)[0].world == 3
    with pytest.raises(UsageError, match="--world 2, but torchrun started 3 ranks"):
        planned("--world", "2", seat=seat)


@pytest.mark.parametrize(
    "argv",
    [
        ("-b", "0"),
        ("-b", "1X"),
        ("-f", "1"),
        ("-d", "float8"),
        ("-o", "max"),
        ("-n", "0"),
        ("-w", "-1"),
        ("--backend", "nickel"),
        ("--backend", "no.such.module:Peer"),
        ("--backend", "benchmark_cases:NoSuchPeer"),
        ("--world", "0"),
        ("--world", "65"),
        ("--device", "tpu"),
        ("--timeout", "0"),
    ],
)
def test_bad_values_end_with_a_usage_error(argv: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *argv])
    assert end.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert argv[0] in message
    assert argv[1] in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("-b", "4K", "-e", "1K"), "-b 4096 is more than -e 1024"),
        (("-b", "4", "-d", "all"), "-b 4 is less than one element of 8 bytes"),
        (("-d", "int32,int64", "-o", "avg"), "-o avg: int32, int64 can't be divided"),
        (("--device", "cuda", "--backend", "gloo"), "--device cuda: torch sees no GPU here"),
        (("--baseline", "/no/such/file"), "'/no/such/file' can't be read"),
    ],
)
def test_contradictions_are_told_in_a_line(
    argv: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ring-reduce bench: {message}")


def test_factor_and_step_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "-f", "2", "-i", "1K"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*command.COMMANDS])
def test_other_benchmarks_have_options_of_their_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: ring-reduce bench {name}" in shown.replace("[-h] ", "")
    assert "--minbytes" not in shown.partition("options:")[0]
