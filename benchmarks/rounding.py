"""What rounding alone may do to a sum or mean over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def rounding(magnitude: Tensor, world: int, dtype: torch.dtype) -> Tensor:
    """The most by which an all-reduce in ``dtype`` may miss the exact result, element by element.

    An element of ``world`` ranks is rounded ``world + 1`` times at most (scaled, added ``world - 1`` times, divided),
    each time by half an epsilon of ``magnitude``: the sum of the inputs' absolute values, or for a mean their mean. The
    exact result is one in float64, which for float64 is rounded as often itself.
    """
    limits = torch.finfo(dtype)
    roundings = (world + 1) * (2 if dtype is torch.float64 else 1)
    return roundings * (limits.eps / 2 * magnitude + limits.tiny * limits.eps)
