"""The Triton passes of kernels/chunk.py against the core's, to the bit: in Triton's interpreter, and on a GPU.

``TRITON_INTERPRET=1 python chunk_cases.py FILE CASE FILE CASE ...`` prints as JSON what is wrong in each: the first few
findings of a case with the passes of a file, which is kernels/chunk.py or a copy with a fault in it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import reference
from accumulate_cases import same_bits, values
from ring_reduce import MEAN, SUM, Normalization, _core, divide_by
from ring_reduce.arrays import ELEMENT_TYPES

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
SIDE = 64  # elements of guard on either side; a multiple of 16 bytes in every type
GUARD = 77
# Elements that each tensor of a call begins beside a multiple of 16 bytes: out, x, y.
ALIGNED = (0, 0, 0)
SHIFTS = (ALIGNED, (1, 0, 0), (0, 3, 0), (0, 0, 1))
# x_scale, y_scale, divisor. Scales of the ring are powers of two, or a count times one.
NUMBERS = (
    (1.0, 1.0, 1.0),
    (1.0, 1.0, 3.0),
    (0.5, 0.25, 1.0),
    (0.5, 1.0, 0.75),
    (1.0, 2.0**-9 * 37, 4097.3),
    (1.0, 0.37, 1.0),
    (0.0, -1 / 3, -0.0),
)


def load(path: Path) -> ModuleType:
    """The module in this file, which may be a faulty copy of kernels/chunk.py."""
    spec = importlib.util.spec_from_file_location(f"kernels_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Place:
    """A tensor between two guards, ``shift`` elements beside a multiple of 16 bytes."""

    def __init__(self, x: torch.Tensor, shift: int, device: str) -> None:
        self._guard = torch.tensor(GUARD, device=device).to(x.dtype)
        self._room = self._guard.repeat(x.numel() + 2 * SIDE + shift)
        self._begin = SIDE + shift
        self.tensor = self._room[self._begin : self._begin + x.numel()]
        self.tensor.copy_(x)

    def intact(self) -> bool:
        """Whether nothing beside the tensor was written."""
        before, behind = self._room[: self._begin], self._room[self._begin + self.tensor.numel() :]
        return bool((before == self._guard).all() and (behind == self._guard).all())


def poison(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 99)


def integers(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of the whole range, so that half of the sums wrap."""
    generator = torch.Generator().manual_seed(seed)
    range_ = torch.iinfo(dtype)
    return torch.randint(range_.min, range_.max, (elements,), generator=generator, dtype=dtype)


def expected(x: torch.Tensor, y: torch.Tensor | None, numbers: Sequence[float]) -> torch.Tensor:
    """The core's own pass, with which NumPy agrees."""
    out = poison(x)
    second = 0 if y is None else y.data_ptr()
    _core.combine(element_type(x), out.data_ptr(), x.data_ptr(), second, x.numel(), *numbers)
    assert same_bits(out, in_numpy(x, y, numbers)), f"the core's {x.numel()} {x.dtype}, numbers {numbers}"
    return out


def element_type(x: torch.Tensor) -> int:
    return ELEMENT_TYPES[str(x.dtype).removeprefix("torch.")]


def in_numpy(x: torch.Tensor, y: torch.Tensor | None, numbers: Sequence[float]) -> torch.Tensor:
    """A rounding for each operation that there is; only 16-bit floats are converted, by torch."""
    wide = x.dtype if x.dtype is torch.float64 or not x.dtype.is_floating_point else torch.float32
    total = x.to(wide).numpy()
    x_scale, y_scale, divisor = (total.dtype.type(number) for number in numbers)
    with np.errstate(all="ignore"):
        if x.dtype.is_floating_point:
            total = total * x_scale
        if y is not None:
            term = y.to(wide).numpy()
            total = total + (term * y_scale if x.dtype.is_floating_point else term)
        if divisor != 1:
            total = total / divisor
    return torch.from_numpy(total).to(x.dtype)


def sizes(kernels: ModuleType, device: str) -> tuple[int, ...]:
    block: int = kernels.BLOCK
    many = 1_000_003 if device == "cuda" else 2 * block + 905  # the interpreter takes milliseconds a block
    return 0, 1, 7, block - 1, block, block + 1, 2 * block, many


def wrong_call(
    kernels: ModuleType,
    device: str,
    x: torch.Tensor,
    y: torch.Tensor | None,
    numbers: Sequence[float],
    shifts: Sequence[int],
) -> bool:
    """One call of ``combine``: the values in ``out``, the inputs as they were, and the guards beside them all."""
    out = Place(poison(x), shifts[0], device)
    inputs = [Place(part, shifts[1 + i], device) for i, part in enumerate([x] if y is None else [x, y])]
    x_scale, y_scale, divisor = numbers
    kernels.combine(
        out.tensor,
        *(part.tensor for part in inputs),
        x_scale=x_scale,
        y_scale=y_scale,
        divisor=divisor,
    )
    right = expected(x, y, numbers)
    kept = zip(inputs, [x] if y is None else [x, y], strict=True)
    return not (
        same_bits(out.tensor.cpu(), right)
        and all(same_bits(part.tensor.cpu(), before) for part, before in kept)
        and all(place.intact() for place in [out, *inputs])
    )


def wrong_sizes(kernels: ModuleType, device: str) -> Iterator[str]:
    """Every type and size, with and without y; on a GPU at every alignment, too."""
    for dtype in (*INTEGERS, *FLOATS):
        make = values if dtype.is_floating_point else integers
        for i, size in enumerate(sizes(kernels, device)):
            x, y = make(size, dtype, size), make(size, dtype, size + 1)
            for j, shifts in enumerate(SHIFTS if device == "cuda" else (SHIFTS[-1], SHIFTS[i % len(SHIFTS)])):
                numbers = NUMBERS[(i + j) % len(NUMBERS)] if dtype.is_floating_point else NUMBERS[0]
                other = y if (i + j) % 4 else None
                if wrong_call(kernels, device, x, other, numbers, shifts):
                    yield f"{size} {dtype}, numbers {numbers}, shifts {shifts}, y {other is not None}"


