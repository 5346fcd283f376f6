"""What ``rr.verify`` can't check: each is an error that says what and where, or a verdict that is never "right"."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import ring_reduce as rr
from ring_reduce.verification import Job, VerifyError, collect
from ring_reduce.verification.verdict import Verdict
from verify_helpers import Batch, batches_of, losses_of, make_batch, make_model, right_step

COUNTS = [[5, 3]]


def verify(losses: Any = losses_of, step: Any = right_step, *, batches: Any = None, **options: Any) -> Any:
    model = options.pop("model", None) or make_model()
    return rr.verify(model, batches_of(COUNTS, 0) if batches is None else batches, losses, step, **options)


def refused(text: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(VerifyError, match=re.escape(text)):
        verify(*arguments, **options)


# Losses


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda values: values.mean(), "a tensor of shape () for micro-batch 0 of rank 0; it has to be 1-D"),
        (lambda values: values.unsqueeze(1), "a tensor of shape (5, 1) for micro-batch 0 of rank 0"),
        (lambda values: values.tolist(), "returned a list for micro-batch 0 of rank 0"),
        (lambda values: values.detach(), "a tensor without gradient for micro-batch 0 of rank 0"),
        (lambda values: values.long(), "returned torch.int64 for micro-batch 0 of rank 0"),
        (
            lambda values: values.mean().reshape(1),
            "returned 1 losses for the whole batch, but 1 + 1 = 2 for its micro-batches",
        ),
    ],
    ids=["mean", "two dims", "list", "detached", "integers", "mean of each"],
)
def test_losses_that_are_no_losses(change: Callable[[Tensor], Any], text: str) -> None:
    refused(text, lambda model, batch: change(losses_of(model, batch)))


def test_losses_that_raise() -> None:
    refused(
        "rank 0: the reference raised AttributeError: 'Sequential' object has no",
        lambda model, batch: model.nothing,
    )


def test_losses_that_are_random() -> None:
    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return dropout(losses_of(model, batch), 0.5)

    refused("losses() gave other values for micro-batch 0 of rank 0 with other random numbers", losses)


# Batches


def dicts(*batches: dict[str, Any]) -> list[dict[str, Any]]:
    return list(batches)


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], "no rank has a micro-batch"),
        (torch.ones(3, 6), "batches is a Tensor; it has to be a list of this rank's micro-batches"),
        (["words"], "micro-batch 0 of rank 0 is a str without a tensor that has a dim 0"),
        ([torch.tensor(1.0)], "is a Tensor without a tensor that has a dim 0"),
        (batches_of([[0, 0]], 0), "no rank has a sample: every micro-batch is empty"),
        ([(torch.ones(3, 6), torch.ones(2))], "batch[0] has 3 samples in dim 0 and batch[1] has 2"),
        (
            [torch.ones(3, 6), torch.ones(3, 7)],
            "batch has shape (3, 6) in micro-batch 0 of rank 0 and (3, 7) in micro-batch 1 of rank 0; only dim 0",
        ),
        ([torch.ones(3, 6), torch.ones(3, 6).double()], "batch is torch.float32 in micro-batch 0 of rank 0 and"),
        ([(torch.ones(2),), (torch.ones(2), torch.ones(2))], "batch has 1 entries in micro-batch 0 of rank 0 and 2 in"),
        (
            dicts({"x": torch.ones(2), "pad": 3}, {"x": torch.ones(2), "pad": 4}),
            "batch['pad'] is 3 in micro-batch 0 of rank 0 and 4 in micro-batch 1 of rank 0; what is no tensor",
        ),
        (
            dicts({"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2)}),
            "batch has ['x'] in micro-batch 0 of rank 0 and ['x', 'y'] in micro-batch 1 of rank 0",
        ),
        ([torch.ones(2), (torch.ones(2),)], "batch is a Tensor in micro-batch 0 of rank 0 and a tuple in"),
        (
            [(torch.ones(2), torch.tensor(1)), (torch.ones(2), torch.tensor(2))],
            "batch[1] is 1 in micro-batch 0 of rank 0 and 2 in micro-batch 1",
        ),
    ],
)  # fmt: skip
def test_batches_that_do_not_fit(batches: Any, text: str) -> None:
    refused(text, batches=batches)


# Steps


def test_a_step_that_raises() -> None:
    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        raise ValueError("no such thing")

    with pytest.raises(VerifyError, match=r"^rank 0: step\(\) raised ValueError: no such thing$") as caught:
        verify(step=step)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_step_without_a_gradient() -> None:
    def zeroed(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        right_step(model, batches, job)
        model.zero_grad()

    refused("rank 0: step() left no gradient in any parameter", step=zeroed)
    refused("rank 0: step() left no gradient in any parameter", step=lambda model, batches, job: None)


@pytest.mark.parametrize(
    ("value", "text"), [("a loss", "'a loss'"), (torch.ones(2), "a tensor of shape (2,)"), ((1, 2), "(1, 2)")]
)
def test_a_step_that_returns_no_number(value: Any, text: str) -> None:
    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> Any:
        right_step(model, batches, job)
        return value

    refused(f"rank 0: step() returned {text}; it returns the loss that it logs", step=step)


# Arguments


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"micro_batches": 0}, "micro_batches is 0; it has to be None or a whole number of at least 1"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"micro_batches": 1}, "micro_batches is 1, and 2 batches were given"),
        ({"sample": 0}, "sample is 0"),
        ({"sample": 2.5}, "sample is 2.5"),
        ({"tolerance": 0}, "tolerance is 0; it is relative"),
        ({"tolerance": 2.0}, "tolerance is 2.0"),
        ({"losses": 1}, "losses is 1; it has to be a function"),
        ({"step": None}, "step is None; it has to be a function"),
        ({"model": "model"}, "model is a str; verify takes a torch.nn.Module"),
        ({"model": nn.Tanh()}, "the model, a Tanh, has no parameter with requires_grad"),
        (
            {"model": nn.ParameterList([torch.ones(2, dtype=torch.complex64)])},
            "parameter 0 is torch.complex64",
        ),
    ],
)
def test_wrong_arguments(options: dict[str, Any], text: str) -> None:
    refused(text, **options)


def test_a_model_that_is_too_large_offers_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """65 elements of 1 rank and 2 micro-batches: 19 vectors at most."""
    monkeypatch.setattr(collect, "MOST_BYTES", 5000)
    refused(
        "65 elements of 3 gradients (ranks and micro-batches) would take up to 9,880 bytes on rank 0, and the most is "
        "5,000"
    )
    refused("pass sample=8")
    assert verify(sample=8).right


MEMORY = """
import re
import torch
import ring_reduce as rr
from ring_reduce.verification.collect import bytes_needed

