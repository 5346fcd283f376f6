"""Relacy runs the real lines of the schedule and the flags through interleavings and reorderings; Spin a model of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mutants import CSRC, MUTANTS, plant
from tools import require_tool

NATIVE = Path(__file__).resolve().parent / "native"

# Arguments of relacy_ring: scheduler, world, segments, window, depth, iterations.
RIGHT = [
    "random 3 2 1 2 100000",
    "random 3 3 2 3 50000",
    "random 2 5 1 2 100000",
    "random 2 4 2 3 50000",
    "bounded 2 2 1 2 100000",
]
# With as many segments a step as slots, every rank holds all its slots while it waits for one.
DEADLOCKS = ["random 3 2 2 2 100000", "random 2 4 4 2 100000"]


def build_relacy(csrc: Path, directory: Path) -> Path:
    include = require_tool("relacy", "apt-get install relacy-dev")
    program = directory / "relacy_ring"
    # -w: Relacy's headers are of 2008.
    command = ["g++", "-std=c++20", "-O1", "-w", f"-I{csrc}", f"-I{include}"]
    command += [str(NATIVE / "relacy_ring.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def run_relacy(program: Path, arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(program), *arguments.split()], capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def relacy_ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_relacy(CSRC, tmp_path_factory.mktemp("relacy"))


@pytest.mark.parametrize("arguments", RIGHT)
def test_ring_in_relacy(relacy_ring: Path, arguments: str) -> None:
    status, text = run_relacy(relacy_ring, arguments)
    assert status == 0, text[:2000]


@pytest.mark.parametrize("arguments", DEADLOCKS)
def test_too_few_slots_deadlock(relacy_ring: Path, arguments: str) -> None:
    status, text = run_relacy(relacy_ring, arguments)
    assert status == 1
    assert "DEADLOCK" in text


@pytest.mark.parametrize("name", MUTANTS)
def test_relacy_catches(tmp_path: Path, name: str) -> None:
    program = build_relacy(plant(name, tmp_path), tmp_path)
    status, text = run_relacy(program, RIGHT[0])
    assert status == 1
    assert MUTANTS[name].relacy in text


# Definitions of ring.pml, and what pan says of it.
SPIN_RIGHT = ["", "-DRANKS=2 -DSEGMENTS=4", "-DSLOTS=3 -DWINDOW=2 -DSEGMENTS=4"]
SPIN_WRONG = {
    "one slot": ("-DSLOTS=1", "invalid end state"),
    "a window of all slots": ("-DWINDOW=2 -DSEGMENTS=4", "invalid end state"),
    "no credits": ("-DNO_CREDITS", "assertion violated"),
    "no wait for data": ("-DNO_WAIT", "assertion violated"),
}


def run_spin(directory: Path, definitions: str) -> str:
    spin = require_tool("spin", "apt-get install spin")
    for command in (
        [spin, *definitions.split(), "-a", str(NATIVE / "ring.pml")],
        ["gcc", "-O2", "-DSAFETY", "-DNOREDUCE", "-w", "pan.c", "-o", "pan"],
    ):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(["./pan", "-m100000"], cwd=directory, capture_output=True, text=True, check=False)
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
