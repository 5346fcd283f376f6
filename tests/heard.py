"""What ranks hear of a ring that they make, and when: for faults of the start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import ring_reduce as rr
from launch import caught


@dataclass
class Heard:
    """What came of making a ring and of one sum in it, on one rank."""

    began: float
    ended: float = 0.0
    total: float = 0.0
    error: str = ""
    text: str = ""


def try_ring(make: Callable[[], rr.Ring], value: float = 1.0, elements: int = 1000) -> Heard:
    """Times are those of the monotonic clock, which all processes share."""
    heard = Heard(time.monotonic())

    def body() -> None:
        with make() as ring:
            heard.total = float(ring.all_reduce(np.full(elements, value, np.float32)).min())

    if (error := caught(body)) is not None:
        heard.error, heard.text = type(error).__name__, str(error)
    heard.ended = time.monotonic()
    return heard


def slowest(heard: list[Heard], since: float | None = None) -> float:
    """From the fault, or from when the last rank came, until all had heard of it."""
    began = since if since is not None else max(each.began for each in heard)
    return max(each.ended for each in heard) - began
