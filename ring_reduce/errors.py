"""The errors of a ring. Each says who, what and what to do; every rank of a failed ring raises the same text."""

from __future__ import annotations


class RingError(RuntimeError):
    """Base of all errors of a ring. After any but ``CountError`` the ring is closed on every rank."""


class RingMismatch(RingError):
    """Ranks called with different arguments; the text names both ranks and both values. No tensor was changed."""


class RingTimeout(RingError):
    """A rank did not arrive, or made no progress, within the timeout."""


class PeerLost(RingError):
    """A rank's process ended in the middle of a call, or before one that this rank is in."""


class RingAborted(RingError):
    """A rank ended the ring: :meth:`Ring.abort`, an exception inside ``with Ring`` or in the hook, or Ctrl-C."""


class RingClosed(RingError):
    """A call on a ring that was closed here, or by a peer that a call was waiting for."""


class CountError(RingError, ValueError):
    """A count that is missing, used twice, negative, infinite or NaN. In a DDP hook it aborts the ring on all ranks."""


class VerifyError(RuntimeError):
    """``verify`` could not tell: a step that raised, or something that it can't work with. The same on every rank."""


def is_echo(error: BaseException) -> bool:
    """Whether an error likely says what happened to another rank. Errors of a hook come wrapped by torch."""
    kinds = (PeerLost, RingAborted, RingClosed, RingTimeout)
    signs = (*(kind.__name__ for kind in kinds), "gloo/transport", "Connection closed by peer")
    return isinstance(error, kinds) or any(sign in str(error) for sign in signs)


def text_of(error: BaseException) -> str:
    """Type and text of any exception, for the other ranks."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ fails, and the others still have to hear of it
        return type(error).__name__
