"""What ``bench ddp`` trains: networks, and the batches that each rank feeds them.

- ``mlp``: six layers of 2048 x 2048 with a bias, ReLU between them: 25,178,112 parameters, 100.7 MB of float32
  gradients, which DDP cuts into four buckets. Inputs are random; the classes are the last layer's 2048 outputs.
- ``digits``: the convolutional network of ``ring-reduce demo``, on its images: 38,282 parameters, one bucket.
- ``tiny``: two small layers, to see that everything runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ring_reduce.demo.data import Digits
from ring_reduce.demo.model import build_model

MODEL_SEED = 1
MLP_WIDTHS = (2048,) * 7
TINY_WIDTHS = (12, 9, 5)
BATCHES = 8  # taken in turn

Batch = tuple[Tensor, Tensor]  # inputs of shape (batch, ...), classes of shape (batch,)


@dataclass(frozen=True)
class Workload:
    """A network, and how much of it to run unless the command line says otherwise."""

    name: str
    text: str
    build: Callable[[], nn.Module]  # the same parameters on every rank and for every contender
    input_shape: tuple[int, ...]
    classes: int
    batch: int  # examples a rank
    steps: int  # timed, of each contender; rounded up to whole bursts
    burst: int  # steps that a contender makes in a row

    def batches(self, rank: int, batch: int, device: str, digits: Digits | None) -> list[Batch]:
        """The rank's own batches of ``batch`` examples; ``digits`` must be there for that network."""
        generator = torch.Generator().manual_seed(rank)
        found = []
        for _ in range(BATCHES):
            if self.name == "digits":
                assert digits is not None
                picks = torch.randint(len(digits.train_labels), (batch,), generator=generator)
                inputs = torch.from_numpy(digits.train_images)[picks]
                classes = torch.from_numpy(digits.train_labels)[picks]
            else:
                inputs = torch.randn(batch, *self.input_shape, generator=generator)
                classes = torch.randint(self.classes, (batch,), generator=generator)
            found.append((inputs.to(device), classes.to(device)))
        return found


def build_mlp(widths: tuple[int, ...]) -> nn.Module:
    """Linear layers from each width to the next, ReLU between them."""
    torch.manual_seed(MODEL_SEED)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _mlp(name: str, text: str, widths: tuple[int, ...], **repeats: int) -> Workload:
    return Workload(name, text, lambda: build_mlp(widths), widths[:1], widths[-1], **repeats)


WORKLOADS = {
    workload.name: workload
    for workload in (
        _mlp("mlp", "MLP of six layers 2048 x 2048", MLP_WIDTHS, batch=32, steps=60, burst=1),
        Workload("digits", "the demo's network on 8 x 8 digits", build_model, (1, 8, 8), 10, 16, 480, 8),
        _mlp("tiny", "MLP of two layers, 12 x 9 and 9 x 5", TINY_WIDTHS, batch=4, steps=6, burst=2),
    )
}
