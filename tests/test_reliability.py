"""docs/reliability.md: its tests exist, its figures are those that were measured, and it knows every error."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from ring_reduce import errors
from trace_cases import event

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 30
    assert named <= defined


def load(name: str) -> ModuleType:
    """A module of tests/faults/, which are programs and not on the path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "faults" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("head", "least"), [("| fault |", 11), ("| minutes |", 1), ("| algorithm |", 3)])
def test_the_figures_are_those_of_the_campaigns(head: str, least: int) -> None:
    lines = load("campaign").TABLES[head]()
    assert len(lines) >= least
    shown = TEXT.partition(f"\n{head}")[2].partition("\n\n")[0].splitlines()[2:]
    assert shown == lines


def test_the_campaigns_survived_all_faults_and_were_late_at_every_step() -> None:
    results = load("campaign").read()
    for figures in [*results["faults"].values(), *results["soak"]["faults"].values()]:
        assert figures["survived"] == figures["tried"] > 0
    for miss in results["misses"]:
        assert f"    {miss['again']}\n" in TEXT
        assert f"{miss['seconds']:.2f} s" in TEXT
    assert results["soak"]["problems"] == []
    assert results["soak"]["seconds"] >= 30 * 60
    for figures in results["steps"]["algorithms"].values():
        assert sum(count for _, count in figures["at"]) == figures["tried"]
        assert all(count > 0 for _, count in figures["at"])


def test_a_stop_is_counted_where_it_was() -> None:
    steps = load("steps")
    events = [
        event("wait posted", 10, 20),
        event("reduce", 21, 25),
        event("post", 30, 31)._replace(step=2),
        event("reduce", 50, 60, call=2),
    ]

    def place(from_us: int, to_us: int, algorithm: str = "ring") -> str | None:
        found: str | None = steps.place_of(events, steps.Stop(0, 1000 * from_us, 1000 * to_us), algorithm)
        return found

    assert place(12, 19) == "step 1"
    assert place(26, 29) == "step 2"
    assert place(52, 55, "direct") == "reduce"
    assert place(5, 9) == place(33, 40) == steps.BETWEEN
    assert place(70, 80) is None


def test_every_error_is_explained() -> None:
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.RingError)
    }
    explained = set(re.findall(r"^\| `(\w+)` \|", TEXT.partition("How to read")[2], re.MULTILINE))
    assert explained == kinds
