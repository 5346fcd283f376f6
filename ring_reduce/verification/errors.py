"""The error of a check that can't be made."""

from __future__ import annotations


class VerifyError(RuntimeError):
    """``verify`` could not tell: a step that raised, or something that it can't work with. The same on every rank."""
