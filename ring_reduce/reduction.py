"""What a step's gradient was divided by, and the end of a ring whose rank can't go on with the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import text_of
from .ring import Ring


@dataclass(frozen=True)
class Reduction:
    """What the last reduction of a step's gradients divided by."""

    total_count: float  # sum of counts over ranks; 0 where the normalization has none
    divisor: float  # what the sum was divided by; 0: nothing was counted and the gradient is 0
    factors: tuple[
        float, ...
    ]  # what each bucket's sum was multiplied by: 1 / divisor; 0: nothing was counted

    @property
    def factor(self) -> float:
        """What the sum was multiplied by. All buckets have the same."""
        return self.factors[-1]

    @property
    def buckets(self) -> int:
        """How many all-reduces carried the gradient."""
        return len(self.factors)

    @classmethod
    def of(cls, total_count: float, divisors: list[float]) -> Reduction:
        """From the divisor of each bucket."""
        return cls(total_count, divisors[-1], tuple(1 / divisor if divisor else 0.0 for divisor in divisors))


@contextlib.contextmanager
def abort_on_error(ring: Ring | None) -> Iterator[None]:
    """An error of one rank in the middle of a step ends the ring: the others would wait for it."""
    try:
        yield
    except BaseException as error:
        abort(ring, error)
        raise


def abort(ring: Ring | None, error: BaseException) -> None:
    """Ends the ring with the text of ``error``, unless it has failed already."""
    if ring is not None and ring.failure is None:
        ring.abort(text_of(error))
