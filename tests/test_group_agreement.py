"""What the ranks of a ring over process groups tell each other before a call, and who waits for it."""

from __future__ import annotations

import math
import queue
import re
import threading
import types
from typing import Any

import pytest

import ring_reduce as rr
from ring_reduce import group_agreement
from ring_reduce.bootstrap import Member
from ring_reduce.group_agreement import Agreement
from test_process_group import make_fingerprint


class Talk:
    """Stands for the links over which ranks tell their records: all say what this one says, or ``other``."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        self.other: bytes | None = None
        self.bytes_sent = 40

    def exchange(self, record: bytes) -> Any:
        records = [record, self.other or record]
        return types.SimpleNamespace(bytes_sent=40, wait=lambda: (self.heard.wait(30), records)[1])


def test_on_a_device_known_calls_wait_for_no_record() -> None:
    talk: Any = Talk()
    failures: queue.Queue[BaseException] = queue.Queue()
    agreement = Agreement(Member(0, 2, "x"), talk, late=True, fail=failures.put)
    talk.heard.set()
    assert agreement.counts(make_fingerprint(call=1), None) is None
    assert agreement.counts(make_fingerprint(call=2, normalization=3), 2.0) == [2.0, 2.0]
    talk.heard.clear()
    assert agreement.counts(make_fingerprint(call=3), None) is None  # and has not waited
    talk.other = make_fingerprint(call=4, elements=11).to_bytes() + bytes(8)
    assert agreement.counts(make_fingerprint(call=4), None) is None
    talk.heard.set()
    error = failures.get(timeout=30)
    assert type(error) is rr.RingMismatch
    assert "element count is 10 on rank 0 and 11 on rank 1" in str(error)
    with pytest.raises(rr.RingMismatch, match="call 5"):  # new, so that it waits
        agreement.counts(make_fingerprint(call=5, elements=12), None)
    talk.other = None
    for call, count in enumerate((math.nan, -1.0, 2.0**-127, 2.0**54), start=6):
        with pytest.raises(rr.RingAborted, match=re.escape(f"count of rank 0 is {count}")):
            agreement.counts(make_fingerprint(call=call, normalization=3), count)
    assert agreement.bytes_sent == 9 * 40
    agreement.close()


def test_what_is_known_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A divisor that is new in every step would fill the memory."""
    monkeypatch.setattr(group_agreement, "_MOST_KNOWN", 3)
    talk: Any = Talk()
    talk.heard.set()
    agreement = Agreement(Member(0, 2, "x"), talk, late=True, fail=lambda error: None)
    for call in range(1, 9):
        assert agreement.counts(make_fingerprint(call=call, divisor=float(call)), None) is None
        assert 0 < len(agreement._known) <= 3
    agreement.close()
