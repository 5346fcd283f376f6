"""The real CPU ring with threads for ranks and lanes, under ThreadSanitizer, AddressSanitizer and UBSan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from mutants import MUTANTS, caught_by, plant
from programs import CSRC, NATIVE, compile_objects, join, link, run
from tools import require_tool

THREAD = ("-O1", "-fsanitize=thread")
ADDRESS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# ThreadSanitizer sees no accesses of more than 16 bytes.
ENVIRONMENT = {"TSAN_OPTIONS": "halt_on_error=1", "RING_REDUCE_ISA": "baseline"}


def without_layout(program: Path) -> list[str]:
    """The command that runs it without address randomization, which g++ 12's ThreadSanitizer does not bear."""
    setarch = require_tool("setarch", "apt-get install util-linux")
    return [setarch, os.uname().machine, "-R", str(program)]


SOURCES = ("call", "cpu_ring", "direct", "group", "lane", "lane_threads", "process", "ring", "trace", "wait")


def build(csrc: Path, directory: Path, *options: str, warnings: Sequence[str] = ()) -> Path:
    """The core's ring, its passes, and the program that runs it. Passes are warned of in test_accumulate_native.py."""
    core = join("core", [f"{name}.cpp" for name in SOURCES], directory)
    objects = compile_objects([core, NATIVE / "ring_threads.cpp"], csrc, directory, *options, *warnings)
    objects += compile_objects(sorted(csrc.glob("passes*.cpp")), csrc, directory, *options)
    return link(objects, directory / "ring_threads", *options)


def test_no_data_race(tmp_path: Path) -> None:
    assert run(without_layout(build(CSRC, tmp_path, *THREAD)), ENVIRONMENT) == (0, "0 wrong\n")


@pytest.mark.parametrize("name", caught_by("thread"))
def test_thread_sanitizer_catches(tmp_path: Path, name: str) -> None:
    status, text = run(without_layout(build(plant(name, tmp_path), tmp_path, *THREAD)), ENVIRONMENT)
    assert status != 0, text
    assert str(MUTANTS[name].thread) in text


@pytest.fixture(scope="module")
def address_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CSRC, tmp_path_factory.mktemp("address"), *ADDRESS, warnings=("-Wall", "-Wextra", "-Werror"))


# A width that the processor lacks runs the baseline.
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_memory_and_undefined_behaviour(address_program: Path, isa: str) -> None:
    assert run(without_layout(address_program), {"RING_REDUCE_ISA": isa}) == (0, "0 wrong\n")


@pytest.mark.parametrize("name", caught_by("address"))
def test_address_sanitizer_catches(tmp_path: Path, name: str) -> None:
    status, text = run(without_layout(build(plant(name, tmp_path), tmp_path, *ADDRESS)))
    assert status != 0, text
    assert str(MUTANTS[name].address) in text
