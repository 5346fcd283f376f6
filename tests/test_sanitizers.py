"""The real CPU ring with threads for ranks and lanes, under ThreadSanitizer, AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mutants import MUTANTS, caught_by, plant
from programs import CSRC, NATIVE, compile_objects, link, run
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

Objects = dict[str, Path]  # by the name of the source


def compile_ring(directory: Path, *options: str) -> Objects:
    """The core's ring as it is, its passes, and the program that runs it."""
    sources = [
        *(CSRC / f"{name}.cpp" for name in SOURCES),
        *CSRC.glob("passes*.cpp"),
        NATIVE / "ring_threads.cpp",
    ]
    return {path.stem: path for path in compile_objects(sources, CSRC, directory, *options)}


def headers_of(path: Path) -> set[str]:
    """The names of the core's headers that a file includes, and they include."""
    found: set[str] = set()
    for name in re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE):
        if name not in found:
            found |= {name, *headers_of(CSRC / name)}
    return found


def with_fault(name: str, objects: Objects, directory: Path, *options: str) -> Path:
    """The program with one fault. Passes have none here; only what includes the fault is compiled."""
    csrc, changed = plant(name, directory), MUTANTS[name].file
    candidates = [*(csrc / f"{each}.cpp" for each in SOURCES), NATIVE / "ring_threads.cpp"]
    sources = [path for path in candidates if changed in {path.name, *headers_of(path)}]
    planted = {path.stem: path for path in compile_objects(sources, csrc, directory, *options)}
    return link([*{**objects, **planted}.values()], directory / "ring_threads_with_fault", *options)


@pytest.fixture(scope="module")
def thread_objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return compile_ring(tmp_path_factory.mktemp("thread"), *THREAD, "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="module")
def address_objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return compile_ring(tmp_path_factory.mktemp("address"), *ADDRESS)


def test_no_data_race(tmp_path: Path, thread_objects: Objects) -> None:
    program = link([*thread_objects.values()], tmp_path / "ring_threads", *THREAD)
    assert run(without_layout(program), ENVIRONMENT) == (0, "0 wrong\n")


@pytest.mark.parametrize("name", caught_by("thread"))
def test_thread_sanitizer_catches(tmp_path: Path, thread_objects: Objects, name: str) -> None:
    program = with_fault(name, thread_objects, tmp_path, *THREAD)
    status, text = run(without_layout(program), ENVIRONMENT)
    assert status != 0, text
    assert str(MUTANTS[name].thread) in text


@pytest.fixture(scope="module")
def address_program(tmp_path_factory: pytest.TempPathFactory, address_objects: Objects) -> Path:
    directory = tmp_path_factory.mktemp("program")
    return link([*address_objects.values()], directory / "ring_threads", *ADDRESS)


# A width that the processor lacks runs the baseline.
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_memory_and_undefined_behaviour(address_program: Path, isa: str) -> None:
    assert run(without_layout(address_program), {"RING_REDUCE_ISA": isa}) == (0, "0 wrong\n")


@pytest.mark.parametrize("name", caught_by("address"))
def test_address_sanitizer_catches(tmp_path: Path, address_objects: Objects, name: str) -> None:
    program = with_fault(name, address_objects, tmp_path, *ADDRESS)
    status, text = run(without_layout(program))
    assert status != 0, text
    assert str(MUTANTS[name].address) in text
