"""What divides the sum of an all-reduce: one explicit argument, applied once.

======================  ============================  ====================================================
normalization           result                        right when each rank's gradient is that of
======================  ============================  ====================================================
``SUM``                 sum x_g                       a loss already divided by the global batch (or tokens)
``MEAN``                sum x_g / n                   a local mean, and all local batches are equal
``divide_by(total)``    sum x_g / total               a local sum, and the total is known to every rank
``DIVIDE_BY_COUNT``     sum x_g / sum c_g             a local sum over c_g examples or tokens
``WEIGHTED_MEAN``       sum c_g x_g / sum c_g         a local mean over c_g examples or tokens, any c_g
======================  ============================  ====================================================

n is the number of ranks, x_g rank g's tensor, c_g its ``count=``.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field


class Kind(enum.IntEnum):
    """The numbers that the core and the wire use for a normalization."""

    SUM = 0
    MEAN = 1
    DIVIDE_BY = 2
    DIVIDE_BY_COUNT = 3
    WEIGHTED_MEAN = 4


@dataclass(frozen=True)
class Normalization:
    """What divides the sum. Use the constants of this module, or :func:`divide_by`."""

    kind: Kind
    total: float = 1.0  # the divisor of DIVIDE_BY; 1.0 otherwise
    # Of `kind`, and read in every call.
    number: int = field(init=False, repr=False, compare=False)
    uses_count: bool = field(init=False, repr=False, compare=False)  # whether a call needs count=

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))
        object.__setattr__(self, "number", int(self.kind))
        object.__setattr__(self, "uses_count", self.kind in (Kind.DIVIDE_BY_COUNT, Kind.WEIGHTED_MEAN))
        if self.kind is not Kind.DIVIDE_BY and self.total != 1.0:
            raise ValueError(f"{self.kind.name} takes no total, and it is {self.total}; use divide_by(total)")
        if not (math.isfinite(self.total) and self.total > 0):
            raise ValueError(
                f"divide_by takes a positive finite number, not {self.total}: it divides the sum over ranks"
            )

    def divisor(self, world: int, total_count: float) -> float:
        """What the sum over ``world`` ranks is divided by; 0 where nothing was counted, and the result is 0."""
        match self.kind:
            case Kind.SUM:
                return 1.0
            case Kind.MEAN:
                return float(world)
            case Kind.DIVIDE_BY:
                return self.total
            case Kind.DIVIDE_BY_COUNT | Kind.WEIGHTED_MEAN:
                return total_count

    def __repr__(self) -> str:
        return f"divide_by({self.total:g})" if self.kind is Kind.DIVIDE_BY else self.kind.name


SUM = Normalization(Kind.SUM)
MEAN = Normalization(Kind.MEAN)
DIVIDE_BY_COUNT = Normalization(Kind.DIVIDE_BY_COUNT)
WEIGHTED_MEAN = Normalization(Kind.WEIGHTED_MEAN)


def divide_by(total: float) -> Normalization:
    """The sum divided by ``total``: the global batch, or any number that every rank knows.

    Raises ``ValueError`` unless ``total`` is a positive finite number, and ``TypeError`` unless it is a number.
    """
    if isinstance(total, bool) or not hasattr(total, "__float__"):
        raise TypeError(f"divide_by takes a number, not {type(total).__name__}")
    return Normalization(Kind.DIVIDE_BY, float(total))