def wrong_numbers(kernels: ModuleType, device: str) -> Iterator[str]:
    """Every combination of numbers and operands, in every type of float."""
    for dtype in FLOATS:
        x, y = values(999, dtype, 1), values(999, dtype, 2)
        for numbers in NUMBERS:
            for other in (None, y):
                if wrong_call(kernels, device, x, other, numbers, ALIGNED):
                    yield f"{dtype}, numbers {numbers}, y {other is not None}"


def wrong_in_place(kernels: ModuleType, device: str) -> Iterator[str]:
    """An out that is an input."""
    for dtype in (*FLOATS, *INTEGERS):
        make = values if dtype.is_floating_point else integers
        numbers = NUMBERS[3] if dtype.is_floating_point else NUMBERS[0]
        x, y = make(5001, dtype, 1), make(5001, dtype, 2)
        for which in (0, 1):
            inputs = [Place(part, 0, device) for part in (x, y)]
            out = inputs[which].tensor
            x_scale, y_scale, divisor = numbers
            kernels.combine(
                out,
                *(part.tensor for part in inputs),
                x_scale=x_scale,
                y_scale=y_scale,
                divisor=divisor,
            )
            right = expected(x, y, numbers)
            if not same_bits(out.cpu(), right):
                yield f"{dtype} in place of input {which}"


def wrong_copies(kernels: ModuleType, device: str) -> Iterator[str]:
    """With nothing to compute every bit stays, those of a NaN too."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (*FLOATS, *INTEGERS):
        for shifts in SHIFTS[:2]:
            size = kernels.BLOCK + 77
            words = torch.randint(0, 255, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
            x = words.to(device).view(dtype)
            place = Place(poison(x), shifts[0], device)
            kernels.combine(place.tensor, x)
            if not (torch.equal(place.tensor.cpu().view(torch.uint8), words) and place.intact()):
                yield f"a copy of {dtype}, shifts {shifts}"


def ring(
    kernels: ModuleType, parts: list[torch.Tensor], owner: int, normalization: Normalization
) -> torch.Tensor:
    """A chunk from the rank after its owner to the owner, whose output it is."""
    world = len(parts)
    # As csrc/scaling.h has it: what a float16 that is divided loses on its way is a power of two.
    scaled = parts[0].dtype is torch.float16 and normalization is not SUM
    exponents = [reference.exponent_above(hop) if scaled else 0 for hop in range(world + 1)]
    slot, output = (poison(parts[0]) for _ in range(2))
    for hop in range(world):
        own, last = parts[(owner + 1 + hop) % world], hop == world - 1
        own_scale = 2.0 ** -exponents[hop + 1]
        total = float(world) if normalization is MEAN else normalization.total or 1.0
        divisor = total * own_scale if last and normalization is not SUM else 1.0
        out = output if last else slot
        if hop == 0:
            kernels.combine(out, own, x_scale=own_scale, divisor=divisor)
        else:
            received_scale = 2.0 ** (exponents[hop] - exponents[hop + 1])
            kernels.combine(out, slot, own, x_scale=received_scale, y_scale=own_scale, divisor=divisor)
    return output


def wrong_rings(kernels: ModuleType, device: str) -> Iterator[str]:
    """A whole reduce-scatter of five ranks through the passes, against the ring that the core is tested with."""
    for dtype, normalization in (
        (torch.float64, divide_by(7)),
        (torch.float32, MEAN),
        (torch.float16, MEAN),
        (torch.bfloat16, divide_by(256)),
        (torch.bfloat16, SUM),
        (torch.int64, SUM),
    ):
        make = values if dtype.is_floating_point else integers
        parts = [make(1500, dtype, rank) for rank in range(5)]
        element = reference.TYPES[str(dtype).removeprefix("torch.")]
        wide = torch.from_numpy(np.empty(0, element.compute)).dtype
        for owner in range(2):
            whole = reference.reduce_chunk(
                [part.to(wide).numpy() for part in parts], owner, element, normalization, None
            )
            right = torch.from_numpy(whole).to(dtype)
            found = ring(kernels, [part.to(device) for part in parts], owner, normalization)
            if not same_bits(found.cpu(), right):
                yield f"a ring of {dtype}, {normalization}, to rank {owner}"


Case = Callable[[ModuleType, str], Iterator[str]]
CASES: dict[str, Case] = {
    "sizes": wrong_sizes,
    "numbers": wrong_numbers,
    "in place": wrong_in_place,
    "copies": wrong_copies,
    "rings": wrong_rings,
}


def round_bfloat16_right() -> None:
    """Triton's interpreter truncates a float32 to bfloat16, where a GPU rounds, and has denormals wrong."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        types = src.dtype.scalar, dst_type.scalar
        if types == (tl.bfloat16, tl.float32):
            data = torch.from_numpy(src.data.view(np.int16)).view(torch.bfloat16).float().numpy()
        elif types == (tl.float32, tl.bfloat16):
            data = torch.from_numpy(src.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            return original(self, src, dst_type)
        return TensorHandle(data, dst_type.scalar)

    InterpreterBuilder.cast_impl = cast


def main(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")  # of infinities and NaN that meet
    round_bfloat16_right()
    found = []
    for path, case in zip(arguments[::2], arguments[1::2], strict=True):
        found.append(list(itertools.islice(CASES[case](load(Path(path)), "cpu"), 3)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
