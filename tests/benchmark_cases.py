"""Made-up measurements for the tests of the benchmark's reports, and peers with planted faults for its ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from ring_reduce.benchmarks.measurement import Found, Measurement, Report
from ring_reduce.benchmarks.peers import Op, Place
from ring_reduce.benchmarks.peers.ring import RingPeer
from ring_reduce.benchmarks.plan import Contender, Plan

ROW_KEYS = {
    "backend",
    "world",
    "bytes",
    "dtype",
    "op",
    "in_place",
    "time_us",
    "time_us_min",
    "time_us_p99",
    "time_us_low",
    "time_us_high",
    "algbw_GBps",
    "busbw_GBps",
    "wrong",
    "max_relative_error",
    "bytes_sent",
    "copy_us",
    "calls",
}


def found(
    microseconds: float, *, wrong: int | None = 0, error: float | None = 6e-8, sent: int | None = None
) -> Found:
    """Five rounds of four calls that all took the same."""
    return Found(np.full((5, 4), microseconds), wrong, error, sent)


def measurement(
    nbytes: int, medians: dict[str, float], dtype: str = "float32", **options: Any
) -> Measurement:
    """Of ``{"ring sum in": 100.0}`` and the like; the copy goes out of place and reduces nothing."""
    each = {}
    for label, microseconds in medians.items():
        backend, op, place = label.split()
        of_copy = {"wrong": None, "error": None, "sent": 0} if backend == "copy" else options
        each[Contender(backend, Op(op), place == "in")] = found(microseconds, **of_copy)
    hops_ns: Any = np.arange(5.0)
    return Measurement(dtype, nbytes, each, hops_ns)


def report(*measurements: Measurement) -> Report:
    return Report(list(measurements), one_host=True)


def plan(**options: Any) -> Plan:
    return Plan(**{"world": 2, "sizes": (1024,), "calls": 20, **options})


class WrongPeer(RingPeer):
    """Adds 1 to one element of each rank's result."""

    name = "wrong"

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        super().all_reduce(x, out, op)
        out[3] += 1


class SpoilingPeer(RingPeer):
    """Out of place, leaves its input changed."""

    name = "spoiling"

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        super().all_reduce(x, out, op)
        if out is not x:
            x[5] += 1


class WrongLaterPeer(WrongPeer):
    """Right in the calls that are checked before the others (two, in and out of place) and in those of random data."""

    name = "wrong later"
    right_calls = 6

    def setup(self, place: Place) -> None:
        super().setup(place)
        self._calls = 0

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        self._calls += 1
        super().all_reduce(x, out, op)
        if self._calls <= self.right_calls:
            out[3] -= 1


class RoughPeer(RingPeer):
    """Loses bits: exact for small integers, and 256 times as rough as float32 for other numbers."""

    name = "rough"

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        super().all_reduce(x, out, op)
        out.copy_(out.bfloat16())


class FailingPeer(RingPeer):
    """Rank 1 does something else in its ninth call."""

    name = "failing"

    def setup(self, place: Place) -> None:
        super().setup(place)
        self._rank, self._calls = place.rank, 0

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: Op) -> None:
        self._calls += 1
        if self._rank == 1 and self._calls == 9:
            self.fail()
        super().all_reduce(x, out, op)

    def fail(self) -> None:
        raise OSError("the planted fault")


class DyingPeer(FailingPeer):
    """Rank 1 ends without a word."""

    name = "dying"

    def fail(self) -> None:
        os._exit(7)


class HangingPeer(FailingPeer):
    """Rank 1 hangs, for longer than any test."""

    name = "hanging"

    def fail(self) -> None:
        time.sleep(10_000)
