"""What a ring asks of its transport: the seam between the calls that users make and what moves their data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from . import _core
    from .call import Call


class Engine(Protocol):
    """One rank's end of a transport. All ranks make theirs together, and an error of one is an error on all.

    Methods may be called from any thread, ``run`` from one at a time. What fails in a call ends the engine on every
    rank: further calls, and ``check``, raise the first cause.
    """

    @property
    def transport(self) -> str:
        """``"shm"``, ``"cuda_ipc"`` or ``"process_group"``."""

    @property
    def reason(self) -> str:
        """Why it was this transport, in a sentence."""

    @property
    def device(self) -> Any:
        """The torch device that its tensors lie on; None for the CPU, which takes arrays of other libraries too."""

    @property
    def lanes(self) -> int:
        """Threads, or thread blocks, of a rank that large calls use, the same on all ranks."""

    def run(self, call: Call, interruptible: bool) -> float:
        """Runs a call on its contiguous tensors, and returns the total count.

        With a ``device`` the call is only enqueued on its current stream; what fails there later is raised by the next
        call and by ``check``, and the total count is that of the calls that have ended.
        """

    def reduce_tensors(
        self, x: Any, out: Any, normalization: int, divisor: float, count: Any, interruptible: bool
    ) -> float:
        """The short way for plain tensors; -1, and nothing done, where the call has to go the long way."""

    def abort(self, reason: str) -> None:
        """Ends the engine on every rank; nothing where it has ended."""

    def check(self) -> None:
        """Raises why it has ended; nothing while it works."""

    def busy(self) -> bool:
        """Whether a call is running on the host."""

    def close(self) -> None: ...
    def stats(self) -> _core.Stats: ...
    def start_trace(self, limit: int) -> bool: ...
    def take_trace(self) -> list[_core.LaneTrace]: ...
