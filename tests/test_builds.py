"""What tests build is built once, in whichever process comes first, and nobody waits for long."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

import builds


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no session shares a directory, and nothing is ahead."""
    monkeypatch.setattr(builds, "_shared", None)
    monkeypatch.setattr(builds, "PATIENCE_S", 0.1)


def write(text: str) -> builds.Make:
    def make(path: Path) -> None:
        path.write_text(text)

    return make


def test_what_is_built_once_is_not_built_again(tmp_path: Path) -> None:
    first = builds.once("key", "program.o", tmp_path, write("first"))
    assert builds.once("key", "program.o", tmp_path, write("second")) == first
    assert (first.name, first.read_text()) == ("program.o", "first")


def test_another_key_is_another_build(tmp_path: Path) -> None:
    builds.once("key", "program.o", tmp_path, write("first"))
    assert builds.once("other", "program.o", tmp_path, write("second")).read_text() == "second"


def test_what_failed_is_built_again(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise AssertionError("no compiler")

    with pytest.raises(AssertionError, match="no compiler"):
        builds.once("key", "program.o", tmp_path, fails)
    assert builds.once("key", "program.o", tmp_path, write("whole")).read_text() == "whole"


@pytest.mark.parametrize("folder", [False, True])
def test_who_has_waited_long_enough_builds_it_himself(tmp_path: Path, folder: bool) -> None:
    """And takes what the other has built where that is quicker after all."""

    def make(path: Path) -> None:
        for each in (tmp_path / "key" / "made", path):  # the other's, then the own
            if folder:
                each.mkdir()
            (each / "file" if folder else each).write_text("a build")

    (tmp_path / "key").mkdir()
    with (tmp_path / "key" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # and it is not given up
        made = builds.once("key", "made", tmp_path, make)
    assert made == tmp_path / "key" / "made"
    assert (made / "file" if folder else made).read_text() == "a build"


def test_ahead_a_test_ends_where_all_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds.stop_ahead()
    monkeypatch.setenv(builds._AHEAD, f"{tmp_path}:1")
    with pytest.raises(pytest.skip.Exception):
        builds.stop_ahead()


def test_ahead_nobody_waits_for_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(builds._AHEAD, f"{tmp_path}:1")
    (tmp_path / "key").mkdir()
    with (tmp_path / "key" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(pytest.skip.Exception):
            builds.once("key", "made", tmp_path, write(""))


def test_who_is_ahead_of_nobody_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a session that inherits the variable would skip its tests, and pass."""
    builds.end_if_alone()
    monkeypatch.setenv(builds._AHEAD, f"{tmp_path}:1")
    with pytest.raises(pytest.exit.Exception) as ended:
        builds.end_if_alone()
    assert ended.value.returncode == 1
    monkeypatch.setenv(builds._AHEAD, f"{tmp_path}:{os.getppid()}")
    builds.end_if_alone()


def test_the_files_that_are_built_ahead_are_there() -> None:
    assert [name for name in builds.COMPILING if not (builds.TESTS / f"{name}.py").is_file()] == []
