"""The order of waits, moves and publishes: every world up to 16 against a model of the ranks' memory."""

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
