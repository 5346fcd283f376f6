"""What a step's gradient was divided by."""

from __future__ import annotations

from dataclasses import dataclass


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
