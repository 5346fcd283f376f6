"""What a ring has to give: slow, obvious, and to the last bit.

Tensors are NumPy arrays in the type that is computed in: float64, float32 (for 16-bit floats too, which float32 holds
exactly), int32, int64. ``ElementType.store`` rounds them to what the element type holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import ring_reduce as rr
from ring_reduce.normalization import Kind, Normalization

Counts = Sequence[float]


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to the nearest bfloat16, ties to even, as float32. NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(values), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32))


@dataclass(frozen=True)
class ElementType:
    name: str
    bytes: int
    compute: type[np.generic]
    unit: float = 0.0  # largest relative error of one rounding to it
    tiny: float = 0.0  # smallest positive number
    largest: float = math.inf

    @property
    def is_integer(self) -> bool:
        return self.name.startswith("int")

    def store(self, values: np.ndarray) -> np.ndarray:
        """Rounds to what the type holds."""
        if self.name == "float16":
            with np.errstate(over="ignore"):
                return values.astype(np.float16).astype(np.float32)
        return round_to_bfloat16(values) if self.name == "bfloat16" else values


TYPES = {
    t.name: t
    for t in [
        ElementType("float64", 8, np.float64, 2.0**-53, 2.0**-1074),
        ElementType("float32", 4, np.float32, 2.0**-24, 2.0**-149),
        ElementType("float16", 2, np.float32, 2.0**-11, 2.0**-24, 65504.0),
        ElementType("bfloat16", 2, np.float32, 2.0**-8, 2.0**-133),
        ElementType("int32", 4, np.int32),
        ElementType("int64", 8, np.int64),
    ]
}
FLOATS = [name for name, t in TYPES.items() if not t.is_integer]
INTEGERS = [name for name, t in TYPES.items() if t.is_integer]


def chunks(elements: int, element: ElementType, world: int) -> list[slice]:
    """The chunks of an all_reduce: whole packs of 16 bytes, the first ones longer by one pack."""
    pack = 16 // element.bytes
    packs = -(-elements // pack)
    ends = [0]
    for rank in range(world):
        ends.append(ends[-1] + packs // world + (1 if rank < packs % world else 0))
    return [slice(min(a * pack, elements), min(b * pack, elements)) for a, b in pairwise(ends)]


def equal_parts(elements: int, world: int) -> list[slice]:
    """The chunks of a reduce_scatter and an all_gather."""
    length = elements // world
    return [slice(rank * length, (rank + 1) * length) for rank in range(world)]


def all_reduce(
    inputs: Sequence[np.ndarray],
    element: ElementType,
    normalization: Normalization = rr.SUM,
    counts: Counts | None = None,
    algorithm: str = "ring",
) -> np.ndarray:
    """The result of every rank, bit for bit. ``algorithm`` "direct" stands for one shot too."""
    result = np.empty_like(inputs[0])
    reduce = reduce_chunk if algorithm == "ring" else reduce_at_once
    for owner, chunk in enumerate(chunks(inputs[0].size, element, len(inputs))):
        parts = [x[chunk] for x in inputs]
        result[chunk] = reduce(parts, owner, element, normalization, counts)
    return result


def reduce_scatter(
    inputs: Sequence[np.ndarray],
    element: ElementType,
    normalization: Normalization = rr.SUM,
    counts: Counts | None = None,
) -> list[np.ndarray]:
    """The result of each rank, bit for bit."""
    return [
        reduce_chunk([x[part] for x in inputs], owner, element, normalization, counts)
        for owner, part in enumerate(equal_parts(inputs[0].size, len(inputs)))
    ]


def exponent_above(k: float) -> int:
    """ceil(log2 k); 0 for 0."""
    exponent = 0
    while k > 0 and 2.0**exponent < k:
        exponent += 1
    while k > 0 and 2.0 ** (exponent - 1) >= k:
        exponent -= 1
    return exponent


def reduce_chunk(
    parts: Sequence[np.ndarray],
    owner: int,
    element: ElementType,
    normalization: Normalization,
    counts: Counts | None,
) -> np.ndarray:
    """A chunk on its way around the ring: from the rank after its owner to the owner, rounded at each hop."""
    world, kind, number = len(parts), normalization.kind, element.compute
    uses_count = kind in (Kind.DIVIDE_BY_COUNT, Kind.WEIGHTED_MEAN)
    scaled = kind is Kind.WEIGHTED_MEAN or (element.name == "float16" and kind is not Kind.SUM)
    wire: np.ndarray | None = None  # None: nothing was counted yet
    exponent, running_count = 0, 0.0
    for hop in range(world):
        rank = (owner + 1 + hop) % world
        count = float(counts[rank]) if uses_count and counts is not None else 1.0
        running_count += count
        before, exponent = exponent, 0
        if scaled:
            exponent = exponent_above(running_count if kind is Kind.WEIGHTED_MEAN else hop + 1)
        weight = count if kind is Kind.WEIGHTED_MEAN else 1.0
        with np.errstate(all="ignore"):
            own = parts[rank] * number(weight * 2.0**-exponent) if scaled else parts[rank]
            if wire is not None and scaled:
                wire = wire * number(2.0 ** (before - exponent))
            if wire is None:
                wire = own if count != 0 else None
            elif count != 0:
                wire = wire + own
            if hop < world - 1 and wire is not None:
                wire = element.store(wire)
    if wire is None:
        return np.zeros_like(parts[0])
    divisors = {Kind.SUM: 1.0, Kind.MEAN: world, Kind.DIVIDE_BY: normalization.total}
    divisor = divisors.get(kind, running_count) * 2.0**-exponent
    with np.errstate(all="ignore"):
        return element.store(wire if kind is Kind.SUM else wire / number(divisor))


def reduce_at_once(
    parts: Sequence[np.ndarray],
    owner: int,
    element: ElementType,
    normalization: Normalization,
    counts: Counts | None,
) -> np.ndarray:
    """A chunk where one rank reads all inputs: added in the order of the ring, in the wider type, and rounded once."""
    world, kind, number = len(parts), normalization.kind, element.compute
    ranks = [(owner + 1 + step) % world for step in range(world)]
    numbers = {rank: float(counts[rank]) if counts is not None else 1.0 for rank in ranks}
    total_count = 0.0
    for rank in ranks:
        total_count += numbers[rank]
    weighted = kind is Kind.WEIGHTED_MEAN
    exponent = exponent_above(total_count) if weighted else 0
    total: np.ndarray | None = None
    with np.errstate(all="ignore"):
        for rank in ranks:
            if numbers[rank] != 0:
                own = parts[rank] * number(numbers[rank] * 2.0**-exponent) if weighted else parts[rank]
                total = own if total is None else total + own
        if total is None:
            return np.zeros_like(parts[0])
        divisors = {Kind.SUM: 1.0, Kind.MEAN: world, Kind.DIVIDE_BY: normalization.total}
        divisor = divisors.get(kind, total_count) * 2.0**-exponent
        return element.store(total if kind is Kind.SUM else total / number(divisor))


def true_result(
    inputs: Sequence[np.ndarray], normalization: Normalization = rr.SUM, counts: Counts | None = None
) -> np.ndarray:
    """The same without any rounding that matters: in float64, or wider where the machine can."""
    total, divisor, _ = _wide_sum(inputs, normalization, counts)
    return (total / divisor if divisor else np.zeros_like(total)).astype(np.float64)


def error_bound(
    inputs: Sequence[np.ndarray],
    element: ElementType,
    normalization: Normalization = rr.SUM,
    counts: Counts | None = None,
) -> np.ndarray:
    """How far from :func:`true_result` a right result may be, by element.

    Each of n hops rounds a product, a sum and, for 16-bit floats, the wire; the finish rounds its divisor, a quotient
    and the result. To that come n roundings at the smallest number, which the wire's power of two and the divisor
    scale by less than 2 sum(w) / divisor.
    """
    _, divisor, magnitude = _wide_sum(inputs, normalization, counts)
    if not divisor:
        return np.zeros(inputs[0].shape)
    world = len(inputs)
    compute_unit = TYPES[element.compute.__name__].unit
    wire_unit = element.unit if element.bytes == 2 else 0.0
    # expm1: 1 + 2**-53 is 1 in float64.
    growth = math.expm1((2 * world + 3) * math.log1p(compute_unit) + world * math.log1p(wire_unit))
    scale = max(1.0, 2.0 * world / divisor)
    bound = growth * magnitude / divisor + world * element.tiny * max(scale, 2.0)
    return np.asarray(bound, np.float64)


def _wide_sum(
    inputs: Sequence[np.ndarray], normalization: Normalization, counts: Counts | None
) -> tuple[np.ndarray, float, np.ndarray]:
    """The sum, what divides it, and the sum of magnitudes."""
    kind, world = normalization.kind, len(inputs)
    uses_count = kind in (Kind.DIVIDE_BY_COUNT, Kind.WEIGHTED_MEAN)
    weights = [1.0] * world
    if uses_count:
        assert counts is not None
        weights = [(c if kind is Kind.WEIGHTED_MEAN else 1.0) if c else 0.0 for c in counts]
    total = np.zeros(inputs[0].shape, np.longdouble)
    magnitude = np.zeros(inputs[0].shape, np.longdouble)
    for weight, x in zip(weights, inputs, strict=True):
        if weight:
            total += np.longdouble(weight) * x.astype(np.longdouble)
            magnitude += np.longdouble(weight) * np.abs(x.astype(np.longdouble))
    counted = float(sum(counts)) if uses_count and counts is not None else 0.0
    divisors = {Kind.SUM: 1.0, Kind.MEAN: float(world), Kind.DIVIDE_BY: normalization.total}
    return total, divisors.get(kind, counted), magnitude


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether all bits are equal; one NaN is as good as another. Tells -0.0 from 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    equal = np.ascontiguousarray(left).view(unsigned) == np.ascontiguousarray(right).view(unsigned)
    if left.dtype.kind == "f":
        equal |= np.isnan(left) & np.isnan(right)
    return bool(equal.all())


def first_difference(left: np.ndarray, right: np.ndarray) -> str:
    """For messages: where two arrays of a shape differ first."""
    for index, (a, b) in enumerate(zip(left.ravel(), right.ravel(), strict=True)):
        if not same_bits(np.asarray([a]), np.asarray([b])):
            return f"element {index} of {left.size} is {a!r} and should be {b!r}"
    return "no difference"
