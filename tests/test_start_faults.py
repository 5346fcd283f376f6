"""Each fault of the start and of memory once, and that docs/reliability.md shows the figures of many."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from start_faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
DETECTION_S = 10.0  # ten times what is promised: other tests may be running


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_start(name: str) -> None:
    seconds = FAULTS[name].once()
    assert seconds is None or seconds < DETECTION_S


def campaign() -> ModuleType:
    spec = importlib.util.spec_from_file_location("starts", ROOT / "tests" / "faults" / "starts.py")
    assert spec is not None
    assert spec.loader is not None
    starts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(starts)
    return starts


def test_a_fault_that_is_not_survived_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0.5, -1.0, 0.25])

    def once() -> float:
        found = next(seconds)
        assert found > 0, "it hung"
        return found

    monkeypatch.setitem(FAULTS, "every other", Fault(once, 2))
    assert campaign().repeat("every other", 3) == {"tried": 3, "survived": 2, "slowest_s": 0.5, "world": 2}
    assert "every other, number 1: it hung" in capsys.readouterr().out


def test_the_figures_of_starts_are_those_of_the_campaign() -> None:
    starts = campaign()
    results = json.loads(starts.RESULTS.read_text())
    worlds = {name: figures["world"] for name, figures in results.items()}
    assert worlds == {name: fault.world for name, fault in FAULTS.items()}
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    shown = text.partition("| fault of the start | tried |")[2].partition("\n\n")[0].splitlines()[2:]
    assert shown == starts.table()
