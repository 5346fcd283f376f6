"""The core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer, with threads for ranks."""

from __future__ import annotations

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mutants import CSRC, MUTANTS, plant
from tools import require_tool

PROGRAM = Path(__file__).resolve().parent / "native" / "ring_threads.cpp"
SANITIZERS = {
    "thread": "-fsanitize=thread",
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
}
REPORTED = 66  # the exit status that ThreadSanitizer is told to use

# What TSan can see: missing orders. A lost wake-up is a delay to it, see test_model_checking.py.
RACES = [
    "relaxed publish",
    "relaxed observe",
    "no credits",
    "no wait for data",
    "posted before it is written",
]


def build(csrc: Path, directory: Path, sanitizer: str) -> Path:
    """ring_threads.cpp and the core of ``csrc``, each file compiled apart, two at a time."""
    options = ["-std=c++20", "-g", "-O1", "-ffp-contract=off", f"-I{csrc}", *SANITIZERS[sanitizer].split()]
    sources = [PROGRAM, *(path for path in sorted(csrc.glob("*.cpp")) if not path.name.startswith("bind_"))]
    objects = [directory / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, output: Path) -> None:
        command = ["g++", *options, "-c", str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, objects))
    program = directory / "ring_threads"
    subprocess.run(["g++", *options, *map(str, objects), "-pthread", "-o", str(program)], check=True)
    return program


def run(program: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without address randomisation: TSan's shadow memory does not fit some kernels' layouts.
    setarch = require_tool("setarch", "apt-get install util-linux")
    command = [setarch, platform.machine(), "-R", str(program)]
    environment = {"TSAN_OPTIONS": f"halt_on_error=1:exitcode={REPORTED}", **environment}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=250, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def asan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CSRC, tmp_path_factory.mktemp("asan"), "address")


def test_threads(tmp_path: Path) -> None:
    done = run(build(CSRC, tmp_path, "thread"))
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stdout + done.stderr[:5000]


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_addresses_and_undefined_behaviour(asan: Path, isa: str) -> None:
    done = run(asan, RING_REDUCE_ISA=isa)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stdout + done.stderr[:5000]


@pytest.mark.parametrize("name", RACES)
def test_races_are_seen(tmp_path: Path, name: str) -> None:
    assert name in MUTANTS
    done = run(build(plant(name, tmp_path), tmp_path, "thread"))
    assert done.returncode == REPORTED, done.stdout + done.stderr[:5000]
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
