"""One case on one rank: its buffers, and the timed and the checked calls of each contender on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .alignment import Alignment
from .buffers import Inputs, RotatedBuffers, integers, normals
from .interleave import TimedCall
from .peers import Op, Peer, Place
from .plan import INTEGERS, Case, Contender, Plan
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


class Trial:
    """Of a type and size. Every rank makes the same calls, in the same order."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        alignment: Alignment,
        peers: Mapping[str, Peer],
        case: Case,
    ) -> None:
        self.case = case
        self.what = f"{case.nbytes} bytes of {case.dtype}"
        self.contenders = contenders_of(plan, peers, case.dtype)
        self._place = place
        self._alignment = alignment
        self._peers = peers
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        self._count = case.nbytes // self._dtype.itemsize
        self._synchronize: Callable[[], None] | None = None
        if place.device.type == "cuda":
            self._synchronize = torch.cuda.synchronize
        # How often a contender is called, at most: each burst may have a call that is not counted.
        rounds, burst = plan.repeats(case.nbytes)
        calls = (rounds + plan.warm_up_rounds(case.nbytes)) * (burst + 1) + 2 * CHECKED_CALLS + 1
        self._buffers = RotatedBuffers(
            self._inputs(integers),
            count=self._count,
            dtype=self._dtype,
            device=place.device,
            rotate_bytes=plan.rotate_bytes,
            calls=calls * len(self.contenders),
        )

    def _inputs(self, make: Callable[[int, int, torch.dtype], Tensor]) -> Inputs:
        place = self._place
        return Inputs(
            make,
            rank=place.rank,
            world=place.world,
            count=self._count,
            dtype=self._dtype,
            device=place.device,
        )

    def checks(self, watch: Watch) -> dict[Contender, tuple[int | None, int | None]]:
        """(wrong elements of this rank or None, bytes that it sent in a call or None) of each contender."""
        found = {}
        for contender in self.contenders:
            watch(f"{self.what}: checking {contender}")
            found[contender] = self._check(contender, self._peers[contender.backend])
        return found

    def _check(self, contender: Contender, peer: Peer) -> tuple[int | None, int | None]:
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

    def errors(self) -> dict[Contender, tuple[float, int]]:
        """Of random data, by contender: the largest error, and how many elements are farther off than by rounding.

        Nothing for integers, which are exact or wrong.
        """
        if not self._dtype.is_floating_point:
            return {}
        inputs = self._inputs(normals)
        errors = {}
        for contender in self.contenders:
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

    def timed_call(self, contender: Contender) -> TimedCall:
        """Aligns the ranks, then times the user's call alone."""
        peer, op, in_place = self._peers[contender.backend], contender.op, contender.in_place
        all_reduce, prepare = peer.all_reduce, peer.prepare
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
