"""NumPy arrays: the mean over all examples from the means of ranks that hold different numbers of them.

Each rank fits the same line to its own rows. A rank's gradient is the mean over its rows, so the mean over all rows
weights it by the number of rows: WEIGHTED_MEAN.

    python examples/numpy_all_reduce.py
    torchrun --nproc-per-node 3 examples/numpy_all_reduce.py
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

import ring_reduce as rr
from launch import launch, say

STEPS = 20
LEARNING_RATE = 0.1


def mean_gradient(weights: np.ndarray, rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The gradient of the mean over rows of (row . weights - target)^2 / 2."""
    gradient: np.ndarray = rows.T @ (rows @ weights - targets) / len(rows)
    return gradient


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    # The whole batch is made on every rank, only so that this example can check itself. Rank r keeps 10 (r + 1) rows.
    random = np.random.default_rng(0)
    ends = np.cumsum([10 * (r + 1) for r in range(world)])
    all_rows = random.normal(size=(ends[-1], 5))
    all_targets = all_rows @ np.arange(5.0) + random.normal(size=ends[-1])
    mine = slice(ends[rank] - 10 * (rank + 1), ends[rank])
    rows, targets = all_rows[mine], all_targets[mine]

    weights, alone = np.zeros(5), np.zeros(5)
    with rr.Ring.from_group() as ring:
        say(f"{world} ranks hold {', '.join(str(10 * (r + 1)) for r in range(world))} rows")
        for step in range(STEPS):
            gradient = mean_gradient(weights, rows, targets)
            plain = ring.all_reduce(gradient, rr.MEAN, out=np.empty(5))  # wrong here, and shown as such
            ring.all_reduce(gradient, rr.WEIGHTED_MEAN, count=len(rows))  # right, in place

            expected = mean_gradient(alone, all_rows, all_targets)
            np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-13)
            if step == 0:
                off = np.linalg.norm(plain - expected) / np.linalg.norm(expected)
                say(f"step 0: WEIGHTED_MEAN is the gradient of all rows; MEAN is off by {100 * off:.1f} %")
            weights -= LEARNING_RATE * gradient
            alone -= LEARNING_RATE * expected

        np.testing.assert_allclose(weights, alone, rtol=1e-11, atol=1e-13)
        say(f"step {STEPS}: weights {np.round(weights, 3)}; of one process alone {np.round(alone, 3)}")
        say(f"rank 0 sent {ring.stats.bytes_sent} bytes in {ring.stats.calls} calls")


if __name__ == "__main__":
    launch(main)
