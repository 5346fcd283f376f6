"""Teams of ranks that live as long as the session, so that a small case costs no process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launch import Team

Run = Callable[..., list[Any]]


def pytest_configure() -> None:
    """A job in the background of a script ignores Ctrl-C, and so would every process that the tests interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
