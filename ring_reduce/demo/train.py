"""Training with DDP over the ring, each gradient of the first epoch checked against one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr

from .data import Digits, even_counts, split_batch
from .model import WholeBatchReference, build_model, flat_gradient, gradients, sum_of_losses
from .results import Training

GLOBAL_BATCH = 64
LEARNING_RATE = 0.05
MOMENTUM = 0.9
ORDER_SEED = 7


@dataclass(frozen=True)
class RankContext:
    """What a rank works with: its ring, the images, and a way to report progress (rank 0's is shown)."""

    ring: rr.Ring
    digits: Digits
    say: Callable[[str], None]

    def examples(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Training images and labels."""
        return (
            torch.from_numpy(self.digits.train_images[indices]),
            torch.from_numpy(self.digits.train_labels[indices]),
        )


def train(context: RankContext, epochs: int) -> tuple[Training, nn.Module]:
    """Trains for `epochs`, and returns what was seen and the trained model."""
    ring = context.ring
    model = build_model()
    ddp = DistributedDataParallel(model)
    # The last batch of an epoch is short, and then the ranks' parts are unequal: MEAN would weight them wrongly.
    state = rr.RingHookState(ring, rr.WEIGHTED_MEAN)
    ddp.register_comm_hook(state, rr.ring_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    seen = Training(losses=[], steps_per_epoch=0, accuracies=[], gradient_errors=[])

    for epoch in range(epochs):
        started = time.perf_counter()
        checker = _GradientChecker(context, model) if epoch == 0 else None
        losses, errors = [], []
        for batch in _batches(len(context.digits.train_labels), epoch):
            counts = even_counts(len(batch), ring.world)
            images, labels = context.examples(split_batch(batch, counts, ring.rank))
            optimizer.zero_grad()
            state.add_count(len(labels))
            loss_sum = sum_of_losses(ddp, images, labels)
            (loss_sum / len(labels)).backward()
            if checker is not None:
                errors.append(checker.largest_difference(batch))
            optimizer.step()
            losses.append(loss_sum.item() / len(batch))
        seen.losses.extend(ring.all_reduce(np.array(losses)).tolist())
        seen.gradient_errors.extend(_largest_over_ranks(errors))
        seen.accuracies.append(_test_accuracy(context, model))
        seconds = time.perf_counter() - started
        context.say(_progress(epoch, epochs, float(np.mean(seen.losses[-len(losses) :])), seen, seconds))
    steps = len(seen.losses) // epochs
    return Training(seen.losses, steps, seen.accuracies, seen.gradient_errors), model


def _progress(epoch: int, epochs: int, loss: float, seen: Training, seconds: float) -> str:
    accuracy = seen.accuracies[-1]
    line = f"epoch {epoch + 1:2d} of {epochs}   loss {loss:.4f}   test accuracy {accuracy:6.2%}   {seconds:.2f} s"
    if epoch == 0:
        line += f"   gradient within {max(seen.gradient_errors):.1e} of one process"
    return line


def _batches(examples: int, epoch: int) -> Iterator[np.ndarray]:
    """The global batches of an epoch in an order that every rank draws alike; the last is as short as it comes."""
    order = np.random.default_rng((ORDER_SEED, epoch)).permutation(examples)
    for start in range(0, examples, GLOBAL_BATCH):
        yield order[start : start + GLOBAL_BATCH]


class _GradientChecker:
    """Compares this rank's gradient with that of one process (rank 0) that holds the whole batch."""

    def __init__(self, context: RankContext, model: nn.Module) -> None:
        self._context = context
        self._model = model
        self._reference = WholeBatchReference()

    def largest_difference(self, batch: np.ndarray) -> float:
        """Of any parameter: the norm of the difference, relative to the norm of the reference."""
        mine = gradients(self._model)
        flat = torch.empty(sum(gradient.numel() for gradient in mine))
        if self._context.ring.rank == 0:
            flat = self._reference.gradient(self._model, *self._context.examples(batch))
        # Gloo carries the reference, so that the ring under test has no part in it.
        dist.broadcast(flat, src=0)
        expected = flat.split([gradient.numel() for gradient in mine])
        return max(_relative_difference(one, other) for one, other in zip(mine, expected, strict=True))


def _relative_difference(gradient: Tensor, reference: Tensor) -> float:
    one, other = gradient.detach().double().reshape(-1), reference.double()
    difference = float((one - other).norm() / other.norm())
    # The maxima that follow would drop a NaN.
    return math.inf if math.isnan(difference) else difference


def local_gradient(context: RankContext, model: nn.Module) -> Tensor:
    """This rank's own flat gradient, before any all-reduce: what a step of training hands to the ring."""
    ring = context.ring
    batch = np.arange(GLOBAL_BATCH)
    images, labels = context.examples(split_batch(batch, even_counts(GLOBAL_BATCH, ring.world), ring.rank))
    model.zero_grad(set_to_none=True)
    (sum_of_losses(model, images, labels) / len(labels)).backward()
    return flat_gradient(model)


def _largest_over_ranks(values: list[float]) -> list[float]:
    largest = torch.tensor(values, dtype=torch.float64)
    if len(values):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [float(value) for value in largest]


def _test_accuracy(context: RankContext, model: nn.Module) -> float:
    """Every rank tests on its part of the images; the ring adds up the right answers."""
    ring, digits = context.ring, context.digits
    total = len(digits.test_labels)
    mine = split_batch(np.arange(total), even_counts(total, ring.world), ring.rank)
    with torch.no_grad():
        answers = model(torch.from_numpy(digits.test_images[mine])).argmax(dim=1)
    right = (answers == torch.from_numpy(digits.test_labels[mine])).sum()
    return float(ring.all_reduce(right.reshape(1))) / total
