"""What one step of all ranks left behind, beside what it should have been: the input of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    """How the data of one step is spread. Lists are by rank, then by micro-batch; a short group has fewer than planned.

    A count is what the loss is averaged over: samples, or counted tokens.
    """

    micro_batches: int  # N: what a rank's group is planned to have
    samples: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def world(self) -> int:
        """n"""
        return len(self.counts)

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """Count of each rank."""
        return tuple(sum(counts) for counts in self.counts)

    @property
    def total_count(self) -> int:
        """What the right gradient is divided by."""
        return sum(self.rank_counts)

    @property
    def total_samples(self) -> int:
        """B: the global batch."""
        return sum(map(sum, self.samples))


@dataclass(frozen=True)
class Measured:
    """Gradients of one step as float64 vectors of P elements: all parameters, or the same sample of each.

    K is the number of micro-batches of all ranks; they are in the order of ``sizes.counts``, rank after rank.
    """

    sizes: Sizes
    names: tuple[str, ...]  # of the parameters
    ends: tuple[int, ...]  # parameter j has elements ends[j-1] (or 0) to ends[j]
    stepped: Vector  # [n, P] what each rank would step with; 0 where a parameter has no gradient
    missing: tuple[tuple[str, ...], ...]  # by rank: parameters without a gradient
    whole: Vector  # [P] of the mean loss over all counts, in one forward of one process
    parts: Vector  # [K, P] of the summed loss of each micro-batch, each in a forward of its own
    tolerance: float  # relative, of the gradients' type
    epsilon: float = 0.0  # of the coarsest of the gradients' types
    smallest: float = 0.0  # normal number of the finest of them; below it digits are lost
    twins: tuple[int, int] | None = None  # two ranks with the same data
    constant: tuple[str, ...] = ()  # tensors that are the same in all micro-batches, as sample data hardly is
    suspects: tuple[
        str, ...
    ] = ()  # modules whose output depends on what else is in the batch, with their class
    logged: tuple[float | None, ...] = ()  # by rank: the loss that the step logs
    loss: float = float("nan")  # the mean loss over all counts
