"""How a step of `make gpu-check` tells what it found: a line of JSON each, which check.py reads."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any


def _tell(**what: Any) -> None:
    print("@@" + json.dumps(what), flush=True)


def passed(name: str, detail: str = "") -> None:
    _tell(outcome="passed", name=name, detail=detail)


def failed(name: str, detail: str) -> None:
    _tell(outcome="failed", name=name, detail=detail[-2000:])


def skipped(name: str, reason: str) -> None:
    _tell(outcome="skipped", name=name, detail=reason)


def figure(name: str, value: float, unit: str, target: str = "") -> None:
    """A number that was measured; no gate."""
    _tell(outcome="figure", name=name, value=value, unit=unit, target=target)


def attempt(name: str, check: Callable[[], str | None]) -> None:
    """Passed with what ``check`` returns, or failed with what it raises; the step goes on."""
    try:
        passed(name, check() or "")
    except Exception:
        failed(name, traceback.format_exc())
