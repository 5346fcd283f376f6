"""An accumulator's passes without Python: every vector width, clang, aarch64, sanitizers, and planted faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mutants import MUTANTS, caught_by, plant
from programs import CSRC, NATIVE, compile_object, compile_objects, link, run
from tools import require_isa, require_tool

SOURCES = (
    "accumulate",
    "lane_threads",
    "passes",
    "passes_avx2",
    "passes_avx512",
    "passes_baseline",
    "pieces",
)
WARNINGS = ("-Wall", "-Wextra", "-Werror")
THREAD = ("-O1", "-fsanitize=thread")
ADDRESS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BASELINE = {"RING_REDUCE_ISA": "baseline"}


def compile_all(csrc: Path, directory: Path, *options: str) -> dict[str, Path]:
    """Objects of the check and of all that it needs, by name."""
    sources = [*(csrc / f"{name}.cpp" for name in SOURCES), NATIVE / "accumulate_check.cpp"]
    return {path.stem: path for path in compile_objects(sources, csrc, directory, *options)}


def compile_mutant(name: str, directory: Path, objects: dict[str, Path], *options: str) -> Path:
    """The check with a fault. Only what it changes is compiled anew; a header of the passes, in the baseline alone."""
    csrc = plant(name, directory)
    changed = Path(MUTANTS[name].file).stem
    source = csrc / f"{'passes_baseline' if changed == 'accumulate_chunk' else changed}.cpp"
    (planted,) = compile_objects([source], csrc, directory, *options)
    return link([*{**objects, planted.stem: planted}.values()], directory / "accumulate_check", *options)


def without_layout(program: Path) -> list[str]:
    """The command that runs it without address randomization, which g++ 12's ThreadSanitizer does not bear."""
    setarch = require_tool("setarch", "apt-get install util-linux")
    return [setarch, os.uname().machine, "-R", str(program)]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return compile_all(CSRC, tmp_path_factory.mktemp("accumulate"), "-O1", *WARNINGS)


@pytest.fixture(scope="module")
def program(objects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link([*objects.values()], tmp_path_factory.mktemp("program") / "accumulate_check")


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_width(program: Path, isa: str) -> None:
    status, text = run([str(program)], {"RING_REDUCE_ISA": isa})
    require_isa(isa)
    assert text.split()[0] == isa
    assert (status, text) == (0, f"{isa}\n0 failures\n")


def test_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", require_tool("clang++", "apt-get install clang"))
    objects = compile_all(CSRC, tmp_path, "-O3", *WARNINGS)
    status, text = run([str(link([*objects.values()], tmp_path / "accumulate_check"))])
    assert (status, text.splitlines()[1:]) == (0, ["0 failures"])


@pytest.mark.parametrize(
    ("contraction", "right"), [((), True), (("-ffp-contract=fast",), False)], ids=["off", "fast"]
)
def test_aarch64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contraction: tuple[str, ...], right: bool
) -> None:
    """aarch64 has fused multiply-adds without being asked: with the compiler's own choice the bits must differ."""
    compiler = require_tool("aarch64-linux-gnu-g++", "apt-get install g++-aarch64-linux-gnu")
    emulator = require_tool("qemu-aarch64-static", "apt-get install qemu-user-static")
    monkeypatch.setenv("CXX", compiler)
    objects = compile_all(CSRC, tmp_path, "-O3", *WARNINGS)
    passes = compile_object(CSRC / "passes_baseline.cpp", CSRC, tmp_path, "-O3", *WARNINGS, *contraction)
    program = link([*{**objects, passes.stem: passes}.values()], tmp_path / "accumulate_check", "-static")
    status, text = run([emulator, str(program)])
    assert text.startswith("baseline\n")
    assert (status == 0 and text.endswith("\n0 failures\n")) is right
    assert ("sum of length" in text) is not right


@pytest.mark.parametrize("name", caught_by("accumulate"))
def test_faults_are_seen(name: str, objects: dict[str, Path], tmp_path: Path) -> None:
    status, text = run([str(compile_mutant(name, tmp_path, objects, "-O1"))], BASELINE)
    assert status == 1, text
    assert str(MUTANTS[name].accumulate) in text


@pytest.fixture(scope="module")
def thread_objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return compile_all(CSRC, tmp_path_factory.mktemp("thread"), *THREAD)


def watched(program: Path) -> tuple[int, str]:
    return run([*without_layout(program), "threads"], {"TSAN_OPTIONS": "halt_on_error=1"})


def test_no_data_race(thread_objects: dict[str, Path], tmp_path: Path) -> None:
    status, text = watched(link([*thread_objects.values()], tmp_path / "accumulate_check", *THREAD))
    assert (status, text.splitlines()[1:]) == (0, ["0 failures"])


@pytest.mark.parametrize("name", caught_by("accumulate_thread"))
def test_thread_sanitizer_catches(name: str, thread_objects: dict[str, Path], tmp_path: Path) -> None:
    status, text = watched(compile_mutant(name, tmp_path, thread_objects, *THREAD))
    assert status != 0, text
    assert str(MUTANTS[name].accumulate_thread) in text


@pytest.fixture(scope="module")
def address_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("address")
    objects = compile_all(CSRC, directory, *ADDRESS)
    return link([*objects.values()], directory / "accumulate_check", *ADDRESS)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_memory_and_undefined_behaviour(address_program: Path, isa: str) -> None:
    status, text = run(without_layout(address_program), {"RING_REDUCE_ISA": isa})
    assert (status, text.splitlines()[1:]) == (0, ["0 failures"])
