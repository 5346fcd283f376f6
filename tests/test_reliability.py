"""docs/reliability.md: its tests exist, its figures are those that were measured, and it knows every error."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

from ring_reduce import errors

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 30
    assert named <= defined


def test_the_figures_are_those_of_the_campaigns() -> None:
    path = ROOT / "tests" / "faults" / "campaign.py"
    spec = importlib.util.spec_from_file_location("campaign", path)
    assert spec is not None
    assert spec.loader is not None
    campaign = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(campaign)
    lines = campaign.table()
    assert len(lines) > 5
    shown = TEXT.partition("| fault | tried |")[2].partition("\n\n")[0].splitlines()[2:]
    assert shown == lines


def test_every_error_is_explained() -> None:
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.RingError)
    }
    explained = set(re.findall(r"^\| `(\w+)` \|", TEXT.partition("How to read")[2], re.MULTILINE))
    assert explained == kinds
