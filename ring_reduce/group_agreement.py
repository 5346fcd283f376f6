"""Whether all ranks of a ring over process groups make the same call, and their counts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from . import _core
from .bootstrap import Member
from .call import SMALLEST_DIVISOR
from .errors import RingAborted, RingMismatch
from .group_links import Exchange, GlooLinks
from .work import CommunicationThread

_CALL_BYTES = 8  # the number of the call, with which a fingerprint begins
_MOST_KNOWN = 4096  # calls; a divisor that is new in every step makes one each time


class Agreement:
    """Compares every call of this rank with those of all others, by a record that each sends to each.

    On the CPU before any data moves: Gloo ends a process that is sent more than it takes. With ``late``, on a device,
    the host waits for the records only where the call is new to it or has a count, or it would wait for the others in
    every call. Those of other calls are read by a thread, which hands what is wrong to ``fail``.
    """

    def __init__(
        self, member: Member, talk: GlooLinks | None, *, late: bool, fail: Callable[[BaseException], object]
    ) -> None:
        self._talk = talk  # None in a world of 1
        self._reader = CommunicationThread(f"{member.who}: records") if late else None
        self._fail = fail
        self._known: set[bytes] = set()
        self.bytes_sent = 0

    def counts(self, fingerprint: _core.Fingerprint, count: float | None) -> Sequence[float] | None:
        """The counts of all ranks, None if this one has none.

        Raises ``RingMismatch`` where the ranks call differently, ``RingAborted`` for what is no count, ``LinkError``.
        """
        if self._talk is None:
            return None if count is None else _checked([count])
        record = fingerprint.to_bytes()
        exchange = self._talk.exchange(record + struct.pack("d", count or 0.0))
        self.bytes_sent += exchange.bytes_sent
        if self._reader is None:
            counts = _read(exchange)
        else:
            reading = self._reader.submit(lambda: _read(exchange))
            if count is None and record[_CALL_BYTES:] in self._known:
                reading.add_done_callback(self._end_if_failed)
                return None
            counts = reading.result()
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()  # other ranks need not forget the same: this one waits once more, that is all
            self._known.add(record[_CALL_BYTES:])
        return None if count is None else _checked(counts)

    def close(self) -> None:
        """Lets the thread end. It may still wait for a rank that is gone."""
        if self._reader is not None:
            self._reader.stop(0.0)
        self._fail = lambda _: None  # what it was may hold this, a cycle

    def _end_if_failed(self, reading: Future[list[float]]) -> None:
        error = reading.exception()
        if error is not None:
            self._fail(error)


def _read(exchange: Exchange) -> list[float]:
    """The counts of all ranks. ``RingMismatch`` names the first that differs from rank 0: the same text on all."""
    records = exchange.wait()
    fingerprints = [record[: _core.FINGERPRINT_BYTES] for record in records]
    for rank, theirs in enumerate(fingerprints):
        if theirs != fingerprints[0]:
            first, other = _core.Fingerprint.from_bytes(fingerprints[0]), _core.Fingerprint.from_bytes(theirs)
            raise RingMismatch(first.mismatch_text(0, other, rank))
    return [struct.unpack("d", record[_core.FINGERPRINT_BYTES :])[0] for record in records]


def _checked(counts: list[float]) -> list[float]:
    """Those that lay on a device were not looked at before: by the bounds of ``check_count``."""
    for rank, count in enumerate(counts):
        if not (count == 0 or SMALLEST_DIVISOR <= count <= 2**53):
            raise RingAborted(
                f"count of rank {rank} is {count}; a count is 0 or a finite number from 2**-126 to 2**53"
            )
    return counts
