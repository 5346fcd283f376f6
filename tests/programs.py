"""Builds the programs of tests/native against csrc/, or a copy of it with a fault, and runs them."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import builds

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NATIVE = ROOT / "tests" / "native"


def compile_object(source: Path, csrc: Path, directory: Path, *options: str) -> Path:
    """Compiles one source with the headers of ``csrc``. As setup.py does where the bits depend on it.

    The same text, headers and options are compiled once a session, and the object may lie in another ``directory``.
    """
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-ffp-contract=off", "-pthread", "-g1", *options]
    key = hashlib.sha256("\0".join([*command, *_texts_of(source, csrc).values()]).encode()).hexdigest()
    compiled = [*command, f"-I{csrc}", "-c", str(source), "-o"]
    return builds.once(
        key[:16], f"{source.stem}.o", directory, lambda output: _say_why(*compiled, str(output))
    )


def _say_why(*command: str) -> None:
    """Runs a compiler. Why it fails is the failure of the test."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _texts_of(path: Path, csrc: Path) -> dict[str, str]:
    """A source and the files of ours that it includes, and they include, by name."""
    texts = {path.name: path.read_text()}
    for name in re.findall(r'^#include "(.+)"', texts[path.name], re.MULTILINE):
        for directory in (path.parent, csrc):
            if (directory / name).is_file() and name not in texts:
                texts |= {**_texts_of(directory / name, csrc), **texts}
    return texts


def compile_objects(sources: list[Path], csrc: Path, directory: Path, *options: str) -> list[Path]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda source: compile_object(source, csrc, directory, *options), sources))


def join(name: str, sources: list[str], directory: Path) -> Path:
    """One source of several of csrc/: most of their time is spent on the headers of the library."""
    joined = directory / f"{name}.cpp"
    joined.write_text("".join(f'#include "{source}"\n' for source in sources))
    return joined


def link(objects: list[Path], output: Path, *options: str) -> Path:
    builds.stop_ahead()  # what comes now takes little time, or is the test itself
    _say_why(os.environ.get("CXX", "g++"), "-pthread", *options, *map(str, objects), "-o", str(output))
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
