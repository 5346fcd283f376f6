"""The images, scikit-learn's handwritten digits: 1,797 real scans of 8 x 8 pixels that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

TEST_FRACTION = 0.2
SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits:
    """Images as (N, 1, 8, 8) float32, of mean 0 and deviation 1 over the training images; labels as (N,) int64."""

    train_images: npt.NDArray[np.float32]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Job:
    """What every rank is given."""

    world: int
    epochs: int
    cores: int
    store_path: str  # of a file of the job's own
    digits: Digits


def load_digits() -> Digits:
    """The digits, split into training and test images with every digit in the same proportion."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    pixels, labels = load(return_X_y=True)
    images = pixels.reshape(-1, 1, 8, 8)
    parts: list[Any] = train_test_split(
        images, labels.astype(np.int64), test_size=TEST_FRACTION, random_state=SPLIT_SEED, stratify=labels
    )
    train_images, test_images, train_labels, test_labels = parts
    mean, deviation = train_images.mean(), train_images.std()
    train_images, test_images = (
        ((each - mean) / deviation).astype(np.float32) for each in (train_images, test_images)
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def split_batch(indices: npt.NDArray[np.int64], counts: Sequence[int], rank: int) -> npt.NDArray[np.int64]:
    """The part of a global batch that belongs to `rank` when rank r takes ``counts[r]`` examples."""
    start = sum(counts[:rank])
    return indices[start : start + counts[rank]]


def even_counts(batch: int, world: int) -> list[int]:
    """`batch` examples over `world` ranks: equal, or one more for the first few when they don't divide."""
    return [batch // world + (rank < batch % world) for rank in range(world)]
