"""What the ranks measured, as it travels to the parent process. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from ring_reduce.benchmarks.summary import Ratio

from .factors import Case


@dataclass(frozen=True)
class Training:
    """One run of data-parallel training over the ring."""

    losses: list[float]  # of the whole batch, at each step
    steps_per_epoch: int
    accuracies: list[float]  # on the test images, after each epoch
    gradient_errors: list[float]  # at each step of the first epoch: the largest over ranks and parameters


@dataclass(frozen=True)
class Traffic:
    """Payload that each rank sent in one all-reduce of the network's gradients."""

    tensor_bytes: int
    sent_by_rank: list[int]

    @property
    def formula(self) -> float:
        """2(n-1)s/n."""
        world = len(self.sent_by_rank)
        return 2 * (world - 1) * self.tensor_bytes / world

    @property
    def tolerance(self) -> int:
        """Bytes that a rank may be off it. A chunk differs from s/n by less than two packs of 16 bytes; round the ring
        two chunks are left out of 2s, directly a rank sends s and n-2 chunks."""
        return 2 * 16 * max(2, len(self.sent_by_rank) - 2)

    @property
    def worst_difference(self) -> float:
        """How far the rank that is farthest from the formula is from it, in bytes."""
        return max(abs(sent - self.formula) for sent in self.sent_by_rank)


@dataclass(frozen=True)
class Duel:
    """Two ways of doing the same, interleaved at one size: a call's time, its median over bursts."""

    tensor_bytes: int
    left_us: float
    right_us: float
    ratio: Ratio  # right / left, with its 95 % interval


@dataclass(frozen=True)
class Timings:
    """Ring beside Gloo at several sizes, and SUM beside MEAN; each list has one entry for the net's gradients."""

    gradient_bytes: int
    ring_gloo: list[Duel]
    sum_mean: list[Duel]

    def of_gradients(self, duels: list[Duel]) -> Duel:
        """The entry that was measured with the network's own gradients."""
        return next(duel for duel in duels if duel.tensor_bytes == self.gradient_bytes)


@dataclass(frozen=True)
class Result:
    """Everything that rank 0 reports."""

    transport: str
    parameters: int
    training: Training
    equal_cases: list[Case]
    unequal_cases: list[Case]
    traffic: Traffic
    timings: Timings
