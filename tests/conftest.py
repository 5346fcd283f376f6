"""Teams of ranks that live as long as the session, so that a small case costs no process."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import builds
import forks
from launch import Team
from ring_reduce import cli, processes

Run = Callable[..., list[Any]]
Command = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure() -> None:
    """A job in the background of a script ignores Ctrl-C, and so would every process that the tests interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is built ahead comes last."""
    items.sort(key=builds.compiles)


def pytest_runtest_setup() -> None:
    builds.end_if_alone()


@pytest.fixture(scope="session", autouse=True)
def _builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("builds")
    with builds.session(directory, request.session.items, request.config.rootpath):
        yield


@pytest.fixture(scope="session")
def _teams() -> Iterator[dict[int, Team]]:
    teams: dict[int, Team] = {}
    yield teams
    for team in teams.values():
        team.close()


@pytest.fixture
def run(_teams: dict[int, Team]) -> Run:
    """``run(world, function, *arguments)``: as ``launch.spawn``, in processes that are there already."""

    def run_in_team(world: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        if world not in _teams:
            _teams[world] = Team(world)
        try:
            return _teams[world].run(function, *arguments, **options)
        except BaseException:
            _teams.pop(world).close(at_once=True)
            raise

    return run_in_team


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that a command starts are forks, and not new interpreters."""
    monkeypatch.setattr(processes, "_start", forks.start)
    monkeypatch.setattr(os, "memfd_create", forks.high_memfd)


@pytest.fixture
def command(
    forked_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """``command(*words)``: ``ring-reduce WORDS`` in this process, with its status and all that it and its ranks say.

    Temporary files are in ``tmp_path``.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run_here(*words: object) -> subprocess.CompletedProcess[str]:
        argv = [str(word) for word in words]
        capfd.readouterr()
        try:
            status = cli.main(argv)
        except SystemExit as end:  # of argparse
            status = end.code if isinstance(end.code, int) else 1
        return subprocess.CompletedProcess(argv, status, *capfd.readouterr())

    return run_here
