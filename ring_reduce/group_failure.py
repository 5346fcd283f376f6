"""The first failure of a ring over process groups: its ranks read it in their store, where the first to write wins."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TypeVar

from .bounded_store import BoundedStore
from .errors import PeerLost, RingAborted, RingClosed, RingError, RingMismatch, RingTimeout
from .group_links import LinkError

_KINDS = (RingMismatch, RingTimeout, PeerLost, RingAborted, RingClosed)
_KEY = "failure"
_LOOK_EVERY_S = 0.5

T = TypeVar("T")


class FirstFailure:
    """One rank's view of it. ``store`` is the ring's alone.

    Where the store can't be reached there is nothing to hear: the rank that holds it may be the one that is gone.
    """

    def __init__(self, store: BoundedStore) -> None:
        self._store = store

    def report(self, error: RingError) -> RingError:
        """What all ranks raise: this error unless another came first. Its own where the store can't be reached."""
        mine = json.dumps({"kind": type(error).__name__, "text": str(error)})
        return _answer(lambda: _read(self._store.compare_set(_KEY, "", mine))) or error

    def look(self) -> RingError | None:
        """The first failure that any rank has reported; None if there is none, or the store can't be reached."""
        return _answer(lambda: _read(self._store.get(_KEY)) if self._store.check([_KEY]) else None)

    def closing(self, rank: int, calls: int) -> None:
        """Tells that ``rank`` leaves the ring after so many calls."""
        _answer(lambda: self._store.set(f"closed/{rank}", str(calls)))

    def calls_before_closing(self, rank: int) -> int | None:
        """After how many calls ``rank`` left; None if it has not, or the store can't be reached."""
        key = f"closed/{rank}"
        return _answer(lambda: int(self._store.get(key)) if self._store.check([key]) else None)

    def close(self) -> None:
        """Asks no more."""
        self._store.close()


class Watch:
    """A thread that looks for a failure while this rank is in a call.

    It may be waiting for a rank that is well and only late, and so not notice that another has closed its connections.
    """

    def __init__(
        self, failures: FirstFailure, waits: Callable[[], bool], tell: Callable[[RingError], object]
    ) -> None:
        self._failures = failures
        self._waits = waits
        self._tell = tell
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ring_reduce failure watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread: at Python's exit it must not be on its way back from the store."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LOOK_EVERY_S)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            failure = self._failures.look() if self._waits() else None
            if failure is not None:
                self._tell(failure)
                return


def again(error: RingError) -> RingError:
    """The same error for another caller: raised once more, one object would collect the tracebacks of all."""
    return type(error)(str(error))


def lost(error: LinkError, rank: int, call: int, timeout: float, closed_after: int | None) -> RingError:
    """Why ``rank`` could not hear or reach another in ``call``. ``closed_after``: the calls that other made before it
    left the ring; None if it has not."""
    if closed_after is not None and closed_after < call:
        return RingClosed(
            f"rank {error.peer} closed the ring after {closed_after} calls, while rank {rank} is in call {call}; every "
            f"rank has to make the same calls (under DDP: as many backwards, or join())"
        )
    if error.waited_s >= 0.99 * timeout:
        return RingTimeout(
            f"rank {rank} waited {timeout:.1f} s for {error.what} (call {call}); is rank {error.peer} alive, and does "
            f"it make the same calls?"
        )
    return PeerLost(
        f"rank {rank} lost its connection to rank {error.peer} in call {call}, while it waited for {error.what}: the "
        f"process has ended, or the network failed ({error.cause}); look at the output of rank {error.peer}, then "
        f"start the job again"
    )


def _answer(question: Callable[[], T]) -> T | None:
    """None for a store that fails, or is closed."""
    try:
        return question()
    except Exception:
        return None


def _read(said: bytes) -> RingError:
    failure = json.loads(said)
    kinds = {kind.__name__: kind for kind in _KINDS}
    return kinds.get(failure["kind"], RingError)(failure["text"])
