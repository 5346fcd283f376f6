"""What a step's numbers can't show is never "right" without a word, nor wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ring_reduce as rr
from conftest import Run
from diagnosis_cases import bfloat16, exact, measured_of, random_parts, sizes_of
from launch import Seat
from ring_reduce.verification import Job, VerifyError
from ring_reduce.verification.diagnosis import Verdict, diagnose
from ring_reduce.verification.file import Orders, load_file
from ring_reduce.verification.measured import Vector
from ring_reduce.verification.rank import check_length
from ring_reduce.verification.report import Report
from verify_files import GOOD, write
from verify_helpers import Batch, Scaled, batches_of, losses_of, make_model, ranks, right_step

COUNTS = [[5, 3]]
RIGHT = Scaled(lambda count, job: 8)


# Ranks with the same data


def local_step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    """Without a reduction."""
    for batch in batches:
        (losses_of(model, batch).sum() / 8).backward()


def doubled_step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    right_step(model, batches, job)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2


def with_same_data(seat: Seat, step: Any, shift: float) -> Report:
    batches = batches_of(COUNTS, 0)
    batches[-1][0][-1] += shift * seat.rank
    with ranks(seat):
        return rr.verify(make_model(), batches, losses_of, step)


@pytest.mark.parametrize("step", [local_step, right_step])
def test_ranks_with_the_same_data_show_no_reduction(step: Any, run: Run) -> None:
    report = run(2, with_same_data, step, 0.0)[0]
    assert (report.verdict, report.right, report.exit_status) == (Verdict.UNTOLD, None, 2)
    assert report.text == (
        "ranks 0 and 1 have the same data, so a missing reduction can't be seen; give each rank its own"
    )


def test_other_data_shows_it_and_what_is_wrong_anyway_is_wrong(run: Run) -> None:
    assert run(2, with_same_data, doubled_step, 0.0)[0].right is False
    assert run(2, with_same_data, local_step, 1.0)[0].right is False
    assert run(2, with_same_data, right_step, 1.0)[0].right is True


DRAWN = GOOD.replace("torch.arange(6.0).reshape(2, 3) + rank + index", "torch.randn(2, 3)")


def check_file(seat: Seat, text: str, folder: str) -> Report:
    path = Path(folder) / "drawn.py"
    orders = Orders(str(path), seat.world, 3, (3,), None, None, 60.0, "")
    file = load_file(path)
    with ranks(seat):
        return check_length(seat.rank, orders, file, 3, lambda text: None)


def test_ranks_that_draw_their_data_draw_other_data(run: Run, tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN, encoding="utf-8")
    assert run(2, check_file, DRAWN, str(tmp_path))[0].right is True


# Parameters without a gradient, and small ones


def changed(values: Vector, where: slice, factor: float) -> Vector:
    result: Vector = values.copy()
    result[..., where] *= factor
    return result


class Adapter(nn.Module):
    """``first`` has no gradient as long as ``second`` is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = make_model()
        self.first = nn.Parameter(torch.randn(3, 6, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(6, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x + x @ self.first.t() @ self.second.t())
        return y


def test_a_parameter_whose_reference_is_zero_is_not_called_right() -> None:
    report = rr.verify(Adapter(), batches_of(COUNTS, 0), losses_of, RIGHT)
    assert report.right
    lines = {line.name: line for line in report.parameters}
    assert (lines["first"].verdict, lines["first"].factor) == (Verdict.UNTOLD, None)
    assert all(line.verdict is Verdict.RIGHT for name, line in lines.items() if name != "first")
    assert any("Nothing could be told for first: " in note for note in report.notes)
    assert "nothing could be told" in str(report)


@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_a_small_parameter_has_a_floor_of_its_own(size: float) -> None:
    """A layer scale of 1e-6 as in CaiT: half of a gradient is wrong however small it is."""
    sizes, where = sizes_of([[3, 5, 2], [4, 1, 6]]), slice(20, 40)
    parts = changed(random_parts(sizes, 40), where, size)
    right = parts.sum(axis=0) / 21
    tolerance: dict[str, Any] = {"tolerance": 3.45e-4, "epsilon": 1.2e-7}
    found = diagnose(
        measured_of(sizes, changed(right, where, 0.5), parts=parts, parameters=[20, 20], **tolerance)
    )
    assert found.right is False
    assert diagnose(measured_of(sizes, right, parts=parts, parameters=[20, 20], **tolerance)).right is True


def test_one_element_of_noise_is_no_alarm() -> None:
    """Two ways to it agree by luck, and the step's is a third: the noise that a softmax leaves of a shift."""
    sizes, where = sizes_of([[3, 5, 2], [4, 1, 6]]), slice(39, 40)
    parts = random_parts(sizes, 40)
    parts[:, where] = np.array([[1.0, -1.0, 2.0, -2.0, 1.0, -1.0]]).T * 1e-7
    gradient = parts.sum(axis=0) / 21
    gradient[where] = 4e-7
    fields: dict[str, Any] = {"tolerance": 3.45e-4, "epsilon": 1.2e-7, "rounding": exact}
    found = diagnose(measured_of(sizes, gradient, parts=parts, parameters=[39, 1], **fields))
    assert found.right is True


def test_a_small_parameter_in_16_bits() -> None:
    """Its floor is no coarser than that of a single micro-batch."""
    sizes, where = sizes_of([[3, 5, 2], [4, 1, 6]]), slice(100, 300)
    parts = changed(random_parts(sizes, 300), where, 2e-3)
    gradient = changed(parts.sum(axis=0) / 21, where, 0.25)
    rough: dict[str, Any] = {"tolerance": 0.088, "epsilon": 2**-7, "rounding": bfloat16}
    assert diagnose(measured_of(sizes, gradient, parts=parts, parameters=[100, 200], **rough)).right is False


# Sixteen bits that the parameters' type does not show


def autocast_losses(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return losses_of(model, batch)


def autocast_step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
    for batch in batches:
        (autocast_losses(model, batch).sum() / 8).backward()


def float32(batches: Sequence[Batch]) -> list[Batch]:
    return [(x.float(), y.float()) for x, y in batches]


def test_autocast_is_recognized() -> None:
    model = make_model(torch.float32)
    batches = float32(batches_of(COUNTS, 0))
    report = rr.verify(model, batches, autocast_losses, autocast_step)
    assert (report.verdict, report.right) == (Verdict.UNTOLD, None), report
    assert report.text == "looks like autocast or another 16-bit computation; pass --tolerance 0.09"
    assert rr.verify(model, batches, autocast_losses, autocast_step, tolerance=0.09).right is True


def test_a_tolerance_below_the_epsilon_is_refused() -> None:
    model, batches = make_model(torch.float32), float32(batches_of(COUNTS, 0))
    with pytest.raises(VerifyError, match=r"tolerance is 1e-08, and the epsilon .* is 1.19e-07"):
        rr.verify(model, batches, losses_of, RIGHT, tolerance=1e-8)


@pytest.mark.parametrize(("scale", "right"), [(1e-42, None), (1e-30, True)])
def test_subnormal_gradients_tell_nothing(scale: float, right: bool | None) -> None:
    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return losses_of(model, batch) * scale

    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        for batch in batches:
            (losses(model, batch).sum() / 8).backward()

    report = rr.verify(make_model(torch.float32), float32(batches_of(COUNTS, 0)), losses, step)
    assert report.right is right
    assert ("subnormal" in report.text) == (right is None)


# Batches


def test_class_weights_in_a_batch_are_ambiguous() -> None:
    """As many as samples: joined for the whole batch, they are other weights."""
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    batches = [(*batch, weights) for batch in batches_of([[5, 5]], 0)]

    def losses(model: nn.Module, batch: Any) -> Tensor:
        values: Tensor = losses_of(model, batch[:2]) * batch[2].sum()
        return values

    def step(model: nn.Module, batches: Sequence[Any], job: Job) -> None:
        for batch in batches:
            (losses(model, batch).mean() / 2).backward()

    report = rr.verify(make_model(), batches, losses, step)
    assert report.right is None
    assert any("batch[2]: the same in all micro-batches" in note for note in report.notes)
    masked = [(*batch, torch.ones(5)) for batch in batches_of([[5, 5]], 0)]
    wrong = rr.verify(make_model(), masked, lambda m, b: losses_of(m, b[:2]), lambda m, b, j: step(m, b, j))
    assert wrong.right is False


def test_what_joining_can_not_cause_stays_wrong() -> None:
    """A gradient that a rank lacks has nothing to do with class weights."""
    sizes = sizes_of([[5, 5], [5, 5]])
    right = random_parts(sizes, 40).sum(axis=0) / 20
    gradient = np.array([right, changed(right, slice(27, 40), 0.0)])
    found = diagnose(measured_of(sizes, gradient, missing=((), ("p1",)), constant=("[2]",)))
    assert (found.verdict, found.right) == (Verdict.MISSING, False)


def test_class_weights_that_do_not_fit_are_explained() -> None:
    weights = torch.arange(1.0, 5.0)
    batches = [(torch.randn(4, 6), torch.randint(0, 4, (4,)), weights) for _ in range(2)]

    def losses(model: nn.Module, batch: Any) -> Tensor:
        values: Tensor = cross_entropy(model(batch[0]), batch[1], batch[2], reduction="none")
        return values

    with pytest.raises(VerifyError, match=r"for the whole batch\. batch\[2\]: the same in all micro-batches"):
        rr.verify(nn.Linear(6, 4), batches, losses, lambda model, batches, job: None)


def test_losses_that_change_the_batch_in_place() -> None:
    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return losses_of(model, (batch[0].sub_(0.1), batch[1]))

    def step(model: nn.Module, batches: Sequence[Batch], job: Job) -> None:
        for batch in batches:
            (losses(model, batch).sum() / 8).backward()

    report = rr.verify(make_model(), batches_of(COUNTS, 0), losses, step)
    assert report.right, report


# Files


SPAWNED = """
import torch.utils.data
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index): return torch.arange(3.0) + index

def batches(rank, world, micro_batches):
    loader = torch.utils.data.DataLoader(Rows(), 2, num_workers=1, multiprocessing_context="spawn")
    return [batch + rank for batch in loader][:micro_batches]
"""


def test_a_class_of_the_file_reaches_spawned_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    path = write(tmp_path, GOOD + SPAWNED).rename(tmp_path / "with_rows.py")
    assert len(load_file(path).batches(0, 1, 3)) == 3


def test_a_file_whose_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    path = write(tmp_path, GOOD).rename(tmp_path / "torch.py")
    assert load_file(path).path == path
    assert callable(torch.ones)
    assert sys.modules["torch"] is torch
