"""The first failure of a ring over process groups: its ranks read it in their store, where the first to write wins."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import PeerLost, RingAborted, RingClosed, RingError, RingMismatch, RingTimeout
from .group_links import LinkError

if TYPE_CHECKING:
    import torch.distributed as dist

_KINDS = (RingMismatch, RingTimeout, PeerLost, RingAborted, RingClosed)
_KEY = "failure"
_LOOK_EVERY_S = 0.5


class FirstFailure:
    """One rank's view of it. ``store`` is the ring's alone."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def report(self, error: RingError) -> RingError:
        """What all ranks raise: this error unless another came first. Its own where the store can't be reached."""
        mine = json.dumps({"kind": type(error).__name__, "text": str(error)})
        with contextlib.suppress(Exception):  # the rank that holds the store may be the one that is gone
            return _read(self._store.compare_set(_KEY, "", mine))
        return error

    def look(self) -> RingError | None:
        """The first failure that any rank has reported; None if there is none, or the store can't be reached."""
        with contextlib.suppress(Exception):
            if self._store.check([_KEY]):
                return _read(self._store.get(_KEY))
        return None

    def closing(self, rank: int, calls: int) -> None:
        """Tells that ``rank`` leaves the ring after so many calls."""
        with contextlib.suppress(Exception):
            self._store.set(f"closed/{rank}", str(calls))

    def calls_before_closing(self, rank: int) -> int | None:
        """After how many calls ``rank`` left; None if it has not, or the store can't be reached."""
        with contextlib.suppress(Exception):
            if self._store.check([f"closed/{rank}"]):
                return int(self._store.get(f"closed/{rank}"))
        return None


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


def _read(said: Any) -> RingError:
    failure = json.loads(bytes(said))
    kinds = {kind.__name__: kind for kind in _KINDS}
    return kinds.get(failure["kind"], RingError)(failure["text"])
