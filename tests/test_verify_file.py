"""The protocol of ``ring-reduce verify``: the examples follow it, and what doesn't is told what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import Run
from launch import Seat
from ring_reduce.verification import VerifyError
from ring_reduce.verification.file import Orders, load_file
from ring_reduce.verification.rank import check_length
from ring_reduce.verification.report import Report
from ring_reduce.verification.verdict import Verdict
from verify_files import EXAMPLES, GOOD, write
from verify_helpers import ranks


def check_example(seat: Seat, name: str, planned: int) -> list[Report]:
    """As the command does, in processes that are there."""
    lengths = (planned, planned - 1) if planned > 1 else (planned,)
    orders = Orders(str(EXAMPLES / name), seat.world, planned, lengths, None, None, 60.0, "")
    file = load_file(EXAMPLES / name)
    with ranks(seat):
        return [check_length(seat.rank, orders, file, length, lambda text: None) for length in lengths]


RIGHT, ONE_N = (Verdict.RIGHT, "of the mean loss"), (Verdict.FACTOR, "0.5 = 1/n (n = 2)")
EXPECTED = {
    "ddp.py": [RIGHT],
    "ddp_accumulation.py": [RIGHT, RIGHT],
    "token_language_model.py": [RIGHT, RIGHT],
    "wrong_averaged_twice.py": [ONE_N, ONE_N],
    "wrong_summed_local_means.py": [(Verdict.FACTOR, "2 = n (n = 2)"), (Verdict.FACTOR, "2 = n (n = 2)")],
    "wrong_mean_of_means.py": [(Verdict.WEIGHTING, "right is 1/115"), (Verdict.WEIGHTING, "right is 1/100")],
    "wrong_accumulation_not_divided.py": [(Verdict.FACTOR, "3 = N (N = 3)"), (Verdict.FACTOR, "k (k = 2 micro-b")],
    "wrong_short_group.py": [RIGHT, (Verdict.FACTOR, "k/N = 2/3")],
    "wrong_batch_norm.py": [(Verdict.BATCH_DEPENDENT, "1: BatchNorm1d")] * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_examples_are_right_or_wrong_as_they_say(name: str, run: Run) -> None:
    reports = run(2, check_example, name, 1 if name == "ddp.py" else 3)[0]
    assert [report.verdict for report in reports] == [verdict for verdict, _ in EXPECTED[name]]
    for report, (_, words) in zip(reports, EXPECTED[name], strict=True):
        assert words in report.text


def test_every_example_is_known_and_short() -> None:
    paths = sorted(EXAMPLES.glob("*.py"))
    assert {path.name for path in paths} == set(EXPECTED)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 60
        assert f"ring-reduce verify examples/verify/{path.name} --world 2 --micro-batches" in text
        assert f"({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


# Files that don't follow the protocol


def refused(path: Path) -> str:
    with pytest.raises(VerifyError) as caught:
        load_file(path)
    return str(caught.value)


def test_what_a_file_lacks_is_listed(tmp_path: Path) -> None:
    path = write(tmp_path, "def model(): pass\nlosses = 3\nstep = print\n")
    assert refused(path).splitlines() == [
        f"{path} lacks batches() and losses():",
        "  batches(rank, world, micro_batches) -> the list of this rank's micro-batches, samples in dim 0",
        "  losses(model, batch) -> a 1-D tensor, one loss for each counted sample or token",
    ]


def test_a_function_with_other_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("def step(model, batches, job)", "def step(model, batches)"))
    assert refused(path) == (
        f"{path}: step(model, batches) can't be called as step(model, batches, job): too many positional arguments"
    )


def test_no_python_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(GOOD, encoding="utf-8")
    assert "its name has to end in .py" in refused(path)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "batches() returned a NoneType on rank 0; it has to return a list"),
        ("[1]", "batches() returned 1 micro-batches on rank 0, and --micro-batches is 3"),
    ],
)
def test_batches_that_are_too_few(returned: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"{GOOD}\ndef batches(rank, world, micro_batches):\n    return {returned}\n")
    with pytest.raises(VerifyError, match=re.escape(message)):
        load_file(path).batches(0, 1, 3)
