"""The orders of waits, moves and publishes without threads or time, and the partition that the moves work on."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants import MUTANTS, caught_by, plant
from programs import CSRC, build, run


def test_schedule(tmp_path: Path) -> None:
    program = build("schedule_exhaustive", CSRC, tmp_path, "-O2", "-Wall", "-Wextra", "-Werror")
    status, text = run([str(program)])
    assert status == 0, text
    states = int(text.split()[0])
    assert states > 2_000_000, "the search of all interleavings has become smaller"


@pytest.mark.parametrize("name", caught_by("schedule"))
def test_schedule_catches(tmp_path: Path, name: str) -> None:
    program = build("schedule_exhaustive", plant(name, tmp_path), tmp_path, "-O1")
    status, text = run([str(program)])
    assert status == 1, text
    assert str(MUTANTS[name].schedule) in text


def test_direct_schedule(tmp_path: Path) -> None:
    program = build("direct_exhaustive", CSRC, tmp_path, "-O1", "-Wall", "-Wextra", "-Werror")
    status, text = run([str(program)])
    assert status == 0, text
    assert int(text.split()[0]) > 1_000_000, "the search of all interleavings has become smaller"


@pytest.mark.parametrize("name", caught_by("direct"))
def test_direct_schedule_catches(tmp_path: Path, name: str) -> None:
    program = build("direct_exhaustive", plant(name, tmp_path), tmp_path, "-O0")
    status, text = run([str(program)])
    assert status == 1, text
    assert str(MUTANTS[name].direct) in text


def test_partition(tmp_path: Path) -> None:
    program = build("partition_check", CSRC, tmp_path, "-O1", "-Wall", "-Wextra", "-Werror")
    assert run([str(program)]) == (0, "0 wrong\n")


@pytest.mark.parametrize("name", caught_by("partition"))
def test_partition_catches(tmp_path: Path, name: str) -> None:
    program = build("partition_check", plant(name, tmp_path), tmp_path, "-O1")
    status, text = run([str(program)])
    assert status == 1, text
    assert str(MUTANTS[name].partition) in text
