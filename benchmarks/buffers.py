"""The inputs of a benchmark: another buffer and another content in every call, and the exact result of each.

A rank's inputs are windows, at a shift that changes with every call, into a bank of small random integers. Their sums
are exact in every dtype, so that a single wrong element shows; all ranks shift alike, so that the expected result is
the same window of the summed banks.
"""

from __future__ import annotations

import torch

from .peers import Op

SHIFTS = 4093  # a prime, so that no number of buffers brings the same shift back to the same buffer soon
LARGEST_VALUE = 3  # bfloat16 counts to 256: exact up to 85 ranks


class RotatedBuffers:
    """Buffers of one size that together exceed ``rotate_bytes``, handed out in turn.

    A buffer is refilled right after its call and comes back only when all others have: by then the caches have lost
    it, as they have lost a gradient bucket by the time that it is reduced.
    """

    def __init__(self, *, rank: int, world: int, count: int, dtype: torch.dtype, rotate_bytes: int) -> None:
        self._world = world
        self._bank = _bank(rank, count + SHIFTS, dtype)
        self._total = torch.zeros(
            count + SHIFTS, dtype=torch.float64 if dtype is torch.float64 else torch.float32
        )
        for peer in range(world):
            self._total += _bank(peer, count + SHIFTS, dtype)
        slots = max(2, -(-rotate_bytes // max(1, count * dtype.itemsize)))
        self._slots = torch.empty(slots, count, dtype=dtype)
        self._shifts = [0] * slots
        self._fills = 0
        self._slot = -1
        for slot in range(slots):
            self._fill(slot)

    def take(self) -> torch.Tensor:
        """The next buffer, with an input that it has not had before."""
        self._slot = (self._slot + 1) % len(self._shifts)
        return self._slots[self._slot]

    def refill(self) -> None:
        """Gives the buffer taken last its next input."""
        self._fill(self._slot)

    def wrong(self, op: Op) -> int:
        """How many elements of the buffer taken last are not the exact result of ``op``."""
        got = self._slots[self._slot]
        shift = self._shifts[self._slot]
        expected = self._total[shift : shift + got.numel()]
        if op is Op.MEAN:
            expected = expected / self._world
        return int((got != expected.to(got.dtype)).sum())

    def _fill(self, slot: int) -> None:
        self._fills += 1
        shift = self._shifts[slot] = self._fills % SHIFTS
        self._slots[slot].copy_(self._bank[shift : shift + self._slots.shape[1]])


def _bank(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(LARGEST_VALUE + 1, (length,), generator=generator, dtype=torch.int32).to(dtype)