def losses(model, batch):
    return model(batch).square().mean(1)

def step(model, batches, job):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * {factor}

def peak(inputs, outputs):
    model = torch.nn.Linear(inputs, outputs)
    batches = [torch.randn(2 + index, inputs) for index in range(6)]
    report = rr.verify(model, batches, losses, step)
    # Not ru_maxrss, which begins with that of the process that started this one.
    return report.verdict.value, 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

_, before = peak(10, 10)
verdict, after = peak(1000, 2000)
print(verdict, (after - before) / bytes_needed(2_002_000, 1, 6))
"""


@pytest.mark.parametrize(("factor", "verdict"), [("1", "unknown"), ("torch.nan", "not finite")])
def test_it_takes_no_more_memory_than_it_says(factor: str, verdict: str) -> None:
    """Beside the model, its copy and its gradients, which are a tenth of it here."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.replace("{factor}", factor)], capture_output=True, text=True, check=True
    )
    found, _, share = done.stdout.strip().rpartition(" ")
    assert found == verdict
    assert 0.3 < float(share) < 1.3


# Gradients that are not finite, and a reference that is zero


def test_a_gradient_that_is_nan_or_infinite_is_named() -> None:
    for value in (torch.nan, torch.inf):

        def step(model: Any, batches: Sequence[Batch], job: Job, value: float = value) -> None:
            right_step(model, batches, job)
            model[2].weight.grad[0, 3] = value

        report = verify(step=step)
        assert (report.verdict, report.right, report.exit_status) == (Verdict.NOT_FINITE, False, 1)
        assert "2.weight" in report.text
        assert [line.name for line in report.parameters if line.verdict is Verdict.NOT_FINITE] == ["2.weight"]
        assert report.to_dict()["largest_difference"] is None


def test_a_reference_that_is_nan_tells_nothing() -> None:
    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return losses_of(model, batch) / 0 * 0

    report = verify(losses, lambda model, batches, job: losses(model, batches[0]).sum().backward())
    assert (report.verdict, report.right, report.exit_status) == (Verdict.NOT_FINITE, None, 2)
    assert str(report).startswith("COULD NOT TELL: gradient is NaN or infinite")


def test_a_reference_that_is_zero_tells_nothing() -> None:
    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return losses_of(model, batch) * 0

    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        for batch in batches:
            losses(model, batch).sum().backward()

    report = verify(losses, step)
    assert (report.verdict, report.right, report.exit_status) == (Verdict.ZERO, None, 2)


def test_nothing_that_counts_tells_nothing() -> None:
    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        losses_of(model, batches[0]).sum().backward()

    nothing = [make_batch(0, 0, 0, ignored=4)]
    report = verify(step=step, batches=nothing)
    assert (report.verdict, report.exit_status) == (Verdict.ZERO, 2)
    report = verify(batches=nothing)  # 0 / 0
    assert (report.verdict, report.exit_status) == (Verdict.NOT_FINITE, 1)


def test_a_parameter_without_a_gradient_is_named() -> None:
    def step(model: Any, batches: Sequence[Batch], job: Job) -> None:
        right_step(model, batches, job)
        model[0].bias.grad = None

    report = verify(step=step)
    assert (report.verdict, report.exit_status) == (Verdict.MISSING, 1)
    assert "0.bias" in report.text
