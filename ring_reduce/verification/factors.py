"""Names for a measured factor: the products of a step's sizes that come to the same number.

A gradient that was divided once too often, or never, is the right one times such a product. The symbols:

=======  ============================================================================================
symbol   size
=======  ============================================================================================
n        ranks
N        micro-batches that a rank's group is planned to have
k        micro-batches that each rank's group had, where that is not N: a short group
K        micro-batches of all ranks, where their groups are not equally long
m        samples of a micro-batch, where all are equal
c        counted tokens of a micro-batch, where all are equal and a count is not a number of samples
B, B/n   global batch in samples; batch of a rank, where all are equal
T, T/n   the same in counted tokens, where a count is not a number of samples
=======  ============================================================================================

Sizes that are 1 name nothing, but for k: a group of 1 that was divided by N is short all the same. With n = 2, N = 3
and m = 5 no two products are equal; with n = N = 4 many are, and nothing but another run can tell them apart. So all of
the simplest are named and none is picked.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .measured import Sizes

SYMBOLS = ("n", "N", "k", "K", "m", "c", "B", "T")  # in the order in which a product is written
MOST_ATOMS = 3  # of a product; more name nothing that anybody did
SQUARED = ("n", "N")  # what people do twice: average, divide by the micro-batches


@dataclass(frozen=True)
class Name:
    """A product of sizes in words: ``n/B (n = 4, B = 32)``."""

    symbol: str  # "n/B"; a minus sign before it where the factor is negative
    where: str = ""  # "n = 4, B = 32"
    fraction: str = ""  # "7/8", where the numbers say more than the product
    symbols: int = 1  # how many it takes

    def __str__(self) -> str:
        fraction = f" = {self.fraction}" if self.fraction else ""
        return f"{self.symbol}{fraction} ({self.where})" if self.where else self.symbol


@dataclass(frozen=True)
class _Atom:
    """A size, or a quotient that people think of as one size. Counts as one symbol."""

    above: tuple[str, ...]
    below: tuple[str, ...] = ()
    where: str = ""  # of a quotient that needs words of its own


@dataclass(frozen=True)
class _Product:
    value: float
    name: Name


def matches(factor: float, sizes: Sizes, tolerance: float) -> tuple[str, ...]:
    """The names of ``factor``, as ``1/n (n = 8)``: all that take the fewest symbols. Empty where nothing matches.

    ``tolerance`` is relative. A factor of 1 is named ``1``; a negative one has its name with a minus sign.
    """
    return tuple(map(str, named(factor, sizes, tolerance)))


def named(factor: float, sizes: Sizes, tolerance: float) -> tuple[Name, ...]:
    """The same as :func:`matches`, in parts."""
    if not math.isfinite(factor) or factor == 0:
        return ()
    sign = "-" if factor < 0 else ""
    if math.isclose(abs(factor), 1, rel_tol=tolerance):
        return (Name(f"{sign}1"),)
    found = [p for p in _products(sizes) if math.isclose(abs(factor), p.value, rel_tol=tolerance)]
    fewest = min((product.name.symbols for product in found), default=0)
    return tuple(
        replace(product.name, symbol=sign + product.name.symbol)
        for product in found
        if product.name.symbols == fewest
    )


def divisor_of_world(factor: float, sizes: Sizes, tolerance: float) -> tuple[str, str] | None:
    """A name and a question, where ``factor`` is d or 1/d and d divides n properly; otherwise None.

    With tensor, sequence or pipeline parallelism only n/d groups of ranks hold different data. Whoever multiplies or
    divides by n where n/d is meant is off by d, which no product of sizes gives.
    """
    world = sizes.world
    for d in (d for d in range(2, world) if world % d == 0):
        for value, name in ((float(d), "a divisor"), (1 / d, "1 over a divisor")):
            if math.isclose(factor, value, rel_tol=tolerance):
                return f"{name} of n = {world}", f"is the data-parallel size {world // d} (world / {d})?"
    return None


@functools.lru_cache(maxsize=8)
def _products(sizes: Sizes) -> tuple[_Product, ...]:
    """Every product of up to ``MOST_ATOMS`` atoms, the simplest first, each in its simplest form.

    Two forms are the same product if they are so by definition (B = n N m, say), not if their numbers agree.
    """
    values, where = _values(sizes)
    roots = _roots(values, sizes)
    atoms = [a for a in _atoms(values, sizes) if _value(a.above, values) != _value(a.below, values)]
    signed = [(atom, power) for atom in atoms for power in (1, -1)]
    products: dict[frozenset[tuple[str, int]], _Product] = {}
    for count in range(1, MOST_ATOMS + 1):
        for factors in itertools.combinations_with_replacement(signed, count):
            powers: Counter[str] = Counter()
            for atom, power in factors:
                for symbol, exponent in _exponents(atom):
                    powers[symbol] += power * exponent
            if not _plausible(powers, count):
                continue
            root: Counter[str] = Counter()
            for symbol, exponent in powers.items():
                for base, times in roots[symbol].items():
                    root[base] += exponent * times
            key = frozenset(
                (base, exponent)
                for base, exponent in root.items()
                if exponent and (values[base] != 1 or base == "k")
            )
            if key and key not in products:
                value = math.prod(float(values[symbol]) ** exponent for symbol, exponent in powers.items())
                products[key] = _Product(value, _name(powers, values, where, factors))
    return tuple(products.values())


def _values(sizes: Sizes) -> tuple[dict[str, int], dict[str, str]]:
    """The number behind every symbol that has one, and how to say it. A size of 0 divides nothing and is left out."""
    samples, counts = (list(itertools.chain(*lists)) for lists in (sizes.samples, sizes.counts))
    tokens = sizes.counts != sizes.samples
    lengths = [len(of_rank) for of_rank in sizes.counts]
    ran = _common(lengths)
    short = ran != sizes.micro_batches
    values: dict[str, int | None] = {
        "n": sizes.world,
        "N": sizes.micro_batches,
        "k": ran if short else None,
        "K": sum(lengths) if ran is None else None,
        "m": _common(samples) or max(samples, default=0),
        "c": _common(counts) if tokens else None,
        "B": sizes.total_samples,
        "T": sizes.total_count if tokens else None,
    }
    found = {symbol: value for symbol, value in values.items() if value}
    where = {symbol: f"{symbol} = {value}" for symbol, value in found.items()}
    where |= {"k": _micro_batches(ran)} if short and ran else {}
    words = {"K": " micro-batches"} | dict.fromkeys("cT", " tokens")
    words |= {"N": " planned" if short else "", "m": "" if _common(samples) else " at most"}
    return found, {symbol: text + words.get(symbol, "") for symbol, text in where.items()}


def _roots(values: dict[str, int], sizes: Sizes) -> dict[str, Counter[str]]:
    """What each size is made of by definition: B = n N m, if all micro-batches are equal."""
    roots = {symbol: Counter({symbol: 1}) for symbol in values}
    groups = Counter({"K": 1} if "K" in values else {"n": 1, "k" if "k" in values else "N": 1})
    if values.get("k") == 1:
        del groups["k"]  # B/n is m then, and no second name
    if _common(itertools.chain(*sizes.samples)) is not None:
        roots["B"] = groups + Counter({"m": 1})
    if "c" in values:
        roots["T"] = groups + Counter({"c": 1})
    return roots


def _atoms(values: dict[str, int], sizes: Sizes) -> list[_Atom]:
    """In the order of preference between two forms of one product with equally many symbols."""
    n, planned, m, batch = sizes.world, sizes.micro_batches, values.get("m", 0), sizes.total_samples
    equal = _common(itertools.chain(*sizes.samples)) is not None
    atoms = [_Atom(("n",)), _Atom(("N",))]
    if "k" in values:
        atoms.append(_Atom(("k",), ("N",), f"{_micro_batches(values['k'])} of N = {planned} planned"))
        atoms.append(_Atom(("k",)))
    elif "K" in values:
        atoms.append(
            _Atom(("K",), ("n", "N"), f"K = {values['K']} micro-batches of n N = {n * planned} planned")
        )
        atoms.append(_Atom(("K",)))
    elif not equal and sizes.counts == sizes.samples and batch < n * planned * m:
        atoms.append(
            _Atom(("B",), ("n", "N", "m"), f"B = {batch} samples of n N m = {n * planned * m} planned")
        )
    for symbol, of_ranks in (
        ("B", [sum(of_rank) for of_rank in sizes.samples]),
        ("T", list(sizes.rank_counts)),
    ):
        atoms.append(_Atom((symbol,)))
        if _common(of_ranks) is not None and n > 1:
            atoms.append(_Atom((symbol,), ("n",)))
    atoms += [_Atom(("m",))] if equal else []
    atoms.append(_Atom(("c",)))
    return [atom for atom in atoms if set(atom.above + atom.below) <= set(values)]


def _name(
    powers: Counter[str],
    values: dict[str, int],
    where: dict[str, str],
    factors: tuple[tuple[_Atom, int], ...],
) -> Name:
    """Writes a product as one fraction, and the numbers behind it."""
    above = [(symbol, powers[symbol]) for symbol in SYMBOLS if powers[symbol] > 0]
    below = [(symbol, -powers[symbol]) for symbol in SYMBOLS if powers[symbol] < 0]
    written = [" ".join(s if power == 1 else f"{s}^{power}" for s, power in side) for side in (above, below)]
    denominator = f"({written[1]})" if len(below) > 1 else written[1]
    symbol = (written[0] or "1") + (f"/{denominator}" if below else "")
    if len(factors) == 1 and factors[0][0].where:
        fraction = "/".join(
            f"{math.prod(values[s] ** power for s, power in side)}" for side in (above, below)
        )
        return Name(symbol, factors[0][0].where, fraction)
    return Name(symbol, ", ".join(where[s] for s in SYMBOLS if powers[s]), symbols=len(factors))


def _plausible(powers: Counter[str], atoms: int) -> bool:
    """Squares of n and N only, and alone or with one other atom."""
    return all(
        abs(power) <= 1 or (abs(power) == 2 and symbol in SQUARED and atoms <= 2)
        for symbol, power in powers.items()
    )


def _micro_batches(ran: int) -> str:
    return f"k = {ran} micro-batch{'es' * (ran != 1)}"


def _exponents(atom: _Atom) -> Iterable[tuple[str, int]]:
    return itertools.chain(((symbol, 1) for symbol in atom.above), ((symbol, -1) for symbol in atom.below))


def _value(symbols: tuple[str, ...], values: dict[str, int]) -> int:
    return math.prod(values[symbol] for symbol in symbols)


def _common(numbers: Iterable[int]) -> int | None:
    """The number that all are; None where they differ."""
    different = set(numbers)
    return different.pop() if len(different) == 1 else None
