"""The GPU ring's own lines run on the CPU: tests/native/cuda_ring_host.cpp, with threads for a block's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import programs
import reference
from cases import Case
from reference import ElementType
from ring_reduce.arrays import ELEMENT_TYPES

FAILURES = ("", "no segment", "no slot", "mismatch", "corrupt", "bad count", "infinite count")
_GUARD = 64  # bytes on both sides of an output that have to stay as they are


def build(csrc: Path, directory: Path, *options: str) -> Path:
    """The library, with the headers of ``csrc``, which may be a copy with a fault."""
    source = programs.NATIVE / "cuda_ring_host.cpp"
    flags = ["-O1", "-fPIC", "-Wall", "-Wextra", *options]
    return programs.link(
        [programs.compile_object(source, csrc, directory, *flags)],
        directory / "cuda_ring.so",
        "-shared",
        *options,
    )


def to_bytes(values: np.ndarray, element: ElementType) -> np.ndarray:
    """As the element type lies in memory; exact, since ``values`` hold nothing else."""
    if element.name == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if element.name == "float16":
        return values.astype(np.float16).view(np.uint8)
    return values.view(np.uint8)


def from_bytes(raw: np.ndarray, element: ElementType) -> np.ndarray:
    """In the type that is computed in."""
    if element.name == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if element.name == "float16":
        return raw.view(np.float16).astype(np.float32)
    return raw.view(element.compute)


class HostRing:
    """All ranks of a ring; see the C functions. A context manager."""

    def __init__(self, library: Path, world: int, **settings: int) -> None:
        self.world = world
        self._library = ctypes.CDLL(str(library))
        self._library.ring_make.restype = ctypes.c_void_p
        self._library.ring_total_count.restype = ctypes.c_double
        self._library.ring_calls.restype = ctypes.c_uint64
        self._library.ring_completed.restype = ctypes.c_uint64
        chosen = {
            "lanes": 2,
            "segment_bytes": 128,
            "depth": 3,
            "window": 2,
            "timeout_ns": 20_000_000_000,
            "threads": 1,
            "first_segment": 0,
            **settings,
        }
        self._ring = ctypes.c_void_p(
            self._library.ring_make(
                world,
                chosen["lanes"],
                ctypes.c_size_t(chosen["segment_bytes"]),
                chosen["depth"],
                chosen["window"],
                ctypes.c_uint64(chosen["timeout_ns"]),
                chosen["threads"],
                ctypes.c_uint64(chosen["first_segment"]),
            )
        )

    def __enter__(self) -> HostRing:
        return self

    def __exit__(self, *error: object) -> None:
        self._library.ring_free(self._ring)

    def run(
        self, case: Case, *, read_counts: bool = False, delay_seed: int = 0, absent_rank: int = -1
    ) -> Result:
        """One call; every output is poisoned before."""
        inputs = [_Buffer(case.input(rank), case) for rank in range(self.world)]
        outputs = [_Buffer(None, case) for _ in inputs] if case.out_of_place else inputs
        counts = None if case.counts is None else (ctypes.c_double * self.world)(*case.counts)
        failure = self._library.ring_all_reduce(
            self._ring,
            ELEMENT_TYPES[case.type],
            int(case.normalization.kind),
            ctypes.c_double(case.normalization.total),
            ctypes.c_uint64(case.size),
            _addresses(inputs),
            _addresses(outputs),
            counts,
            int(read_counts),
            ctypes.c_uint32(delay_seed),
            absent_rank,
        )
        assert all(buffer.intact() for buffer in [*inputs, *outputs]), f"{case}: written outside"
        totals = [self._library.ring_total_count(self._ring, rank) for rank in range(self.world)]
        return Result(FAILURES[failure], [out.values() for out in outputs], totals)

    def run_lanes(self, values: np.ndarray, stopped: int) -> int:
        """A sum of one rank alone, whose first lanes find the ring stopped; returns how many lanes there are."""
        address = ctypes.c_void_p(values.ctypes.data)
        return int(self._library.ring_run_lanes(self._ring, ctypes.c_uint64(values.size), address, stopped))

    def calls(self, rank: int) -> int:
        """Ended ones."""
        return int(self._library.ring_calls(self._ring, rank))

    def completed(self, rank: int) -> int:
        """The latest call that did not fail."""
        return int(self._library.ring_completed(self._ring, rank))

    def failed_rank(self) -> int:
        return int(self._library.ring_failed_rank(self._ring))


class Result:
    def __init__(self, failure: str, outputs: list[np.ndarray], totals: list[float]) -> None:
        self.failure, self.outputs, self.totals = failure, outputs, totals


class _Buffer:
    """A rank's tensor, ``case.offset`` elements out of alignment, among guards."""

    def __init__(self, values: np.ndarray | None, case: Case) -> None:
        self._element = case.element
        length = case.size * case.element.bytes
        raw = np.full(length, 0xEE, np.uint8) if values is None else to_bytes(values, case.element)
        self._room = np.full(raw.size + 2 * _GUARD + 128, 0x55, np.uint8)
        aligned = -self._room.ctypes.data % 64 + _GUARD
        self._begin = aligned + case.offset * case.element.bytes
        self._end = self._begin + raw.size
        self._room[self._begin : self._end] = raw
        self.address = self._room.ctypes.data + self._begin

    def values(self) -> np.ndarray:
        return from_bytes(self._room[self._begin : self._end].copy(), self._element)

    def intact(self) -> bool:
        return bool((self._room[: self._begin] == 0x55).all() and (self._room[self._end :] == 0x55).all())


def _addresses(buffers: Sequence[_Buffer]) -> Any:
    return (ctypes.c_void_p * len(buffers))(*(buffer.address for buffer in buffers))


def wrong(ring: HostRing, case: Case, **disturbance: Any) -> str:
    """What a call gets wrong, or an empty text."""
    result = ring.run(case, **disturbance)
    if result.failure:
        return f"{case}: {result.failure}"
    expected = case.expected(ring.world)
    for rank, out in enumerate(result.outputs):
        if not reference.same_bits(out, expected):
            return f"{case}: rank {rank}: {reference.first_difference(out, expected)}"
    return ""
