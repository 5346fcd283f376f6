"""Whether all ranks accumulate the same: the all-reduce of their sums can't see it, which has one flat tensor."""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import RingMismatch
from .normalization import Kind, Normalization
from .ring import Ring


def agree(ring: Ring, normalization: Normalization, parameters: Sequence[Any], first_gradient: float) -> None:
    """Compares normalization and parameters of all ranks. ``RingMismatch``, the same on all, names two that differ.

    Warns if ``first_gradient``, a sum over the elements of the first micro-batch's gradient, is the same on all ranks.
    """
    layout = repr([(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters])
    digest = hashlib.blake2b(layout.encode(), digest_size=8).digest()
    mine = np.array(
        [
            int(normalization.kind),
            *struct.unpack("q", struct.pack("d", normalization.total)),
            len(parameters),
            sum(parameter.numel() for parameter in parameters),
            *struct.unpack("q", digest),
            *struct.unpack("q", struct.pack("d", first_gradient)),
        ]
    )
    gathered = _gathered(ring, mine).reshape(ring.world, -1)
    rows, gradients = gathered[:, :-1], gathered[:, -1]
    for rank, row in enumerate(rows):
        if (row != rows[0]).any():
            raise RingMismatch(
                f"ring {ring.name!r}: ranks accumulate differently: {_difference(rows[0], row, rank)}; make the same "
                f"accumulator on every rank"
            )
    if ring.world > 1 and first_gradient != 0 and (gradients == gradients[0]).all():
        warnings.warn(
            "the gradient of the first micro-batch has the same sum on all ranks, to the last bit: has something "
            "reduced it already (DistributedDataParallel without no_sync(); pass the model, not its parameters), or "
            "do all ranks have the same data?",
            stacklevel=4,
        )


def _gathered(ring: Ring, row: Any) -> Any:
    """The rows of all ranks, as NumPy has them."""
    if ring.device is None:
        return ring.all_gather(row)
    import torch

    return ring.all_gather(torch.from_numpy(row).to(ring.device)).cpu().numpy()


def _difference(first: Any, other: Any, rank: int) -> str:
    ours, theirs = _normalization(first), _normalization(other)
    if ours != theirs:
        return f"{ours!r} on rank 0 and {theirs!r} on rank {rank}"
    if tuple(first[2:4]) != tuple(other[2:4]):
        return f"{first[2]} parameters of {first[3]} elements on rank 0 and {other[2]} of {other[3]} on rank {rank}"
    return f"the parameters of rank {rank} have other shapes or types, or another order, than those of rank 0"


def _normalization(row: Any) -> Normalization:
    return Normalization(Kind(int(row[0])), *struct.unpack("d", struct.pack("q", int(row[1]))))
