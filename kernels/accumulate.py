"""An accumulator's passes on a GPU: scaled sums over many tensors in one launch, and their one division.

The tensors' addresses travel in a table, which the host does not wait for; a map from thread blocks to tensors stays on
the device. A scale or divisor may be a number or a tensor on the device, which is read there: no call synchronises.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# Triton's decorator has no types, and it takes none in a kernel but its own.

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048  # elements of a thread block
ROW = (
    4  # words of a tensor in the table: its sum, the other tensor, its elements, and whether the sum is fresh
)
WIDE_BYTES = 16  # tensors that all begin at multiples of this are read and written in accesses of this width
OPTIONS = {
    "num_warps": 4,
    "enable_fp_fusion": False,
}  # a fused multiply-add rounds once where the core rounds twice

TRITON_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _locate(blocks, rows, BLOCK: tl.constexpr, ROW: tl.constexpr):
    """The row of this block's tensor, and where in the tensor the block begins."""
    # The tensor's number in the upper 32 bits, that of its block in the lower.
    word = tl.load(blocks + tl.program_id(0))
    return rows + (word >> 32) * ROW, (word & 0xFFFFFFFF) * BLOCK


@triton.jit
def _pointer(word, TYPE: tl.constexpr, WIDE: tl.constexpr):
    pointer = tl.load(word).to(tl.pointer_type(TYPE))
    if WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _accumulate_block(sums, x, inside, fresh, scale):
    """A scale of 0 adds nothing by choosing: NaN times 0 would be NaN."""
    counted = scale != 0
    term = tl.load(x, mask=inside & counted, other=0.0).to(sums.dtype.element_ty) * scale
    old = tl.load(sums, mask=inside & (fresh == 0), other=0.0)
    total = tl.where(fresh == 0, old + term, term)
    tl.store(sums, tl.where(counted, total, old), mask=inside)


@triton.jit
def accumulate_kernel(
    blocks,
    rows,
    scale,
    TYPE: tl.constexpr,
    SUM_TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
):
    """sums = (fresh ? nothing : sums) + scale * x, in the sums' type."""
    row, begin = _locate(blocks, rows, BLOCK, ROW)
    offsets = tl.arange(0, BLOCK)
    sums = _pointer(row, SUM_TYPE, WIDE) + begin + offsets
    x = _pointer(row + 1, TYPE, WIDE) + begin + offsets
    rest = tl.load(row + 2) - begin
    # As blocks: the interpreter can't compare numbers and then use the result for a block.
    fresh = tl.broadcast_to(tl.load(row + 3), [BLOCK])
    factor = tl.broadcast_to(tl.load(scale).to(SUM_TYPE), [BLOCK])
    if rest >= BLOCK:  # a mask that differs from element to element would split wide accesses
        _accumulate_block(sums, x, True, fresh, factor)
    else:
        _accumulate_block(sums, x, offsets < rest, fresh, factor)


@triton.jit
def _divide_block(out, sums, inside, divisor):
    """A divisor of 0 gives zeros. A negative one or NaN, whose error can't be raised here, gives NaN."""
    total = tl.load(sums, mask=inside & (divisor != 0), other=0.0)
    by = tl.where(divisor > 0, divisor, float("nan"))
    # The operator is an approximation in float32.
    quotient = tl.div_rn(total, by) if sums.dtype.element_ty == tl.float32 else total / by
    quotient = tl.where(divisor == 0, 0.0, quotient)
    tl.store(out, quotient.to(out.dtype.element_ty), mask=inside)


@triton.jit
def divide_kernel(
    blocks,
    rows,
    divisor,
    TYPE: tl.constexpr,
    SUM_TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
):
    """out = sums / divisor, divided in the sums' type and rounded once."""
    row, begin = _locate(blocks, rows, BLOCK, ROW)
    offsets = tl.arange(0, BLOCK)
    sums = _pointer(row, SUM_TYPE, WIDE) + begin + offsets
    out = _pointer(row + 1, TYPE, WIDE) + begin + offsets
    rest = tl.load(row + 2) - begin
    by = tl.broadcast_to(tl.load(divisor).to(SUM_TYPE), [BLOCK])
    if rest >= BLOCK:
        _divide_block(out, sums, True, by)
    else:
        _divide_block(out, sums, offsets < rest, by)


def accumulate(
    sums: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    fresh: Sequence[bool],
    scale: float | torch.Tensor,
) -> None:
    """``sums[i] += scale * inputs[i]`` in the type of the sum, or ``= scale * inputs[i]`` where ``fresh[i]``.

    Sums are float64 for float64 inputs, else float32. What stood in a fresh sum does not matter, NaN included. A scale
    of 0, also one on the device, adds nothing, whatever the inputs hold. A tensor as scale has one element.
    """
    if not isinstance(scale, torch.Tensor) and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it has to be a finite number")
    if len(fresh) != len(sums):
        raise ValueError(f"{len(sums)} sums but {len(fresh)} fresh: every list has one entry for each tensor")
    _launch(accumulate_kernel, sums, inputs, fresh, scale)


