"""Arguments of a ring: each error says what was given and what it has to be."""

from __future__ import annotations

import operator
import os
import threading
from datetime import timedelta
from typing import Any

DEFAULT_TIMEOUT_S = 300.0


def timeout_s(timeout: float | timedelta | None) -> float:
    """Seconds; None takes ``RING_REDUCE_TIMEOUT`` or the default. ``TypeError``, ``ValueError`` for what is no time."""
    if timeout is None:
        text = os.environ.get("RING_REDUCE_TIMEOUT")
        try:
            timeout = float(text) if text else DEFAULT_TIMEOUT_S
        except ValueError:
            raise ValueError(f"RING_REDUCE_TIMEOUT is {text!r}; it has to be a number of seconds") from None
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__"):
        raise TypeError(f"timeout is {timeout!r}; it has to be a number of seconds")
    if not 0 < float(timeout) <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout is {timeout} s; it has to be positive, and at most {threading.TIMEOUT_MAX:.0f} s"
        )
    return float(timeout)


def whole(value: Any, what: str) -> int:
    """A whole number of any type; ``TypeError`` for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{what} is {value!r}, a {type(value).__name__}; it has to be a whole number"
        ) from None
