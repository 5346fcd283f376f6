"""Builds the programs of tests/native against csrc/, or a copy of it with a fault, and runs them."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NATIVE = ROOT / "tests" / "native"


def compile_object(source: Path, csrc: Path, directory: Path, *options: str) -> Path:
    """Compiles one source with the headers of ``csrc``. As setup.py does where the bits depend on it."""
    output = directory / f"{source.stem}.o"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-ffp-contract=off", "-pthread", "-g1", *options]
    command += [f"-I{csrc}", "-c", str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def compile_objects(sources: list[Path], csrc: Path, directory: Path, *options: str) -> list[Path]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda source: compile_object(source, csrc, directory, *options), sources))


def link(objects: list[Path], output: Path, *options: str) -> Path:
    command = [os.environ.get("CXX", "g++"), "-pthread", *options, *map(str, objects), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def build(name: str, csrc: Path, directory: Path, *options: str) -> Path:
    """A program of one source, tests/native/``name``.cpp, and headers of ``csrc``."""
    return link([compile_object(NATIVE / f"{name}.cpp", csrc, directory, *options)], directory / name)


def run(command: list[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit status and all output. A program that hangs fails the test: every wait of a ring ends."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, **(environment or {})},
    )
    return done.returncode, done.stdout
