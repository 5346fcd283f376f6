"""``rr.verify`` in one process: what it leaves as it was, what it takes, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ring_reduce as rr
from ring_reduce.verification import Job, VerifyError
from ring_reduce.verification.verdict import Verdict
from verify_helpers import Batch, Scaled, batches_of, losses_of, make_model, right_step

COUNTS = [[5, 3]]


def verify(step: Any = right_step, model: nn.Module | None = None, **options: Any) -> Any:
    return rr.verify(model or make_model(), batches_of(COUNTS, 0), losses_of, step, **options)


def test_it_is_a_function_and_needs_no_torch_until_it_is_called() -> None:
    code = "import sys, ring_reduce as rr; print(callable(rr.verify), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_right_and_wrong() -> None:
    report = verify()
    assert (report.right, report.exit_status, report.factor) == (True, 0, 1.0)
    assert report.difference < 1e-14
    report = verify(Scaled(lambda count, job: 1))
    assert (report.right, report.exit_status, report.verdict) == (False, 1, Verdict.FACTOR)
    assert report.factor == pytest.approx(8)
    assert report.names == ("B (B = 8)",)


def test_the_report_is_a_table_and_json() -> None:
    report = verify(Scaled(lambda count, job: 8 * 8))
    lines = str(report).splitlines()
    assert lines[0].startswith("WRONG: gradient is 0.125 = 1/B (B = 8)")
    assert "n = 1 rank, 2 micro-batches each, B = 8 samples: 5 3" in lines
    start = next(i for i, line in enumerate(lines) if line.startswith("  parameter"))
    table = [line.split() for line in lines[start : start + 5]]
    assert [row[:2] for row in table[1:]] == [
        ["0.weight", "48"],
        ["0.bias", "8"],
        ["2.weight", "8"],
        ["2.bias", "1"],
    ]
    assert all(row[2] == "0.88" for row in table[1:])  # 7/8 of it is missing
    assert all(row[3:] == ["0.125", "factor", "=", "1/B", "(B", "=", "8)"] for row in table[1:])
    assert len({line.index("0.125") for line in lines[start + 1 : start + 5]}) == 1
    assert any(line.startswith("Adam") for line in lines)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (found["verdict"], found["factor"], found["exit_status"]) == ("factor", pytest.approx(1 / 8), 1)
    assert found["parameters"][0]["elements"] == 48
    assert found["counts"] == [[5, 3]]


class Shifted(nn.Linear):
    """Adds one number to all logits, which the softmax ignores."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def test_a_gradient_that_is_all_rounding_is_right_and_says_so() -> None:
    torch.manual_seed(0)
    batches = [(x.float(), y.abs().long() % 4) for x, y in batches_of([[50, 30]], 0)]

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        for batch in batches:
            (losses(model, batch).sum() / 80).backward()

    report = rr.verify(Shifted(), batches, losses, step)
    assert report.right
    lines = {line.split()[0]: line for line in str(report).splitlines() if line.startswith("  ")}
    assert lines["weight"].endswith("  right")
    assert lines["shift"].endswith("  right: rounding, all of it cancels")


def test_a_large_table_is_cut() -> None:
    model = nn.Sequential(
        *[nn.Linear(6, 6, dtype=torch.float64) for _ in range(30)], nn.Linear(6, 1).double()
    )
    model.append(nn.Flatten(0))
    report = verify(model=model)
    assert str(report).count("weight") + str(report).count("bias") == 40
    assert "and 22 more, 0 of them not right" in str(report)
    assert len(report.to_dict()["parameters"]) == 62


def test_the_logged_loss_is_compared() -> None:
    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> Tensor:
        right_step(model, batches, job)
        return torch.stack([losses_of(model, batch).sum() for batch in batches]).sum()

    assert "The logged loss is 8 = B (B = 8) times the mean over the whole batch" in verify(step).logged
    assert verify().logged == ""


