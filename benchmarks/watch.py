"""What a rank is at, for whoever watches, and the end of a rank that hangs."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable

SHOW_EVERY_SECONDS = 0.3


class Watch:
    """Passes on what the rank is at, and ends the process when it is at one thing for too long, whatever it hangs in.

    From the interpreter's own watchdog thread, which needs no lock that a hanging library may hold.
    """

    def __init__(self, timeout: float, show: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._show = show
        self._shown_at = 0.0

    def __call__(self, text: str) -> None:
        """The rank goes on, with this."""
        self._shown_at = 0.0
        self.step(text)

    def step(self, text: str) -> None:
        """As a call, but passed on now and then only: whoever shows it needs a core for that."""
        faulthandler.dump_traceback_later(self._timeout, exit=True)
        now = time.monotonic()
        if now > self._shown_at + SHOW_EVERY_SECONDS:
            self._shown_at = now
            self._show(text)

    def end(self) -> None:
        """The rank is done."""
        faulthandler.cancel_dump_traceback_later()
