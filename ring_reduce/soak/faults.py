"""Faults: how a rank strikes, and what every other rank has to raise."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ring_reduce.errors import RingError, text_of
from ring_reduce.normalization import MEAN, SUM, divide_by
from ring_reduce.probe import DirectoryStore
from ring_reduce.ring import Ring

from .outcome import Outcome
from .plan import Fault, Steady

REASON = "soak: a planned fault"


class PlannedError(Exception):
    """What a rank raises inside ``with ring``."""


class Expected(NamedTuple):
    """What all ranks but the victim raise: the error's class, and what its text has to name."""

    error: str
    names: str  # {victim} is its rank


EXPECTED = {
    "kill": Expected("PeerLost", "rank {victim} ended (killed, crashed or exited)"),
    "stop": Expected("RingTimeout", "rank {victim}"),
    "abort": Expected("RingAborted", f"rank {{victim}} aborted the ring: {REASON}"),
    "raise": Expected("RingAborted", f"rank {{victim}} aborted the ring: PlannedError: {REASON}"),
    "leave": Expected("RingClosed", "rank {victim} closed the ring"),
    "mismatch": Expected("RingMismatch", "rank {victim}"),
    "absent": Expected("RingTimeout", "rank {victim} has not made call"),
    "never": Expected("RingTimeout", "rank {victim}"),
}


@dataclass
class Struck:
    """A rank's part in a fault: its ring and outcome, and where it says that it is about to die."""

    ring: Ring
    store: DirectoryStore
    outcome: Outcome
    steady: Steady

    def strike(self, fault: Fault) -> None:
        """As the victim. Returns when the fault is over for this rank."""
        if fault.kind in ("kill", "stop", "pause", "abort"):
            thread = threading.Thread(target=self._strike_from_a_thread, args=(fault,), daemon=True)
            thread.start()
            self.suffer()
            thread.join()
            return
        self.outcome.fault_at = time.monotonic()
        if fault.kind == "leave":
            self.ring.close()
        elif fault.kind == "raise":
            self._raise_inside()
        elif fault.kind == "mismatch":
            self._hear(lambda: self._differ(fault.difference))
        elif fault.kind == "absent":
            while self.ring.failure is None:
                time.sleep(0.01)
            self._hear(self.ring.check)

    def suffer(self) -> None:
        """Steady calls until one fails, or the last of them."""
        self.outcome.fault_at = self.outcome.fault_at or time.monotonic()
        self._hear(self._call_steadily)

    def differ_or_not(self) -> None:
        """The call that another rank makes otherwise, after which no tensor may have changed."""
        self.outcome.fault_at = time.monotonic()
        self._hear(lambda: self._differ(""))

    def _strike_from_a_thread(self, fault: Fault) -> None:
        time.sleep(fault.after_s)
        self.outcome.fault_at = time.monotonic()
        if fault.kind == "abort":
            self.ring.abort(REASON)
            return
        self.store.set("struck", repr(self.outcome.fault_at))  # a rank that was killed tells nothing more
        for _ in range(fault.pulses if fault.kind == "pause" else 1):
            # Whoever watches this process lets it go on after a stop.
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            time.sleep(fault.pause_s)

    def _raise_inside(self) -> None:
        try:
            with self.ring:
                raise PlannedError(REASON)
        except PlannedError:
            pass

    def _hear(self, call: Callable[[], object]) -> None:
        """Makes a call that may fail, and notes how. Then all further ones have to fail alike."""
        try:
            call()
        except RingError as error:
            self.outcome.heard_at = time.monotonic()
            self.outcome.error, self.outcome.text = type(error).__name__, str(error)
            self._expect_the_same_again(error)

    def _expect_the_same_again(self, first: RingError) -> None:
        try:
            self.ring.all_reduce(np.ones(1))
        except RingError as error:
            if type(error) is type(first) and str(error) == str(first):
                return
            self.outcome.problems.append(f"after {text_of(first)!r} a call raised {text_of(error)!r}")
        else:
            self.outcome.problems.append(f"after {text_of(first)!r} a call succeeded")

    def _call_steadily(self) -> None:
        """Several in flight, as the plan says. If one fails, all behind it have to as well."""
        slots = self.steady.in_flight + 1
        inputs = [np.empty(self.steady.elements, np.float32) for _ in range(slots)]
        outputs = [np.empty(self.steady.elements, np.float32) for _ in range(slots)]
        pending: deque[tuple[int, Any]] = deque()
        try:
            for number in itertools.count() if self.steady.calls is None else range(self.steady.calls):
                x, out = inputs[number % slots], outputs[number % slots]
                x.fill(self.ring.rank + number % 100)
                work = self.ring.all_reduce(x, out=out, async_op=self.steady.in_flight > 0)
                pending.append((number, work if self.steady.in_flight else None))
                while len(pending) > self.steady.in_flight:
                    self._finish(pending, outputs)
            while pending:
                self._finish(pending, outputs)
        except RingError:
            self._expect_failures([work for _, work in pending])
            raise

    def _finish(self, pending: deque[tuple[int, Any]], outputs: list[np.ndarray[Any, Any]]) -> None:
        number, work = pending[0]
        if work is not None:
            work.wait()
        pending.popleft()
        world = self.ring.world
        expected = world * (world - 1) // 2 + world * (number % 100)
        if not (outputs[number % len(outputs)] == expected).all():
            self.outcome.problems.append(
                f"rank {self.ring.rank}: steady call {number} of {self.steady.elements} float32 is not {expected}"
            )
        if self.ring.rank == 0:
            self.outcome.calls += 1
            self.outcome.nbytes += 4 * self.steady.elements

    def _expect_failures(self, works: list[Any]) -> None:
        """None may succeed behind one that fails. Those before may: making a call raises as soon as the ring fails."""
        failed = False
        for work in filter(None, works):
            try:
                work.wait()
            except RingError:
                failed = True
                continue
            if failed:
                self.outcome.problems.append(
                    f"rank {self.ring.rank}: a call behind one that failed succeeded"
                )

    def _differ(self, difference: str) -> None:
        """One call, other than the rest's if there is a difference. Its tensors have to stay as they were."""
        elements = 12 * self.ring.world * (1 + self.steady.elements // (24 * self.ring.world))
        elements += self.ring.world if difference == "size" else 0
        x = np.arange(elements).astype(np.int32 if difference == "dtype" else np.float32)
        out = np.full(elements // self.ring.world if difference == "operation" else elements, 5).astype(
            x.dtype
        )
        by = {"normalization": MEAN, "dtype": SUM, "divisor": divide_by(4)}.get(difference, divide_by(3))
        before = x.copy(), out.copy()
        call = self.ring.reduce_scatter if difference == "operation" else self.ring.all_reduce
        try:
            call(x, by, out=out)
        finally:
            if not (np.array_equal(x, before[0]) and np.array_equal(out, before[1])):
                self.outcome.problems.append(f"rank {self.ring.rank}: a call that failed changed its tensors")
