"""How ranks are aligned before a timed call: a barrier in shared memory, and then a start on the clock.

A barrier of one of the peers would favour it (its threads awake, its memory warm), and Gloo's leaves the ranks some
hundred microseconds apart, many times what the calls under test take. So the benchmark has its own:

1. Every rank writes its turn to a cache line of its own and polls the lines of the others.
2. Rank 0 then names a start a few microseconds ahead; all spin to it on CLOCK_MONOTONIC, which processes of a host
   share. The ranks start within a tenth of a microsecond, whoever came last.

With more ranks than cores step 2 is left out, since ranks that spin to a start would hold the cores that the others
need, and the polls of step 1 yield; the last to arrive starts first. Either way the rule is the same for every peer.

No data is published through the barrier, so that it needs no memory order: only aligned words that don't tear.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import MutableSequence

LINE_WORDS = 16  # 128 bytes of int64: a line and the neighbour that the hardware fetches along
START_MARGIN_NS = 5_000  # time for all ranks to read the start before it passes
POLLS_PER_DEADLINE_CHECK = 4096
PING_PONGS = 20


def words_needed(world: int) -> int:
    """The shared int64 words of a barrier: a line a rank, and one for the start."""
    return (world + 1) * LINE_WORDS


class Barrier:
    """Aligns the ranks of one host. ``words`` is shared by all of them, and zero at first.

    ``cores`` must be the same on all ranks: whether there is one for each decides what they wait for.
    """

    def __init__(
        self,
        words: MutableSequence[int],
        *,
        rank: int,
        world: int,
        cores: float,
        timeout: float = 120.0,
    ) -> None:
        self._words = words
        self._rank = rank
        self._lines = [peer * LINE_WORDS for peer in range(world)]
        self._start_line = world * LINE_WORDS
        self._oversubscribed = world > cores
        self._timeout = timeout
        self._turn = 0
        self._start_ns = 0

    def align(self) -> None:
        """Returns on all ranks at nearly the same time; raises ``TimeoutError`` when a rank doesn't arrive."""
        self._turn += 1
        self._words[self._lines[self._rank]] = self._turn
        for peer, line in enumerate(self._lines):
            self._poll(line, self._turn, peer)
        if self._oversubscribed:
            return
        # Rank 0 can't name the next start before all have read this one: each reads it before its next turn.
        if self._rank == 0:
            self._words[self._start_line] = time.perf_counter_ns() + START_MARGIN_NS
        self._poll(self._start_line, self._start_ns + 1, 0)
        self._start_ns = self._words[self._start_line]
        while time.perf_counter_ns() < self._start_ns:
            pass

    def hop_ns(self) -> float:
        """What a word takes from one core to the next, Python's polling included: ranks 0 and 1 play ping-pong.

        On virtual machines the host moves cores about, and a hop may cost four times as much a second later; a figure
        without its hop can't be compared with another run's. NaN where ranks have to share cores.
        """
        self.align()
        if self._oversubscribed or len(self._lines) < 2:
            return math.nan
        start_ns = time.perf_counter_ns()
        for _ in range(PING_PONGS):
            self._turn += 1
            if self._rank < 2:
                if self._rank == 0:
                    self._words[self._lines[0]] = self._turn
                self._poll(self._lines[1 - self._rank], self._turn, 1 - self._rank)
            self._words[self._lines[self._rank]] = self._turn
        return (time.perf_counter_ns() - start_ns) / (2 * PING_PONGS)

    def _poll(self, line: int, least: int, peer: int) -> None:
        """Until ``peer`` has raised the word of ``line`` to ``least``."""
        deadline = 0.0
        polls = 0
        while self._words[line] < least:
            polls += 1
            if self._oversubscribed or polls > 200:
                os.sched_yield()
            if polls % POLLS_PER_DEADLINE_CHECK == 0:
                now = time.monotonic()
                deadline = deadline or now + self._timeout
                if now > deadline:
                    raise TimeoutError(
                        f"rank {self._rank}: rank {peer} did not reach turn {self._turn} of the benchmark's barrier in "
                        f"{self._timeout:g} s; did it fail, or measure another plan?"
                    )
