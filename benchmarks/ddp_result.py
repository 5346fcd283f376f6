"""What the ranks of ``bench ddp`` measured, and what follows from it: rows, ratios and what is wrong. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from .summary import Ratio, Times, ratio_of_medians, summarize

UNREDUCED = "none"  # the contender that reduces nothing
MOST_STRAYED = 1e-3  # rounding in another order gives 1e-6; another batch, or other parameters, about 1


@dataclass(frozen=True)
class Check:
    """What is wrong with a contender's gradients, of all ranks together (see ddp_check.py)."""

    outside: int  # elements that are not the mean of what the ranks put in
    differing: (
        int  # elements of gradients, and of parameters after the timed steps, with other bits than on rank 0
    )
    strayed: float  # how far what its ranks put in is from the bare module's gradients, relative

    def problems(self) -> list[str]:
        """In words; none if all is right."""
        found = []
        if self.outside:
            found.append(f"{self.outside:,} elements are not the mean of what the ranks put in")
        if self.differing:
            found.append(f"{self.differing:,} elements differ from rank 0's")
        if not self.strayed <= MOST_STRAYED:
            found.append(
                f"its ranks did other work than the bare module: gradients differ by {self.strayed:.1e}"
            )
        return found


@dataclass(frozen=True)
class Trained:
    """One network: microseconds of each contender's steps, of the slowest rank, and what the checks found."""

    workload: str
    text: str
    parameters: int
    gradient_bytes: int
    world: int
    batch: int  # examples a rank
    threads: int  # of torch, a rank
    times: dict[str, Times]
    checks: dict[str, Check]
    absent: dict[str, str]  # a contender that can't run: why

    @property
    def steps(self) -> int:
        """Timed ones of each contender."""
        return next(iter(self.times.values())).size

    def problems(self) -> list[str]:
        """What is wrong, each naming network and contender."""
        return [
            f"{self.workload}, {name}: {text}"
            for name, each in self.checks.items()
            for text in each.problems()
        ]


@dataclass(frozen=True)
class Row:
    """A contender's step; its fields are keys of the JSON file."""

    contender: str
    step_us: float  # median over all steps
    step_us_min: float
    step_us_p99: float
    not_hidden_us: float | None  # step less the step without reduction; None for that one
    samples_per_s: float  # of all ranks
    over_unreduced: Ratio | None  # None for the one without reduction


def rows_of(trained: Trained) -> list[Row]:
    """A row a contender, in the order of ``times``."""
    bare = trained.times[UNREDUCED]
    found = []
    for name, times in trained.times.items():
        step = summarize(times)
        reduces = name != UNREDUCED
        found.append(
            Row(
                contender=name,
                step_us=step.median,
                step_us_min=step.minimum,
                step_us_p99=step.p99,
                not_hidden_us=step.median - summarize(bare).median if reduces else None,
                samples_per_s=trained.world * trained.batch / (step.median / 1e6),
                over_unreduced=ratio_of_medians(times, bare) if reduces else None,
            )
        )
    return found


def ratios_to_ring(trained: Trained) -> dict[str, Ratio]:
    """The other reducers' steps over the ring's: above 1 the ring is faster."""
    if "ring" not in trained.times:
        return {}
    return {
        name: ratio_of_medians(times, trained.times["ring"])
        for name, times in trained.times.items()
        if name not in ("ring", UNREDUCED)
    }
