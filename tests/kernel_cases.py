"""The Triton kernels of an accumulator in Triton's interpreter, on CPU tensors. Run with TRITON_INTERPRET=1.

``python kernel_cases.py CASE`` prints what is wrong, a line each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

import accumulate_cases
from accumulate_cases import TYPES, expected_quotient, expected_sum, same_bits, shifted, sum_dtype
from ring_reduce.kernels import accumulate as kernels

SIZES = (0, 1, 7, kernels.BLOCK - 1, kernels.BLOCK, kernels.BLOCK + 1, 2 * kernels.BLOCK + 905)
SHIFTS = (0, 0, 1, 3)  # elements; a shift of 0 is aligned
DEVICE_SCALES = (
    torch.tensor(0.37, dtype=torch.float64),
    torch.tensor([3]),
    torch.tensor(-0.25),
    torch.tensor(0),
)


def values(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Without numbers that are denormal in bfloat16, which the interpreter takes for 0."""
    x = accumulate_cases.values(elements, dtype, seed)
    return torch.where(x.abs() < torch.finfo(torch.bfloat16).smallest_normal, torch.zeros_like(x), x)


def tensors() -> list[torch.Tensor]:
    """Of all types, sizes and alignments."""
    return [values(size, dtype, size) for size in SIZES for dtype in TYPES]


def moved(
    xs: list[torch.Tensor], fill: float | None = None
) -> tuple[list[torch.Tensor], list[Callable[[], bool]]]:
    """Copies, or ``fill``, at different alignments, and checks that nothing beside them was written."""
    found = [
        shifted(x if fill is None else torch.full_like(x, fill), SHIFTS[i % len(SHIFTS)], 77.0)
        for i, x in enumerate(xs)
    ]
    return [view for view, _ in found], [check for _, check in found]


def wrong_sums() -> Iterator[str]:
    for scale in (1.0, 0.0, 0.37, *DEVICE_SCALES):
        inputs, _ = moved(tensors())
        fresh = [i % 3 == 0 for i in range(len(inputs))]
        old = [values(x.numel(), sum_dtype(x.dtype), x.numel() + 1) for x in inputs]
        old = [torch.full_like(x, torch.nan) if new else x for x, new in zip(old, fresh, strict=True)]
        sums, checks = moved(old)
        kernels.accumulate(sums, inputs, fresh=fresh, scale=scale)
        for i, (total, x) in enumerate(zip(sums, inputs, strict=True)):
            expected = expected_sum(old[i], x, fresh=fresh[i], scale=float(scale))
            if not same_bits(total, expected) or not checks[i]():
                yield f"sum {i} of {x.numel()} {x.dtype} times {scale!r}"


def wrong_large_sums() -> Iterator[str]:
    """Against float64, with a bound from the two roundings."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = values(5000, dtype, 1).nan_to_num(0, 0, 0)
        total = values(5000, torch.float32, 2).nan_to_num(0, 0, 0)
        term = x.double() * 0.37
        exact = total.double() + term
        kernels.accumulate([total], [x], fresh=[False], scale=0.37)
        bound = torch.finfo(torch.float32).eps * (term.abs() + exact.abs()) + 2.0**-149
        if bool(((total.double() - exact).abs() > bound).any()):
            yield f"sum of {dtype} against float64"


def wrong_zero_scales() -> Iterator[str]:
    """A scale of 0 leaves out NaN and infinity, from the host and from the device."""
    for scale in (0.0, -0.0, torch.tensor(0.0), torch.tensor([0.0], dtype=torch.float64), torch.tensor(0)):
        for bad in (torch.nan, torch.inf):
            kept, fresh = -torch.arange(3000.0), torch.full((3000,), torch.nan)  # -0 among them
            x = torch.full((3000,), bad, dtype=torch.bfloat16)
            kernels.accumulate([kept, fresh], [x, x], fresh=[False, True], scale=scale)
            if not same_bits(kept, -torch.arange(3000.0)) or not torch.equal(fresh, torch.zeros(3000)):
                yield f"a scale of {scale!r} times {bad}"


def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """The interpreter cuts bfloat16 off where a GPU rounds (test_kernels.py looks for the instruction)."""
    if got.dtype is not torch.bfloat16:
        return same_bits(got, expected)
    finite = expected.isfinite()
    steps = (got.view(torch.int16).int() - expected.view(torch.int16).int())[finite]
    return bool((steps.abs() <= 1).all()) and same_bits(got[~finite], expected[~finite])


def wrong_quotients() -> Iterator[str]:
    for divisor in (
        1.0,
        0.0,
        3.0,
        torch.tensor(0.37, dtype=torch.float64),
        torch.tensor([24]),
        torch.tensor(0.0),
    ):
        outputs, checks = moved(tensors(), fill=torch.nan)
        sums, _ = moved([values(x.numel(), sum_dtype(x.dtype), x.numel() + 1) for x in outputs])
        kernels.divide_into(outputs, sums, divisor=divisor)
        for i, (out, total) in enumerate(zip(outputs, sums, strict=True)):
            if not near(out, expected_quotient(total, out.dtype, divisor=float(divisor))) or not checks[i]():
                yield f"quotient {i} of {out.numel()} {out.dtype} by {divisor!r}"


def wrong_exact_quotients() -> Iterator[str]:
    """Those that every type holds, in place where the types agree."""
    for dtype in TYPES:
        expected = (torch.arange(5000) % 97 - 48).to(dtype)
        total = expected.to(sum_dtype(dtype)) * 24
        out = total if dtype is total.dtype else torch.empty_like(expected)
        kernels.divide_into([out], [total], divisor=torch.tensor(24))
        if not torch.equal(out, expected):
            yield f"exact quotient of {dtype}"


def wrong_bad_divisors() -> Iterator[str]:
    for divisor in (torch.tensor(-2.0), torch.tensor(torch.nan), torch.tensor(-3)):
        out = torch.ones(100)
        kernels.divide_into([out], [torch.ones(100)], divisor=divisor)
        if not bool(out.isnan().all()):
            yield f"a divisor of {divisor!r} on the device"


CASES = {
    "sums": wrong_sums,
    "large sums": wrong_large_sums,
    "zero scales": wrong_zero_scales,
    "quotients": wrong_quotients,
    "exact quotients": wrong_exact_quotients,
    "bad divisors": wrong_bad_divisors,
}

if __name__ == "__main__":
    print(*CASES[sys.argv[1]](), "done", sep="\n")
