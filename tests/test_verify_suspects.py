"""The modules that are named where no divisor helps: those whose output depends on what else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ring_reduce as rr
from ring_reduce.verification import Job
from ring_reduce.verification.suspects import find_suspects
from ring_reduce.verification.verdict import Verdict
from verify_helpers import batches_of, losses_of, make_model

BATCHES = batches_of([[5, 3]], 0)
WHOLE = (torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES]))


def suspects_of(model: nn.Module, losses: Any = losses_of) -> tuple[str, ...]:
    return find_suspects(model.double(), losses, WHOLE, BATCHES, 1e-8)


class Centred(nn.Module):
    """Takes the mean of the batch away, in no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x - x.mean(0)


class TimeFirst(nn.Module):
    """The samples in dim 1, as for modules without batch_first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 3, 2).transpose(0, 1)
        outputs: Tensor = (
            self.module(x, x, x)[0] if isinstance(self.module, nn.MultiheadAttention) else self.module(x)[0]
        )
        return outputs.mean(0)


def head(*modules: nn.Module, features: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*modules, nn.Linear(features, 1), nn.Flatten(0))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (head(), ()),
        (head(nn.BatchNorm1d(6)), ("0: BatchNorm1d",)),
        (head(nn.BatchNorm1d(6).eval()), ()),
        (head(nn.LayerNorm(6), nn.Tanh(), nn.GroupNorm(2, 6)), ()),
        (head(nn.SyncBatchNorm(6)), ("0: SyncBatchNorm",)),
        (head(nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.BatchNorm1d(6)), ("0: BatchNorm1d", "2: BatchNorm1d")),
        (head(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), ("0.1: BatchNorm1d",)),
        (head(nn.Linear(6, 6), Centred()), ("1: Centred",)),
        (head(Centred(), nn.BatchNorm1d(6)), ("0: Centred", "1: BatchNorm1d")),
        (head(TimeFirst(nn.MultiheadAttention(2, 1)), features=2), ()),
        (head(TimeFirst(nn.LSTM(2, 2)), features=2), ()),
        (head(TimeFirst(nn.LSTM(2, 2)), nn.BatchNorm1d(2), features=2), ("1: BatchNorm1d",)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_modules_that_depend_on_the_batch(model: nn.Module, expected: tuple[str, ...]) -> None:
    state = {name: value.clone() for name, value in model.double().state_dict().items()}
    assert suspects_of(model) == expected
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_model_itself() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.layer(x)[:, 0]
            return outputs / outputs.std()

    assert suspects_of(Model()) == ("the model itself: Model",)


def negatives_in_the_batch(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Each sample beside all others."""
    features = model[:-2](batch[0])
    return cross_entropy(features @ features.T, torch.arange(len(features)), reduction="none")


def test_the_loss_itself() -> None:
    assert suspects_of(make_model(), negatives_in_the_batch) == ("the loss itself",)


def test_a_loss_with_negatives_has_no_single_factor() -> None:
    def step(model: nn.Module, batches: Sequence[Any], job: Job) -> None:
        for batch in batches:
            (negatives_in_the_batch(model, batch).sum() / 8).backward()

    model = nn.Sequential(
        make_model()[0], nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1), nn.Flatten(0)
    ).double()
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    report = rr.verify(model, BATCHES, negatives_in_the_batch, step)
    assert report.verdict is Verdict.BATCH_DEPENDENT
    assert "the loss itself" in report.text


def test_what_is_right_all_the_same_names_it_in_a_note() -> None:
    """A step that takes the whole batch at once, as synchronised batch norm does over ranks."""

    def step(model: nn.Module, batches: Sequence[Any], job: Job) -> None:
        losses_of(model, WHOLE).mean().backward()

    report = rr.verify(head(nn.BatchNorm1d(6)).double(), BATCHES, losses_of, step)
    assert report.right
    assert "0: BatchNorm1d" in " ".join(report.notes)


def test_a_module_that_can_not_be_called_alone_is_left_out() -> None:
    class Twice(nn.Module):
        """Raises after the three forwards of the model: with the whole batch and with each part."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            if type(self).calls > 3:
                raise RuntimeError("only in its model")
            return x

    assert suspects_of(head(Twice(), nn.BatchNorm1d(6))) == ("1: BatchNorm1d",)
    assert Twice.calls == 4
