"""A ring's pass over one segment on a GPU: out = (x * x_scale + y * y_scale) / divisor.

To the bit what ``Combine`` of csrc/passes.h gives. Scales and divisor are arguments of the launch, so that no call
allocates, copies from the host or waits for the device.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton's decorator has no types, and it takes none in a kernel but its own.

from __future__ import annotations

import contextlib
import struct

import torch
import triton
import triton.language as tl

BLOCK = 2048  # elements of a thread block
WIDE_BYTES = 16  # tensors that all begin at multiples of this are read and written in accesses of this width
OPTIONS = {
    "num_warps": 4,
    "enable_fp_fusion": False,
}  # a fused multiply-add rounds once where the core rounds twice

# What elements of a type are added up in.
SUM_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


@triton.jit
def _number(word, TYPE: tl.constexpr):
    # Triton passes a float as float32, so a float64 comes as the integer of its bits.
    return word.to(tl.int64).to(tl.float64, bitcast=True).to(TYPE)


@triton.jit
def _combine_block(
    out,
    x,
    y,
    inside,
    x_scale,
    y_scale,
    divisor,
    SUM_TYPE: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """What is loaded is stored as it was unless there is something to compute: a NaN keeps its bits in a copy."""
    total = tl.load(x, mask=inside)
    if SCALED:
        total = total.to(SUM_TYPE) * _number(x_scale, SUM_TYPE)
    if y is not None:
        term = tl.load(y, mask=inside).to(SUM_TYPE)
        if SCALED:
            term = term * _number(y_scale, SUM_TYPE)
        # Integers wrap, also where Triton's debug mode would trap.
        total = tl.add(total.to(SUM_TYPE), term, sanitize_overflow=False)
    if DIVIDED:
        by = _number(divisor, SUM_TYPE)
        # The operator is an approximation in float32.
        total = tl.div_rn(total.to(SUM_TYPE), by) if by.dtype == tl.float32 else total / by
    tl.store(out, total.to(out.dtype.element_ty), mask=inside)


# Not specialized: of each type there are few variants, which differ by what the constants say and nothing else.
@triton.jit(do_not_specialize=["out", "x", "y", "elements", "x_scale", "y_scale", "divisor"])
def combine_kernel(
    out,
    x,
    y,
    elements: tl.int64,
    x_scale: tl.int64,
    y_scale: tl.int64,
    divisor: tl.int64,
    SUM_TYPE: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = (x * x_scale + y * y_scale) / divisor; ``y`` may be None."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    rest = elements - begin
    offsets = tl.arange(0, BLOCK)
    out = tl.multiple_of(out + begin, ALIGNMENT) + offsets
    x = tl.multiple_of(x + begin, ALIGNMENT) + offsets
    if y is not None:
        y = tl.multiple_of(y + begin, ALIGNMENT) + offsets
    if rest >= BLOCK:  # a mask that differs from element to element would split wide accesses
        _combine_block(out, x, y, True, x_scale, y_scale, divisor, SUM_TYPE, SCALED, DIVIDED)
    else:
        _combine_block(out, x, y, offsets < rest, x_scale, y_scale, divisor, SUM_TYPE, SCALED, DIVIDED)


def combine(
    out: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    *,
    x_scale: float = 1.0,
    y_scale: float = 1.0,
    divisor: float = 1.0,
) -> None:
    """``out = (x * x_scale + y * y_scale) / divisor``, on the current stream of their device.

    All are 1-D, contiguous and of one type, size and device. Computed in float64 for float64, in float32 for float32,
    float16 and bfloat16, each operation rounded and nothing fused, then rounded once to the type; int32 and int64 are
    added and wrap. Scales of 1, a divisor of 1 and a ``y`` of None cost nothing; all of them make a copy, to the bit.
    ``out`` may be x or y; else it overlaps neither. ``TypeError`` for other types, ``ValueError`` for other shapes or
    for scales and divisors of integers.
    """
    if x.dtype not in SUM_TYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUM_TYPES)
        raise TypeError(f"x is {x.dtype}; what can be added up is {known}")
    scaled = x_scale != 1 or (y is not None and y_scale != 1)
    divided = divisor != 1
    if (scaled or divided) and not x.dtype.is_floating_point:
        raise ValueError(
            f"x is {x.dtype} with scales {x_scale} and {y_scale} and divisor {divisor}; integers can only be added, "
            f"with all three 1"
        )
    tensors = {"x": x, "out": out} if y is None else {"x": x, "out": out, "y": y}
    _check(tensors)
    elements = x.numel()
    if elements == 0:
        return
    words = struct.unpack("3q", struct.pack("3d", x_scale, y_scale, divisor))
    wide = all(tensor.data_ptr() % WIDE_BYTES == 0 for tensor in tensors.values())
    constants = variant(x.dtype, scaled=scaled, divided=divided, wide=wide)
    grid = (triton.cdiv(elements, BLOCK),)
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        combine_kernel[grid](out, x, y, elements, *words, **constants, **OPTIONS)


def variant(dtype: torch.dtype, *, scaled: bool, divided: bool, wide: bool) -> dict[str, object]:
    """The kernel's constants for elements of this type."""
    return {
        "SUM_TYPE": SUM_TYPES[dtype],
        "SCALED": scaled,
        "DIVIDED": divided,
        "ALIGNMENT": WIDE_BYTES if wide else 1,
        "BLOCK": BLOCK,
    }


def _check(tensors: dict[str, torch.Tensor]) -> None:
    """All by their names, x among them."""
    x = tensors["x"]
    for name, tensor in tensors.items():
        if tensor.dtype is not x.dtype:
            raise TypeError(f"{name} is {tensor.dtype} but x is {x.dtype}: all have to be of one type")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; a segment is 1-D and contiguous"
            )
        if tensor.numel() != x.numel():
            raise ValueError(f"{name} has {tensor.numel()} elements but x {x.numel()}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x on {x.device}")