class Everything(nn.Module):
    """Dropout of every kind, batch norm, a frozen parameter, one that is used twice, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(self.first(x))).unsqueeze(1).expand(-1, 3, -1)
        x = self.lstm(x)[0]
        x = self.attention(x, x, x)[0].mean(1)
        outputs: Tensor = self.last(self.frozen(self.norm(x)))
        return outputs[:, 0]


def test_everything_is_as_it_was() -> None:
    torch.manual_seed(0)
    model = Everything()
    model.lstm.eval()
    model.first.weight.grad = torch.ones(6, 6)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    batches = [(x.float(), y.float()) for x, y in batches_of([[8]], 0)]

    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        assert all(parameter.grad is None for parameter in model.parameters())
        model.train()
        right_step(model, batches, job)

    report = rr.verify(model, batches, losses_of, step)
    assert report.right, report.text
    assert [line.name for line in report.parameters if line.name.startswith("frozen")] == []
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.norm.num_batches_tracked == 0
    assert (model.drop.p, model.lstm.dropout, model.attention.dropout) == (0.5, 0.5, 0.5)
    assert model.training
    assert not model.lstm.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_under_no_grad() -> None:
    with torch.no_grad():
        assert verify().right


def test_a_hook_of_a_parameter_belongs_to_the_step() -> None:
    model: Any = make_model()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / 7)
    report = verify(model=model)
    assert report.factor == pytest.approx(1 / 7)
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    assert model[2].bias.grad.item() == pytest.approx(1 / 7)


def test_parameters_that_step_changes_are_named_and_restored() -> None:
    model = make_model()
    before = [parameter.clone() for parameter in model.parameters()]

    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        right_step(model, batches, job)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with pytest.raises(
        VerifyError, match=r"rank 0: step\(\) changed parameter 0\.weight; .* before optimizer\.step"
    ):
        verify(step, model)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


Named = namedtuple("Named", "x rest")


def test_batches_are_nests() -> None:
    def nested(batch: Batch) -> Any:
        x, y = batch
        return OrderedDict(named=Named(x, [y, {"scale": torch.tensor(2.0)}]), mode="train", none=None)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(batch, OrderedDict)
        assert batch["mode"] == "train"
        y, extra = batch["named"].rest
        values: Tensor = (model(batch["named"].x) - y).square() * extra["scale"]
        return values

    def step(model: nn.Module, batches: Sequence[Any], job: Job) -> None:
        total = sum(len(batch["named"].x) for batch in batches)
        for batch in batches:
            (losses(model, batch).sum() / total).backward()

    assert rr.verify(make_model(), [nested(batch) for batch in batches_of(COUNTS, 0)], losses, step).right


def test_empty_micro_batches_and_ignored_labels() -> None:
    batches = batches_of([[4, 0, 1]], 0, samples=5) + batches_of([[0]], 0)
    report = rr.verify(make_model(), batches, losses_of, right_step)
    assert report.right
    assert (report.sizes.samples, report.sizes.counts) == (((5, 5, 5, 0),), ((4, 0, 1, 0),))


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1), nn.Flatten(0))
    tokens = [torch.tensor([[1, 2], [2, 3]]), torch.tensor([[2, 2]])]

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        values: Tensor = (model(batch) - 1).square()
        return values

    def step(model: nn.Module, batches: Sequence[Tensor], job: Job) -> None:
        for batch in batches:
            (losses(model, batch).sum() / 3).backward()

    assert rr.verify(model, tokens, losses, step).right


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-3.5), (torch.float16, 2**-5), (torch.float32, 2**-11.5)]
)
def test_the_tolerance_is_of_the_type(dtype: torch.dtype, tolerance: float) -> None:
    batches = [(x.to(dtype), y.to(dtype)) for x, y in batches_of([[8, 8]], 0)]
    report = rr.verify(make_model(dtype), batches, losses_of, Scaled(lambda count, job: 16))
    assert report.right, report
    assert report.tolerance == pytest.approx(tolerance)
    report = rr.verify(make_model(dtype), batches, losses_of, Scaled(lambda count, job: 8), tolerance=0.2)
    assert (report.tolerance, report.names) == (0.2, ("N (N = 2)",))


def test_a_sample_of_the_elements() -> None:
    report = verify(Scaled(lambda count, job: 8 * 8), sample=5)
    assert (report.compared, report.elements) == (5 + 5 + 5 + 1, (48, 8, 8, 1))
    assert report.factor == pytest.approx(1 / 8)
    assert "16 of 65 (a sample)" in str(report)
