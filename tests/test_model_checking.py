"""Relacy runs the real lines of the schedule and the flags through interleavings and reorderings; Spin, a model."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import builds
from mutants import MUTANTS, caught_by, plant
from programs import CSRC, NATIVE, build, run
from tools import require_tool

# Random ones of 3 ranks. 2 ranks: all of a reduce_scatter, and those of an all_reduce with few changes of thread.
SCHEDULES = 50_000
# A mutant falls in the first few hundred.
MUTANT_SCHEDULES = 20_000


def relacy_ring(csrc: Path, directory: Path, *options: str) -> str:
    include = require_tool("relacy", "apt-get install relacy-dev")
    # After the system's directories, which may hold it too.
    return str(build("relacy_ring", csrc, directory, "-idirafter", include, *options))


def test_ring_in_relacy(tmp_path: Path) -> None:
    program = relacy_ring(CSRC, tmp_path, "-O1", "-Wall", "-Wextra", "-Werror")
    status, text = run([program, str(SCHEDULES)])
    assert status == 0, text
    assert text.count("iterations: ") == 6
    assert text.endswith("right\n")


@pytest.mark.parametrize("name", caught_by("relacy"))
def test_relacy_catches(tmp_path: Path, name: str) -> None:
    program = relacy_ring(plant(name, tmp_path), tmp_path, "-O0", "-DFIRST_ALONE")
    status, text = run([program, str(MUTANT_SCHEDULES)])
    # 1 and "wrong" are the verdict of the program; a crash would be another.
    assert (status, text.splitlines()[-1]) == (1, "wrong"), text
    assert str(MUTANTS[name].relacy) in text


# Definitions of ring.pml, and what pan says of it.
SPIN_RIGHT = ["", "-DRANKS=2 -DSEGMENTS=4", "-DSLOTS=3 -DWINDOW=2 -DSEGMENTS=4"]
SPIN_WRONG = {
    "one slot": ("-DSLOTS=1", "invalid end state"),
    "a window of all slots": ("-DWINDOW=2 -DSEGMENTS=4", "invalid end state"),
    "whole tensor step by step": ("-DWINDOW=3", "invalid end state"),
    "no credits": ("-DNO_CREDITS", "assertion violated"),
    "no wait for data": ("-DNO_WAIT", "assertion violated"),
    "taken before it is read": ("-DTAKE_FIRST", "assertion violated"),
}


def build_pan(directory: Path, definitions: str) -> Path:
    """The search of a model's states, as Spin writes it and gcc compiles it."""
    spin = require_tool("spin", "apt-get install spin")

    def make(pan: Path) -> None:
        for command in (
            [spin, *definitions.split(), "-a", str(NATIVE / "ring.pml")],
            # No claim is compiled in, so that pan looks for deadlocks.
            ["gcc", "-O1", "-DSAFETY", "-DNOREDUCE", "-w", "pan.c", "-o", str(pan)],
        ):
            done = subprocess.run(command, cwd=pan.parent, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr

    return builds.once(f"pan{definitions.replace(' ', '')}", "pan", directory, make)


def run_spin(directory: Path, definitions: str) -> str:
    pan = build_pan(directory, definitions)
    builds.stop_ahead()
    command = [str(pan), "-m100000"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert "search depth too small" not in done.stdout
    return done.stdout


@pytest.mark.parametrize("definitions", SPIN_RIGHT)
def test_model_in_spin(tmp_path: Path, definitions: str) -> None:
    assert "errors: 0" in run_spin(tmp_path, definitions)


@pytest.mark.parametrize("name", SPIN_WRONG)
def test_spin_catches(tmp_path: Path, name: str) -> None:
    definitions, says = SPIN_WRONG[name]
    text = run_spin(tmp_path, definitions)
    assert "errors: 1" in text
    assert says in text
