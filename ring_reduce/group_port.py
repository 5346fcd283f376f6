"""The port of one call over process groups: what the core's step loop waits for, moves and publishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from . import _core
from .bootstrap import Member
from .group_links import Hop, Links, neighbours, waiting

if TYPE_CHECKING:
    import torch

    from .chunk_passes import ChunkPasses


@dataclass(frozen=True)
class Plan:
    """One call as all ranks must make it, and this rank's tensors, flat."""

    member: Member
    fingerprint: _core.Fingerprint
    elements: int  # of the whole tensor
    input: torch.Tensor
    input_begin: int  # element of the whole tensor that input[0] is
    output: torch.Tensor
    output_begin: int  # the same of output[0]
    counts: Sequence[float] | None  # by rank; None where the normalization does not use them
    segment_elements: int

    @property
    def segments(self) -> int:
        """Of the longest chunk; chunk 0 is never shorter than another."""
        longest = self.fingerprint.chunk(0, self.member.world)[1]
        return max(1, -(-longest // self.segment_elements))

    @cached_property
    def received_counts(self) -> list[float]:
        """By move: the count of the ranks whose data has come from the left, 0 where no counts are used."""
        rank, world = self.member.rank, self.member.world
        return [self._partial(_core.chunk_of_move(k, rank, world), k) for k in range(world)]

    def total_count(self, chunk: int) -> float:
        """The sum of all counts as the rank that finishes ``chunk`` adds it; 0 where none are used."""
        return self._partial(chunk, self.member.world)

    def _partial(self, chunk: int, ranks: int) -> float:
        """Counts one after another in the order of the ring, as the core's segments carry them: fractions round."""
        if self.counts is None:
            return 0.0
        ordered = (self.counts[(chunk + 1 + hop) % self.member.world] for hop in range(ranks))
        return list(accumulate(ordered, initial=0.0))[-1]  # not sum(), which newer Pythons compensate


class GroupPort:
    """Runs a plan. Partial sums travel from and into staging, finished chunks from output to output.

    ``staging`` has ``window`` places to send from and as many to receive into, each of a segment. Hop i uses place
    i mod ``window`` of both: the step loop never has more than ``window`` hops under way, so whoever starts hop i has
    taken what hop i - ``window`` brought.
    """

    def __init__(
        self, plan: Plan, links: Links | None, passes: ChunkPasses, staging: Sequence[torch.Tensor]
    ) -> None:
        self._plan = plan
        self._links = links  # None in a world of 1
        self._passes = passes
        self._window = len(staging) // 2
        self._outgoing, self._incoming = staging[: self._window], staging[self._window :]
        self._hops: list[Hop] = [Hop(None, None)] * self._window
        self._arriving: list[torch.Tensor] = [plan.output[:0]] * self._window
        self._leaving = plan.output[:0]  # the payload that post() sends
        self._at = (0, 0)  # segment and k of the move in hand
        self._posted = self._taken = 0
        self.bytes_sent = self.bytes_received = 0
        self.seconds_waiting = 0.0

    def run(self) -> None:
        """All moves. ``LinkError`` where another rank can't be heard or reached."""
        first, last = self._plan.fingerprint.moves(self._plan.member.world)
        _core.run_ring(self, first, last, self._plan.segments, self._window)
        for hop in self._hops:  # what is being sent is the caller's, or the next call's staging
            self._wait_sent(hop)

    def wait_posted(self) -> None:
        """Until left's next message is there."""
        left, _ = neighbours(self._plan.member)
        hop = self._hops[self._taken % self._window]
        self.seconds_waiting += waiting(left, f"segment {self._taken} from rank {left}", hop.wait_received)

    def wait_taken(self) -> None:
        """Until the place of the next message is free: what was sent from it has gone."""
        self._wait_sent(self._hops[self._posted % self._window])

    def move(self, segment: int, k: int, receives: bool, sends: bool) -> None:
        """Combines what came with the own part, and says what goes on."""
        world = self._plan.member.world
        self._at = segment, k
        begin, elements = self._span(segment, k)
        received = self._arriving[self._taken % self._window] if receives else None
        if k < world - 1:
            self._leaving = self._reduce(self._own(begin, elements), received, k)
            return
        self._leaving = self._finished(begin, elements)
        if k == world - 1:
            self._finish(self._own(begin, elements), received)

    def take(self) -> None:
        """Frees the place of left's message."""
        arrived = self._arriving[self._taken % self._window]
        self.bytes_received += arrived.numel() * arrived.element_size()
        self._taken += 1

    def post(self) -> None:
        """Sends the payload of this move. The message that comes with it from the left is for this segment's next."""
        assert self._links is not None
        segment, k = self._at
        place = self._posted % self._window
        begin, elements = self._span(segment, k + 1)
        # A finished chunk goes straight to where it belongs. In place too: it was made with this rank's part of it, so
        # that part, which may still lie there, has been received.
        finished = k + 1 > self._plan.member.world - 1
        self._arriving[place] = (
            self._finished(begin, elements) if finished else self._incoming[place][:elements]
        )
        self._hops[place] = self._links.hop(self._leaving, self._arriving[place])
        self.bytes_sent += self._leaving.numel() * self._leaving.element_size()
        self._posted += 1

    def _wait_sent(self, hop: Hop) -> None:
        _, right = neighbours(self._plan.member)
        self.seconds_waiting += waiting(right, f"rank {right} to take a segment", hop.wait_sent)

    def _span(self, segment: int, k: int) -> tuple[int, int]:
        """First element and length of a segment of the chunk that move ``k`` works on."""
        plan = self._plan
        chunk = _core.chunk_of_move(k, plan.member.rank, plan.member.world)
        begin, elements = plan.fingerprint.chunk(chunk, plan.member.world)
        skipped = min(segment * plan.segment_elements, elements)
        return begin + skipped, min(plan.segment_elements, elements - skipped)

    def _own(self, begin: int, elements: int) -> torch.Tensor:
        start = begin - self._plan.input_begin
        return self._plan.input[start : start + elements]

    def _finished(self, begin: int, elements: int) -> torch.Tensor:
        start = begin - self._plan.output_begin
        return self._plan.output[start : start + elements]

    def _mix(self, k: int, receives: bool) -> _core.Mix:
        received_count = self._plan.received_counts[k] if receives else 0.0
        counts, rank = self._plan.counts, self._plan.member.rank
        own_count = counts[rank] if counts is not None else 1.0
        return self._plan.fingerprint.mix(k, receives, received_count, own_count)

    def _reduce(self, own: torch.Tensor, received: torch.Tensor | None, k: int) -> torch.Tensor:
        """Own part added to what came from the left, as the wire carries it."""
        mix = self._mix(k, received is not None)
        if received is None and mix.with_own and mix.own_scale == 1:
            return own  # as it is
        out = self._outgoing[self._posted % self._window][: own.numel()]
        self._combine(out, mix, own, received, 1.0)
        return out

    def _finish(self, own: torch.Tensor, received: torch.Tensor | None) -> None:
        """The last receive of the reduce-scatter: the one place where the divisor enters."""
        plan, world = self._plan, self._plan.member.world
        mix = self._mix(world - 1, received is not None)
        divisor = plan.fingerprint.divisor(world, plan.total_count(plan.member.rank), mix.exponent)
        self._combine(self._leaving, mix, own, received, divisor)

    def _combine(
        self,
        out: torch.Tensor,
        mix: _core.Mix,
        own: torch.Tensor,
        received: torch.Tensor | None,
        divisor: float,
    ) -> None:
        if not out.numel():
            return
        terms = [(received, mix.received_scale)] if received is not None and mix.with_received else []
        if mix.with_own:
            terms.append((own, mix.own_scale))
        if not terms:  # nothing was counted
            out.zero_()
            return
        x, x_scale = terms[0]
        y, y_scale = terms[1] if len(terms) == 2 else (None, 1.0)
        self._passes.combine(out, x, y, x_scale=x_scale, y_scale=y_scale, divisor=divisor)
