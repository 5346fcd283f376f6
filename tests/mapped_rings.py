"""The shared memory of a ring as the tests see it: every rank's region, to read its counters and to damage its headers.

The layout is that of csrc/region.h, for rings of one lane.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Any
from unittest import mock

import ring_reduce as rr
from launch import Seat
from ring_reduce import _core

CONTROL_BYTES = 4096
LINE_BYTES = 128
COUNTERS = 4
POSTED, INPUTS = 0, 2  # of the counters
HEADER_BYTES = 64
COUNT_BITS = range(256, 320)  # of the header: the sum of counts
WAIT_S = 30.0


class MappedRing:
    """A ring, and the regions of all its ranks."""

    def __init__(self, seat: Seat, algorithm: str) -> None:
        self._regions: list[mmap.mmap] = []
        make = _core.CpuRing

        def make_and_map(**settings: Any) -> Any:
            self._regions = [mmap.mmap(descriptor, 0) for descriptor in settings["memory_fds"]]
            self._depth, self._segment = settings["depth"], settings["segment_bytes"]
            self._part, self._world = settings["part_bytes"], settings["world"]
            return make(**settings)

        tuning: dict[str, Any] = {"segment_bytes": 1024, "part_bytes": 1024, "one_shot_bytes": 512}
        with mock.patch.object(_core, "CpuRing", make_and_map):
            self.ring: rr.Ring = seat.ring(lanes=1, algorithm=algorithm, **tuning)

    def counter(self, rank: int, which: int) -> int:
        """A counter in the region of ``rank``."""
        (value,) = struct.unpack_from("<Q", self._regions[rank], CONTROL_BYTES + which * LINE_BYTES)
        return int(value)

    def wait_for_more(self, rank: int, which: int, seen: int) -> None:
        """Until a counter is beyond ``seen``."""
        deadline = time.monotonic() + WAIT_S
        while self.counter(rank, which) <= seen:
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def flip_header_bit(self, rank: int, which: int, number: int, bit: int) -> None:
        """Of the segment ``number`` in the slots of ``rank``, or of its outbox of inputs."""
        slots = CONTROL_BYTES + COUNTERS * LINE_BYTES
        at = slots + number % self._depth * (LINE_BYTES + self._segment)
        if which == INPUTS:
            outboxes = slots + self._depth * (LINE_BYTES + self._segment)
            at = outboxes + number % 2 * (LINE_BYTES + self._world * self._part)
        self._regions[rank][at + bit // 8] ^= 1 << bit % 8

    def close(self) -> None:
        """Closes ring and regions."""
        self.ring.close()
        for region in self._regions:
            region.close()


def descriptors_of_processes() -> list[int]:
    """This process's pidfds."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # that of listdir itself
            continue
        if "pidfd" in target:
            found.append(int(entry))
    return found
