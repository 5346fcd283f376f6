"""One rank's part in measuring all contenders at one size: timed calls, checked ones, and how exact they are.

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
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ring_reduce.machine import granted_cores

from .alignment import Alignment
from .buffers import Inputs, RotatedBuffers, integers, normals
from .interleave import TimedCall, run_rounds
from .measurement import Found
from .peers import Op, Peer, Place
from .plan import INTEGERS, Contender, Plan
from .summary import Times
from .watch import Watch

CHECKED_CALLS = 2


def contenders_of(plan: Plan, peers: Mapping[str, Peer], dtype: str) -> list[Contender]:
    """Who is measured, the same on every rank: all that a peer can do of what the plan asks for.

    Integers are not divided. A peer that only copies does so once, to its output.
    """
    found = []
    for name, peer in peers.items():
        if dtype not in peer.dtypes:
            continue
        if not peer.reduces:
            found.append(Contender(name, Op.SUM, in_place=False))
            continue
        for op in (Op[each] for each in plan.ops):
            if op in peer.ops and (op is Op.SUM or dtype not in INTEGERS):
                found += [Contender(name, op, in_place) for in_place in (False, True)]
    return found


class Timing:
    """Measures one size. ``watch`` is told what it is at."""

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
        self._synchronize: Callable[[], None] | None = None
        if place.device.type == "cuda":
            self._synchronize = torch.cuda.synchronize
        self._cores = sorted(os.sched_getaffinity(0))
        self._core: int | None = None
        if plan.spread and plan.world <= granted_cores():
            self._core = self._cores[place.local_rank]

    def measure(self, dtype_name: str, nbytes: int) -> tuple[dict[Contender, Found], list[float]]:
        """What this rank finds, and nanoseconds of a hop in each round."""
        dtype = getattr(torch, dtype_name)
        contenders = contenders_of(self._plan, self._peers, dtype_name)
        count = nbytes // dtype.itemsize
        self._buffers = RotatedBuffers(
            self._inputs(integers, count, dtype),
            count=count,
            dtype=dtype,
            device=self._place.device,
            rotate_bytes=self._plan.rotate_bytes,
            calls=self._calls(nbytes) * len(contenders),
        )
        what = f"{nbytes} bytes of {dtype_name}"
        before = self._checks(contenders, what)
        errors = self._errors(contenders, count, dtype)
        times, hops_ns = self._time(contenders, nbytes, what)
        after = self._checks(contenders, what)
        found = {}
        for contender in contenders:
            wrong, sent = before[contender]
            error, outside = errors.get(contender, (None, 0))
            if wrong is not None:
                wrong += (after[contender][0] or 0) + outside
            found[contender] = Found(times[contender], wrong, error, sent)
        return found, hops_ns

    def _calls(self, nbytes: int) -> int:
        """How often a contender is called at a size, at most: each burst may have a call that is not counted."""
        rounds, burst = self._plan.repeats(nbytes)
        return (rounds + self._plan.warm_up_rounds(nbytes)) * (burst + 1) + 2 * CHECKED_CALLS + 1

    def _inputs(
        self, make: Callable[[int, int, torch.dtype], Tensor], count: int, dtype: torch.dtype
    ) -> Inputs:
        place = self._place
        return Inputs(make, rank=place.rank, world=place.world, count=count, dtype=dtype, device=place.device)

    def _checks(
        self, contenders: list[Contender], what: str
    ) -> dict[Contender, tuple[int | None, int | None]]:
        found = {}
        for contender in contenders:
            self._watch(f"{what}: checking {contender}")
            found[contender] = self._check(contender, self._peers[contender.backend])
        return found

    def _check(self, contender: Contender, peer: Peer) -> tuple[int | None, int | None]:
        """(wrong elements of this rank or None, bytes that it sent in a call or None)."""
        wrong, before = 0, peer.bytes_sent()
        for _ in range(CHECKED_CALLS):
            x, out = self._buffers.take(in_place=contender.in_place)
            if not contender.in_place:
                out.fill_(-1)  # no result is
            peer.all_reduce(x, out, contender.op)
            wrong += self._buffers.wrong(contender.op, in_place=contender.in_place) if peer.reduces else 0
            self._buffers.refill()
        after = peer.bytes_sent()
        sent = None if before is None or after is None else (after - before) // CHECKED_CALLS
        return wrong if peer.reduces else None, sent

    def _errors(
        self, contenders: list[Contender], count: int, dtype: torch.dtype
    ) -> dict[Contender, tuple[float, int]]:
        """Of random data, by contender: the largest error, and how many elements are farther off than by rounding.

        Nothing for integers, which are exact or wrong.
        """
        if not dtype.is_floating_point:
            return {}
        inputs = self._inputs(normals, count, dtype)
        errors = {}
        for contender in contenders:
            peer = self._peers[contender.backend]
            if peer.reduces:
                x, out = self._buffers.take(in_place=contender.in_place)
                inputs.fill(x, 0)
                peer.all_reduce(x, out, contender.op)
                errors[contender] = (
                    inputs.relative_error(out, contender.op),
                    inputs.outside(out, contender.op),
                )
                self._buffers.refill()
        return errors

    def _time(
        self, contenders: list[Contender], nbytes: int, what: str
    ) -> tuple[dict[Contender, Times], list[float]]:
        rounds, burst = self._plan.repeats(nbytes)
        hops_ns = []

        def before_round(turn: int) -> None:
            self._watch.step(f"{what}: " + (f"round {turn + 1} of {rounds}" if turn >= 0 else "warm-up"))
            hop_ns = self._alignment.hop_ns()
            if turn >= 0:
                hops_ns.append(hop_ns)

        times = run_rounds(
            {each: self._timed_call(each, self._peers[each.backend]) for each in contenders},
            rounds=rounds,
            burst=burst,
            seed=nbytes,
            warm_up_rounds=self._plan.warm_up_rounds(nbytes),
            before_round=before_round,
            before_burst=self._spread,
        )
        return times, hops_ns

    def _timed_call(self, contender: Contender, peer: Peer) -> TimedCall:
        all_reduce, prepare, op, in_place = peer.all_reduce, peer.prepare, contender.op, contender.in_place
        buffers, align, synchronize = self._buffers, self._alignment.align, self._synchronize

        def call() -> int:
            x, out = buffers.take(in_place=in_place)
            prepare(x, out)
            if synchronize is not None:
                synchronize()
            align()
            start_ns = time.perf_counter_ns()
            all_reduce(x, out, op)
            if synchronize is not None:
                synchronize()
            elapsed_ns = time.perf_counter_ns() - start_ns
            buffers.refill()
            return elapsed_ns

        return call

    def _spread(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})
            os.sched_setaffinity(0, self._cores)
