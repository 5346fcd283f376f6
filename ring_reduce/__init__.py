"""A ring all-reduce whose divisor is explicit and free. Importing loads neither torch nor a GPU library."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ._core import partition
from .accumulate import Accumulator
from .ddp import RingHookState, attach, ring_hook
from .device_calls import DeviceWork
from .errors import CountError, PeerLost, RingAborted, RingClosed, RingError, RingMismatch, RingTimeout
from .normalization import DIVIDE_BY_COUNT, MEAN, SUM, WEIGHTED_MEAN, Normalization, divide_by
from .reduction import Reduction
from .ring import Ring, RingStats
from .verification import VerifyError, verify
from .work import Work

try:
    __version__ = version("ring-reduce")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "DIVIDE_BY_COUNT",
    "MEAN",
    "SUM",
    "WEIGHTED_MEAN",
    "Accumulator",
    "CountError",
    "DeviceWork",
    "Normalization",
    "PeerLost",
    "Reduction",
    "Ring",
    "RingAborted",
    "RingClosed",
    "RingError",
    "RingHookState",
    "RingMismatch",
    "RingStats",
    "RingTimeout",
    "VerifyError",
    "Work",
    "attach",
    "divide_by",
    "partition",
    "ring_hook",
    "verify",
]
