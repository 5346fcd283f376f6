"""The real CPU ring with threads for ranks and lanes, under ThreadSanitizer, AddressSanitizer and UBSan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mutants import MUTANTS, caught_by, plant
from programs import CSRC, NATIVE, compile_objects, link, run
from tools import require_tool

THREAD = ("-O1", "-fsanitize=thread")
ADDRESS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ENVIRONMENT = {"TSAN_OPTIONS": "halt_on_error=1"}


def without_layout(program: Path) -> list[str]:
    """The command that runs it without address randomization, which g++ 12's ThreadSanitizer does not bear."""
    setarch = require_tool("setarch", "apt-get install util-linux")
    return [setarch, os.uname().machine, "-R", str(program)]


def compile_passes(directory: Path, *options: str) -> list[Path]:
    """The passes, which no mutant changes."""
    return compile_objects(sorted(CSRC.glob("passes*.cpp")), CSRC, directory, *options)


def ring_threads(csrc: Path, directory: Path, passes: list[Path], *options: str) -> Path:
    names = ("call", "cpu_ring", "group", "lane_threads", "ring", "wait")
    sources = [*(csrc / f"{name}.cpp" for name in names), NATIVE / "ring_threads.cpp"]
    objects = compile_objects(sources, csrc, directory, *options)
    return link([*objects, *passes], directory / "ring_threads", *options)


@pytest.fixture(scope="module")
def thread_passes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_passes(tmp_path_factory.mktemp("thread"), *THREAD)


@pytest.fixture(scope="module")
def address_passes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_passes(tmp_path_factory.mktemp("passes"), *ADDRESS)


def test_no_data_race(tmp_path: Path, thread_passes: list[Path]) -> None:
    program = ring_threads(CSRC, tmp_path, thread_passes, *THREAD, "-Wall", "-Wextra", "-Werror")
    assert run(without_layout(program), ENVIRONMENT) == (0, "0 wrong\n")


@pytest.mark.parametrize("name", caught_by("thread"))
def test_thread_sanitizer_catches(tmp_path: Path, thread_passes: list[Path], name: str) -> None:
    program = ring_threads(plant(name, tmp_path), tmp_path, thread_passes, *THREAD)
    status, text = run(without_layout(program), ENVIRONMENT)
    assert status != 0, text
    assert str(MUTANTS[name].thread) in text


@pytest.fixture(scope="module")
def address_program(tmp_path_factory: pytest.TempPathFactory, address_passes: list[Path]) -> Path:
    return ring_threads(CSRC, tmp_path_factory.mktemp("address"), address_passes, *ADDRESS)


# A width that the processor lacks runs the baseline.
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_memory_and_undefined_behaviour(address_program: Path, isa: str) -> None:
    assert run(without_layout(address_program), {"RING_REDUCE_ISA": isa}) == (0, "0 wrong\n")


@pytest.mark.parametrize("name", caught_by("address"))
def test_address_sanitizer_catches(tmp_path: Path, address_passes: list[Path], name: str) -> None:
    program = ring_threads(plant(name, tmp_path), tmp_path, address_passes, *ADDRESS)
    status, text = run(without_layout(program))
    assert status != 0, text
    assert str(MUTANTS[name].address) in text
