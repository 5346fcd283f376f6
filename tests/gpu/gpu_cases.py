"""Calls of a ring on seeded data, on virtual GPU ranks and on CPU ranks, compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cpu_world import CpuWorld

import ring_reduce as rr
from ring_reduce.cuda import VirtualRing
from ring_reduce.normalization import Normalization

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64]
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
GUARD = 16  # elements on both sides of a tensor that have to stay as they are

# Small enough that a few thousand elements fill every slot many times over.
SMALL: dict[str, Any] = {"segment_bytes": 128, "depth": 3, "window": 2, "lanes": 3}


@dataclass(frozen=True)
class Case:
    """One call. ``offset`` shifts the tensors, by elements, from their alignment."""

    dtype: torch.dtype
    size: int
    normalization: Normalization = rr.SUM
    counts: tuple[float, ...] | None = None
    offset: int = 0
    out_of_place: bool = False
    seed: int = 0

    def inputs(self, world: int) -> list[torch.Tensor]:
        """A tensor for each rank, on the CPU: all magnitudes, and some special values."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.size)
        if self.dtype in INTEGERS:
            wide = torch.randint(-(2**31), 2**31, (world, self.size), generator=generator)
            return list((wide * (2**31 if self.dtype is torch.int64 else 1)).to(self.dtype))
        x = torch.randn(world, self.size, generator=generator, dtype=torch.float32).to(torch.float64)
        x *= 2.0 ** torch.randint(-8, 9, (world, self.size), generator=generator)
        values = x.to(self.dtype)
        special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(self.dtype).smallest_normal / 4]
        for rank, row in enumerate(values):
            row[5 + rank :: 97] = special[rank % len(special)]
            if self.counts is not None and self.counts[rank] == 0:
                row[:] = torch.nan  # what is not counted has to stay out
        return list(values)


def differences(got: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements whose bits differ; one NaN is as good as another."""
    words = WORDS[expected.element_size()]
    same = got.view(words) == expected.view(words)
    if expected.dtype.is_floating_point:
        same |= got.isnan() & expected.isnan()
    return int((~same).sum())


class Placed:
    """A tensor of ``size`` on the GPU, ``offset`` elements out of alignment, among guards."""

    def __init__(self, values: torch.Tensor, offset: int) -> None:
        size = values.numel()
        self.room = torch.full((size + 2 * GUARD + offset,), 77, dtype=values.dtype, device="cuda")
        self.view = self.room[GUARD + offset : GUARD + offset + size]
        self.view.copy_(values)
        self.before, self.behind = self.room[: GUARD + offset], self.room[GUARD + offset + size :]

    def intact(self) -> bool:
        return bool((self.before == 77).all()) and bool((self.behind == 77).all())


def wrong(ring: VirtualRing, cpu: CpuWorld, case: Case, **disturbance: Any) -> str:
    """What a call gets wrong, or ""."""
    inputs = case.inputs(cpu.world)
    expected = cpu.all_reduce(inputs, case.normalization, case.counts).to("cuda")
    placed = [Placed(x, case.offset) for x in inputs]
    outs = [Placed(torch.full_like(x, 99), case.offset) for x in inputs] if case.out_of_place else placed
    ring.all_reduce(
        [each.view for each in placed],
        case.normalization,
        counts=case.counts,
        out=[each.view for each in outs] if case.out_of_place else None,
        **disturbance,
    )
    torch.cuda.synchronize()
    ring.check()
    for rank, out in enumerate(outs):
        different = differences(out.view, expected)
        if different:
            words = WORDS[expected.element_size()]
            at = int((out.view.view(words) != expected.view(words)).nonzero()[0])
            return f"{case}: rank {rank}: {different} elements differ, element {at}: {out.view[at]} for {expected[at]}"
        if not out.intact() or not placed[rank].intact():
            return f"{case}: rank {rank}: written outside"
        if case.out_of_place and differences(placed[rank].view, inputs[rank].to("cuda")):
            return f"{case}: rank {rank}: the input changed"
    return ""


def normalizations(world: int) -> list[tuple[Normalization, tuple[float, ...] | None]]:
    """Each with counts: whole, fractional, some 0, all 0."""
    whole = tuple(float(3 * rank + 1) for rank in range(world))
    parts = tuple(0.3 * rank + 0.1 for rank in range(world))
    some = tuple(0.0 if rank % 2 else float(rank + 256) for rank in range(world))
    none = (0.0,) * world
    counted = [rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN]
    plain = [(each, None) for each in (rr.SUM, rr.MEAN, rr.divide_by(3), rr.divide_by(4097.3))]
    return [*plain, *((each, counts) for each in counted for counts in (whole, parts, some, none))]


def small_cases(world: int) -> Iterator[Case]:
    """Every dtype and normalization at sizes around each boundary, aligned and not, in place and not."""
    for dtype in [*FLOATS, *INTEGERS]:
        pack, segment = 16 // dtype.itemsize, 128 // dtype.itemsize
        edges = [1, pack, world * pack, world * segment, world * segment * 2]
        sizes = sorted(
            {0, 2, *(edge + step for edge in edges for step in (-1, 0, 1)), world * segment * 40 + 3}
        )
        choices = normalizations(world) if dtype in FLOATS else [(rr.SUM, None)]
        for i, size in enumerate(sizes):
            for j, (normalization, counts) in enumerate(choices):
                offset = (i + j) % 3
                yield Case(dtype, size, normalization, counts, offset, out_of_place=(i + j) % 2 == 1, seed=i)


def large_cases(world: int) -> Iterator[Case]:
    """Sizes that were seen to fail elsewhere, and many more bytes than the slots hold."""
    for i, (dtype, size) in enumerate(
        [
            (torch.float32, 9_999_999),
            (torch.float16, 10_556_587),
            (torch.bfloat16, 1 << 23),
            (torch.int64, 1_000_001),
            (torch.float64, 1_000_003),
            (torch.bfloat16, 1 << 12),
            (torch.float32, 100_003),
        ]
    ):
        choices: Sequence[tuple[Normalization, tuple[float, ...] | None]] = [(rr.SUM, None)]
        if dtype in FLOATS:
            choices = normalizations(world)[i % 2 :: 4]
        for j, (normalization, counts) in enumerate(choices):
            yield Case(dtype, size, normalization, counts, offset=j % 2, out_of_place=i % 2 == 0, seed=j)
