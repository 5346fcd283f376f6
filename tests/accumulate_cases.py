"""The passes of an accumulator against NumPy, to the bit. ``python accumulate_cases.py`` prints the vectors in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ring_reduce import _core

TYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
SCALES = (1.0, 0.0, 0.37, -3.0, 1 / 3, 2.0**-100)
DIVISORS = (1.0, 0.0, 3.0, 0.37, 4097.3, 2.0**-100)
LENGTHS = [*range(71), 127, 129]
# Enough for three threads: ends on and beside the cuts, and tensors without elements.
MANY = [0, 1, 70_001, 131_072, 0, 64, 63, 65, *[100 + i for i in range(200)], 250_000, 3]

Tensors = Sequence[torch.Tensor]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def addresses(tensors: Tensors) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def accumulate(sums: Tensors, inputs: Tensors, *, fresh: list[bool], scale: float, threads: int = 1) -> None:
    elements, types = [x.numel() for x in inputs], [TYPES[x.dtype] for x in inputs]
    _core.accumulate(addresses(sums), addresses(inputs), elements, types, fresh, scale, threads)


def divide_into(outputs: Tensors, sums: Tensors, *, divisor: float, threads: int = 1) -> None:
    elements, types = [x.numel() for x in outputs], [TYPES[x.dtype] for x in outputs]
    _core.divide_into(addresses(outputs), addresses(sums), elements, types, divisor, threads)


def expected_sum(total: torch.Tensor, x: torch.Tensor, *, fresh: bool, scale: float) -> torch.Tensor:
    """In NumPy, a rounding for each operation; only 16-bit floats are widened by torch."""
    wide = x.to(sum_dtype(x.dtype)).numpy()
    if scale == 0:
        return torch.zeros_like(total) if fresh else total.clone()
    with np.errstate(over="ignore", invalid="ignore"):
        term = wide * wide.dtype.type(scale)
        return torch.from_numpy(term if fresh else total.numpy() + term)


def expected_quotient(total: torch.Tensor, dtype: torch.dtype, *, divisor: float) -> torch.Tensor:
    if divisor == 0:
        return torch.zeros(total.shape, dtype=dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(total.numpy() / total.numpy().dtype.type(divisor)).to(dtype)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Signs of zeros included; any NaN is as good as another."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    nan = expected.isnan()
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[got.element_size()]
    equal = got.view(words) == expected.view(words)
    return bool(torch.where(nan, got.isnan(), equal).all())


def values(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of all magnitudes that the type has, some special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(elements, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-8, 9, (elements,), generator=generator)
    x = (x * 2.0**exponents).to(dtype)
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).smallest_normal / 4]
    )
    places = torch.arange(0, elements, 11)
    x[places] = special.to(dtype)[places // 11 % len(special)]
    return x


def shifted(x: torch.Tensor, shift: int, guard: float) -> tuple[torch.Tensor, Callable[[], bool]]:
    """A copy that starts ``shift`` elements into its memory, and a check that nothing beside it was written."""
    room = torch.full((x.numel() + shift + 8,), guard, dtype=x.dtype)
    view = room[shift : shift + x.numel()]
    view.copy_(x)
    before, behind = room[:shift], room[shift + x.numel() :]
    return view, lambda: bool((before == guard).all() and (behind == guard).all())


def wrong_lengths(dtype: torch.dtype) -> list[Any]:
    """The cases that differ, each length by itself, at addresses that no vector is aligned to."""
    wrong: list[Any] = []
    for length in LENGTHS:
        x, intact = shifted(values(length, dtype, length), length % 5, 77.0)
        start = values(length, sum_dtype(dtype), length + 1000)
        for scale in SCALES:
            for fresh in (False, True):
                old = torch.full_like(start, torch.nan) if fresh else start
                total, untouched = shifted(old, length % 3, 99.0)
                accumulate([total], [x], fresh=[fresh], scale=scale)
                right = same_bits(total, expected_sum(old, x, fresh=fresh, scale=scale))
                if not (right and untouched() and intact()):
                    wrong.append(("accumulate", length, scale, fresh))
        for divisor in DIVISORS:
            out, untouched = shifted(torch.full((length,), torch.nan, dtype=dtype), length % 5, 99.0)
            total, intact = shifted(start, length % 3, 77.0)
            divide_into([out], [total], divisor=divisor)
            if not (
                same_bits(out, expected_quotient(start, dtype, divisor=divisor)) and untouched() and intact()
            ):
                wrong.append(("divide_into", length, divisor))
    return wrong


def wrong_many(threads: int) -> list[Any]:
    """The cases that differ, of many tensors of all types in one call."""
    wrong: list[Any] = []
    dtypes = [list(TYPES)[index % 4] for index in range(len(MANY))]
    inputs = [values(size, dtype, size) for size, dtype in zip(MANY, dtypes, strict=True)]
    fresh = [index % 3 == 0 for index in range(len(MANY))]
    old = [values(x.numel(), sum_dtype(x.dtype), x.numel() + 1) for x in inputs]
    old = [torch.full_like(x, torch.nan) if new else x for x, new in zip(old, fresh, strict=True)]
    for scale in SCALES:
        sums = [x.clone() for x in old]
        accumulate(sums, inputs, fresh=fresh, scale=scale, threads=threads)
        for i, (total, x) in enumerate(zip(sums, inputs, strict=True)):
            if not same_bits(total, expected_sum(old[i], x, fresh=fresh[i], scale=scale)):
                wrong.append(("accumulate", i, scale))
    sums = [values(x.numel(), sum_dtype(x.dtype), x.numel() + 2) for x in inputs]
    for divisor in DIVISORS:
        outputs = [torch.full_like(x, torch.nan) for x in inputs]
        divide_into(outputs, sums, divisor=divisor, threads=threads)
        for i, (out, total) in enumerate(zip(outputs, sums, strict=True)):
            if not same_bits(out, expected_quotient(total, out.dtype, divisor=divisor)):
                wrong.append(("divide_into", i, divisor))
    return wrong


def wrong_everywhere() -> list[Any]:
    """All of the above."""
    found = [(str(dtype), case) for dtype in TYPES for case in wrong_lengths(dtype)]
    return found + [(f"{threads} threads", case) for threads in (1, 2, 3) for case in wrong_many(threads)]


if __name__ == "__main__":
    print(_core.vector_isa())
    wrong = wrong_everywhere()
    print(*wrong[:10], f"{len(wrong)} wrong", sep="\n")
