"""The passes over memory, in every width of vectors and on both processors, against slow scalar code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from programs import CSRC, NATIVE, compile_objects, link, run
from tools import require_isa, require_tool

# As setup.py compiles the core: the bits depend on these.
OPTIONS = ("-O3", "-Wall", "-Wextra", "-Werror")


def compile_all(directory: Path) -> dict[str, Path]:
    """Objects of the check and of the passes, by name."""
    sources = [NATIVE / "passes_check.cpp", *sorted(CSRC.glob("passes*.cpp"))]
    return {path.stem: path for path in compile_objects(sources, CSRC, directory, *OPTIONS)}


def build(directory: Path, *options: str) -> str:
    return str(link([*compile_all(directory).values()], directory / "passes_check", *options))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("passes"))


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_width(program: str, isa: str) -> None:
    status, text = run([program], {"RING_REDUCE_ISA": isa})
    require_isa(isa)
    assert text.split()[0] == isa
    assert (status, text) == (0, f"{isa}\n0 failures\n")


def test_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", require_tool("clang++", "apt-get install clang"))
    status, text = run([build(tmp_path)])
    assert (status, text.splitlines()[1:]) == (0, ["0 failures"])


def test_aarch64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = require_tool("aarch64-linux-gnu-g++", "apt-get install g++-aarch64-linux-gnu")
    emulator = require_tool("qemu-aarch64-static", "apt-get install qemu-user-static")
    monkeypatch.setenv("CXX", compiler)
    assert run([emulator, build(tmp_path, "-static")]) == (0, "baseline\n0 failures\n")


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
    """In one width: each is a namespace of its own, and only the baseline's is compiled anew."""
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    text = (csrc / "chunk.h").read_text()
    assert text.count(line) == 1
    (csrc / "chunk.h").write_text(text.replace(line, fault))
    (planted,) = compile_objects([csrc / "passes_baseline.cpp"], csrc, tmp_path, "-O1")
    objects = {**compile_all(tmp_path), planted.stem: planted}
    status, _ = run(
        [str(link([*objects.values()], tmp_path / "passes_check"))], {"RING_REDUCE_ISA": "baseline"}
    )
    assert status != 0
