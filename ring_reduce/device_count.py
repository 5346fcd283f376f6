"""A count that lies on a device, and is added up there: adding never waits for its value.

Nor does the call that divides by it over cuda_ipc, whose kernel reads it. Over process_group the host waits in each
call with a count until the device has it, since all ranks tell each other theirs before anything is sent.
"""

from __future__ import annotations

from typing import Any

from .errors import CountError


def stays_on_device(count: Any) -> bool:
    """Whether ``count`` is a tensor whose value the host would have to wait for."""
    return hasattr(count, "device") and getattr(count.device, "type", "cpu") != "cpu"


def checked_on_device(count: Any) -> Any:
    """A float64 tensor of no dimension: ``count``, or NaN if it is no count. That makes the gradient NaN, and no
    optimizer steps on garbage: an error can't be raised without waiting.

    ``CountError`` unless it has one element.
    """
    if count.numel() != 1:
        raise CountError(f"count has {count.numel()} elements; it has to be one number")
    value = count.detach().reshape(()).double()
    return value.where((value >= 0) & value.isfinite(), float("nan"))


def one_if_counted(value: Any) -> Any:
    """1 where a count is above 0, else 0, NaN included: a pass adds nothing at scale 0."""
    return (value > 0).double()
