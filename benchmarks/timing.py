"""One rank's part in measuring: rounds of timed calls of all contenders, between two times of checked ones.

The method:

- One run measures all contenders. In every round each of them gets a burst of calls, in an order that is drawn anew for
  every round (interleave.py), so that drift of the machine and traces in the caches hit all alike.
- All ranks make the same calls, their number a function of the size alone.
- Before each call the ranks are aligned (barrier.py). The timed part is the user's call and nothing else; on a GPU
  also the wait until its result is there. A call takes what its slowest rank takes.
- Every call gets another buffer and another input, made outside of the timed part (buffers.py).
- The results of two calls of each contender are checked before the others and of two behind them, element by element:
  some faults show only after several calls. One of random data may be off by what rounding explains, and no more.
- With a core for every rank, each rank's calling thread is moved to a core of its own before every burst, and is free
  to move again at once. Some schedulers leave two spinning ranks on one core for a second, which would measure the
  scheduler; ranks bound for good would have to share their core with their helper threads, which Gloo has more of.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ring_reduce.machine import granted_cores

from .alignment import Alignment
from .interleave import run_rounds
from .measurement import Found
from .peers import Peer, Place
from .plan import Case, Contender, Plan
from .summary import Times
from .trial import Trial
from .watch import Watch


class Timing:
    """Measures cases together. ``watch`` is told what it is at."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        alignment: Alignment,
        peers: Mapping[str, Peer],
        watch: Watch,
    ) -> None:
        self._plan = plan
        self._place = place
        self._alignment = alignment
        self._peers = peers
        self._watch = watch
        self._cores = sorted(os.sched_getaffinity(0))
        self._core: int | None = None
        if plan.spread and plan.world <= granted_cores():
            self._core = self._cores[place.local_rank]

    def measure(self, cases: Sequence[Case]) -> tuple[list[dict[Contender, Found]], list[float]]:
        """What this rank finds in each case, all interleaved, and nanoseconds of a hop in each round."""
        trials = [Trial(self._plan, self._place, self._alignment, self._peers, case) for case in cases]
        before = [trial.checks(self._watch) for trial in trials]
        errors = [trial.errors() for trial in trials]
        times, hops_ns = self._time(trials)
        after = [trial.checks(self._watch) for trial in trials]
        found: list[dict[Contender, Found]] = []
        for which, trial in enumerate(trials):
            found.append({})
            for contender in trial.contenders:
                wrong, sent = before[which][contender]
                error, outside = errors[which].get(contender, (None, 0))
                if wrong is not None:
                    wrong += (after[which][contender][0] or 0) + outside
                found[-1][contender] = Found(times[which, contender], wrong, error, sent)
        return found, hops_ns

    def _time(self, trials: Sequence[Trial]) -> tuple[dict[tuple[int, Contender], Times], list[float]]:
        """By trial and contender."""
        largest = max(trial.case.nbytes for trial in trials)
        rounds, burst = self._plan.repeats(largest)
        what = trials[0].what + (f" and {len(trials) - 1} more" if len(trials) > 1 else "")
        hops_ns = []

        def before_round(turn: int) -> None:
            self._watch.step(f"{what}: " + (f"round {turn + 1} of {rounds}" if turn >= 0 else "warm-up"))
            hop_ns = self._alignment.hop_ns()
            if turn >= 0:
                hops_ns.append(hop_ns)

        times = run_rounds(
            {
                (which, contender): trial.timed_call(contender)
                for which, trial in enumerate(trials)
                for contender in trial.contenders
            },
            rounds=rounds,
            burst=burst,
            seed=largest,
            warm_up_rounds=self._plan.warm_up_rounds(largest),
            before_round=before_round,
            before_burst=self._spread,
        )
        return times, hops_ns

    def _spread(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})
            os.sched_setaffinity(0, self._cores)
