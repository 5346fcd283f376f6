"""Right divisors, and not the gradient of the whole batch: the batch norm takes its statistics from five samples.

    ring-reduce verify examples/verify/wrong_batch_norm.py --world 2 --micro-batches 3

No divisor repairs it. SyncBatchNorm does over the ranks of GPUs, but not over micro-batches; batch norm in eval mode,
or a norm over features (LayerNorm, GroupNorm), does.
"""

from __future__ import annotations

from ddp_accumulation import batches, losses, step
from torch import nn

__all__ = ["batches", "losses", "model", "step"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
