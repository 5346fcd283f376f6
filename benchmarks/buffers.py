"""The buffers of a benchmark: another one and another content in every call, and the exact result of each."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .peers import Op
from .rounding import rounding

PERIOD = 4_194_301  # elements after which an input repeats: a prime, so that no two chunks of a large tensor look alike
SHIFTS = 4093  # a prime, so that no number of buffers brings the same shift back to the same buffer soon
LARGEST_VALUE = 3  # bfloat16 counts to 256: exact up to 85 ranks


def integers(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Small random integers: their sums are exact in every dtype, so that a single wrong element shows."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(LARGEST_VALUE + 1, (length,), generator=generator, dtype=torch.int32).to(dtype)


def normals(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, which show what rounding does: exact inputs can't see lost bits."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


class Inputs:
    """What each rank puts in, and what comes out: windows, at a shift, into data that repeats after ``PERIOD``.

    All ranks know all ranks' data, and shift alike.
    """

    def __init__(
        self,
        make: Callable[[int, int, torch.dtype], Tensor],
        *,
        rank: int,
        world: int,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._world = world
        length = min(count, PERIOD) + SHIFTS
        self._own = make(rank, length, dtype).to(device)
        total = torch.zeros(length, dtype=torch.float64)
        magnitude = torch.zeros(length, dtype=torch.float64)
        for peer in range(world):
            data = make(peer, length, dtype).double()
            total += data
            magnitude += data.abs_()
        self._total, self._magnitude = total.to(device), magnitude.to(device)

    def fill(self, x: Tensor, shift: int) -> None:
        """Writes this rank's input."""
        for piece in x.split(PERIOD):
            piece.copy_(self._own[shift : shift + len(piece)])

    def changed(self, x: Tensor, shift: int) -> int:
        """Elements of ``x`` that are not the input any more."""
        return sum(int((piece != self._own[shift : shift + len(piece)]).sum()) for piece in x.split(PERIOD))

    def wrong(self, out: Tensor, shift: int, op: Op) -> int:
        """Elements of ``out`` that are not exactly the result. For integers."""
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        wrong = 0
        for piece in out.split(PERIOD):
            expected = self._total[shift : shift + len(piece)].to(wide)
            if op is Op.MEAN:
                expected = expected / self._world
            wrong += int((piece != expected.to(out.dtype)).sum())
        return wrong

    def relative_error(self, out: Tensor, op: Op) -> float:
        """The largest |result - exact| / sum of |inputs|, the exact one in float64; infinity if any is not finite.

        Against the inputs and not the result, which cancellation may bring near 0: who rounds each addition once stays
        below (n - 1) times half the type's epsilon, whatever the data.
        """
        worst = 0.0
        for piece in out.split(PERIOD):
            got = piece.double()
            if op is Op.MEAN:
                got = got * self._world
            error = (got - self._total[: len(piece)]).abs_() / self._magnitude[: len(piece)].clamp_min(1e-300)
            largest = float(error.max()) if len(error) else 0.0
            worst = max(worst, largest if math.isfinite(largest) else math.inf)
        return worst

    def outside(self, out: Tensor, op: Op) -> int:
        """Elements that are farther from the exact result than rounding explains, NaN included. For random data."""
        outside = 0
        for piece in out.split(PERIOD):
            divisor = self._world if op is Op.MEAN else 1
            exact, magnitude = (part[: len(piece)] / divisor for part in (self._total, self._magnitude))
            within = (piece.double() - exact).abs_() <= rounding(magnitude, self._world, out.dtype)
            outside += int((~within).sum())
        return outside


class RotatedBuffers:
    """Inputs and outputs of one size that together exceed ``rotate_bytes`` each, handed out in turn.

    A buffer is refilled right after its call and comes back only when all others have: by then the caches have lost
    it, as they have lost a gradient bucket by the time that it is reduced. There are no more buffers than ``calls`` and
    2: those of small sizes are never handed out twice, and as much memory as the others would take is written once.
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        rotate_bytes: int,
        calls: int,
    ) -> None:
        self._inputs = inputs
        nbytes = count * dtype.itemsize
        slots = min(max(2, -(-rotate_bytes // nbytes)), calls + 2)
        self._xs = torch.empty(slots, count, dtype=dtype, device=device)
        # Pages of untouched zeros do not exist yet, and the first timed calls would fault them in.
        self._outs = torch.ones(slots, count, dtype=dtype, device=device)
        self._shifts = [0] * slots
        self._fills = 0
        self._slot = -1
        for slot in range(slots):
            self._fill(slot)
        if slots * nbytes < rotate_bytes:
            torch.ones(
                rotate_bytes, dtype=torch.uint8, device=device
            )  # takes the buffers' place in the caches

    def take(self, *, in_place: bool) -> tuple[Tensor, Tensor]:
        """The next input, with a content that it has not had before, and where its result goes."""
        self._slot = (self._slot + 1) % len(self._shifts)
        x = self._xs[self._slot]
        return x, x if in_place else self._outs[self._slot]

    def refill(self) -> None:
        """Gives the buffer taken last its next input."""
        self._fill(self._slot)

    def wrong(self, op: Op, *, in_place: bool) -> int:
        """Elements of the buffers taken last that are wrong: of the result, and out of place of the input too."""
        x, shift = self._xs[self._slot], self._shifts[self._slot]
        if in_place:
            return self._inputs.wrong(x, shift, op)
        return self._inputs.wrong(self._outs[self._slot], shift, op) + self._inputs.changed(x, shift)

    def _fill(self, slot: int) -> None:
        self._fills += 1
        self._shifts[slot] = self._fills % SHIFTS
        self._inputs.fill(self._xs[slot], self._shifts[slot])
