"""The passes over memory, in every width of vectors and on both processors, against slow scalar code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools import require_isa, require_tool

ROOT = Path(__file__).resolve().parent.parent
# As setup.py compiles the core: the bits depend on these.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]


def build(compiler: str, output: Path, *options: str, csrc: Path = ROOT / "csrc") -> Path:
    """Compiles passes_check.cpp with the passes of `csrc`."""
    sources = [ROOT / "tests/native/passes_check.cpp", *sorted(csrc.glob("passes*.cpp"))]
    command = [compiler, *FLAGS, *options, f"-I{csrc}", *map(str, sources), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def run(command: list[str], isa: str | None = None) -> tuple[int, list[str]]:
    environment = {**os.environ, **({"RING_REDUCE_ISA": isa} if isa else {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout.splitlines()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(os.environ.get("CXX", "g++"), tmp_path_factory.mktemp("passes") / "passes_check")


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_width(program: Path, isa: str) -> None:
    status, lines = run([str(program)], isa)
    require_isa(isa)
    assert lines[0] == isa
    assert (status, lines) == (0, [isa, "0 failures"])


def test_clang(tmp_path: Path) -> None:
    compiler = require_tool("clang++", "apt-get install clang")
    program = build(compiler, tmp_path / "passes_check")
    status, lines = run([str(program)])
    assert (status, lines[1:]) == (0, ["0 failures"])


def test_aarch64(tmp_path: Path) -> None:
    compiler = require_tool("aarch64-linux-gnu-g++", "apt-get install g++-aarch64-linux-gnu")
    emulator = require_tool("qemu-aarch64-static", "apt-get install qemu-user-static")
    program = build(compiler, tmp_path / "passes_check", "-static")
    status, lines = run([emulator, str(program)])
    assert (status, lines) == (0, ["baseline", "0 failures"])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("+ 0x7fff + ((bits >> 16) & 1)", "+ 0x8000"),  # ties away from even
        (
            "(rounded_to_bfloat16(v.low) >> 16)",
            "(rounded_to_bfloat16(v.high) >> 16)",
        ),  # the other half of the word
        ("+ 0xfff + ((magnitude >> 13) & 1)) >> 13", ") >> 13"),  # truncates
        ("select(magnitude < (113u << 23), denormal, normal)", "normal"),  # no denormals
        (
            "std::memcpy(out + i, padded_out, rest * sizeof(T))",
            "std::memcpy(out + i, padded_out, sizeof padded_out)",
        ),
    ],
)
def test_faults_are_seen(tmp_path: Path, line: str, fault: str) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    for path in (ROOT / "csrc").iterdir():
        text = path.read_text()
        if path.name == "chunk.h":
            assert text.count(line) == 1
            text = text.replace(line, fault)
        (csrc / path.name).write_text(text)
    program = build(os.environ.get("CXX", "g++"), tmp_path / "passes_check", "-Wno-error", csrc=csrc)
    status, _ = run([str(program)], "baseline")
    assert status != 0