def divide_into(
    outputs: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], *, divisor: float | torch.Tensor
) -> None:
    """``outputs[i] = sums[i] / divisor``, divided in the type of the sum and rounded once; a divisor of 0 gives zeros.

    An output may be its sum. A divisor on the device that is negative or NaN makes every output NaN.
    """
    if not isinstance(divisor, torch.Tensor) and not divisor >= 0:
        raise ValueError(f"divisor is {divisor}; it has to be a number, 0 or more")
    _launch(divide_kernel, sums, outputs, [False] * len(sums), divisor)


def _launch(
    kernel: Any,
    sums: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    fresh: Sequence[bool],
    number: float | torch.Tensor,
) -> None:
    """One launch for each type and alignment among the tensors, after one copy to the device for all."""
    groups = group(sums, others)
    if not groups:
        return
    device = sums[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        table, number = _table(groups, sums, others, fresh, number)
        begin = 0
        for (dtype, wide), indices in groups.items():
            blocks = _blocks(tuple(sums[i].numel() for i in indices), device, _stream(device))
            rows = table[begin : begin + ROW * len(indices)]
            types = TRITON_TYPES[dtype], TRITON_TYPES[sum_type(dtype)]
            kernel[(len(blocks),)](blocks, rows, number, *types, wide, BLOCK, ROW, **OPTIONS)
            begin += len(rows)


Groups = dict[tuple[torch.dtype, bool], list[int]]


def group(sums: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Groups:
    """The tensors that have elements, by the type of the other one and whether both may be accessed widely."""
    if len(sums) != len(others):
        raise ValueError(
            f"{len(sums)} sums but {len(others)} other tensors: every list has one entry for each tensor"
        )
    groups: Groups = {}
    for i, (total, other) in enumerate(zip(sums, others, strict=True)):
        _check(i, total, other, sums[0].device)
        if total.numel():
            wide = (total.data_ptr() | other.data_ptr()) % WIDE_BYTES == 0
            groups.setdefault((other.dtype, wide), []).append(i)
    return groups


def _check(i: int, total: torch.Tensor, other: torch.Tensor, device: torch.device) -> None:
    if other.dtype not in TRITON_TYPES or total.dtype is not sum_type(other.dtype):
        raise TypeError(
            f"tensor {i} is {other.dtype} and its sum {total.dtype}; sums are float64 for float64, and float32 for "
            f"float32, float16 and bfloat16"
        )
    if total.numel() != other.numel():
        raise ValueError(f"tensor {i} has {other.numel()} elements and its sum {total.numel()}")
    if total.device != device or other.device != device:
        raise ValueError(
            f"tensor {i} is on {other.device} and its sum on {total.device}, but sum 0 is on {device}"
        )
    if not (total.is_contiguous() and other.is_contiguous()):
        raise ValueError(f"tensor {i} or its sum is not contiguous: pass x.contiguous()")


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """What elements of this type are added up in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _table(
    groups: Groups,
    sums: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    fresh: Sequence[bool],
    number: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row for each tensor, group by group, and the number: both on the device."""
    device = sums[0].device
    words = [
        word
        for indices in groups.values()
        for i in indices
        for word in (sums[i].data_ptr(), others[i].data_ptr(), sums[i].numel(), int(fresh[i]))
    ]
    if isinstance(number, torch.Tensor) and number.device == device:
        return _on_device(torch.tensor(words), device), number
    words += struct.unpack("q", struct.pack("d", float(number)))  # float64 as a word of the table
    table = _on_device(torch.tensor(words), device)
    return table, table[-1:].view(torch.float64)


def _on_device(words: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for: from pinned memory, which torch keeps until the copy is done."""
    if device.type != "cuda":
        return words
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "an accumulator's passes can't be captured in a CUDA graph: they read a table of each call's own"
        )
    return words.pin_memory().to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


# Made and used on one stream: no other has to wait for it, and its memory is free in that stream's order.
@functools.lru_cache(maxsize=32)
def _blocks(sizes: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """The map from thread blocks to tensors of these sizes, kept for the next call; see ``_locate``."""
    counts = (torch.tensor(sizes) + BLOCK - 1) // BLOCK
    tensors = torch.repeat_interleave(counts)
    begins = torch.cumsum(counts, 0) - counts
    return _on_device((tensors << 32) | (torch.arange(len(tensors)) - begins[tensors]), device)
