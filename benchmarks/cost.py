"""Time a byte, of types and sizes that were measured in the same rounds: ``ring-reduce bench --together``.

Measured one after another they can't be compared where the machine's speed changes from minute to minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .measurement import Measurement
from .plan import Contender, Plan
from .summary import Ratio, ratio_of_medians


@dataclass(frozen=True)
class Cost:
    """A contender's time a byte over its own of another case; None where that is this case, or wasn't measured.

    The first type is the plan's: integers have no mean, so a mean beside them has nothing to be over.
    """

    backend: str
    dtype: str
    bytes: int
    op: str
    in_place: bool
    over_first_type: Ratio | None  # of the same size
    over_least_size: Ratio | None  # of the same type


def costs(plan: Plan, measurements: Sequence[Measurement]) -> list[Cost]:
    """Of every contender in every case; none unless all were measured together."""
    if not plan.together or len(measurements) < 2:
        return []
    found = []
    for contender in dict.fromkeys(each for measurement in measurements for each in measurement.found):
        ours = [measurement for measurement in measurements if contender in measurement.found]
        for measurement in ours:
            same_size = [each for each in ours if each.nbytes == measurement.nbytes]
            of_first_type = [each for each in same_size if each.dtype == plan.dtypes[0]]
            same_type = [each for each in ours if each.dtype == measurement.dtype]
            found.append(
                Cost(
                    contender.backend,
                    measurement.dtype,
                    measurement.nbytes,
                    contender.op.name,
                    contender.in_place,
                    _over_first(contender, measurement, of_first_type),
                    _over_first(contender, measurement, same_type),
                )
            )
    return found


def _over_first(contender: Contender, ours: Measurement, others: Sequence[Measurement]) -> Ratio | None:
    if not others or others[0] is ours:
        return None
    first = others[0]
    return ratio_of_medians(
        ours.found[contender].times / ours.nbytes, first.found[contender].times / first.nbytes
    )
