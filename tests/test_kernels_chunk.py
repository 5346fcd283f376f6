"""The Triton passes over a ring's segment without a GPU: to the bit in Triton's interpreter, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels take torch tensors: pip install torch")

import torch

from chunk_cases import CASES
from tools import require_tool

TESTS = Path(__file__).resolve().parent
KERNELS = TESTS.parent / "kernels" / "chunk.py"
# A case, what stands in kernels/chunk.py, and a fault in its place.
FAULTS = [
    ("sizes", "x, y, offsets < rest,", "x, y, offsets <= rest,"),
    ("sizes", "x, y, offsets < rest,", "x, y, offsets < rest - 1,"),
    ("sizes", "to(tl.int64) * BLOCK", "to(tl.int64) * (BLOCK - 1)"),
    ("sizes", "triton.cdiv(elements, BLOCK)", "triton.cdiv(elements - 1, BLOCK)"),
    ("sizes", "multiple_of(out + begin,", "multiple_of(out,"),
    ("sizes", "torch.int32: tl.int32", "torch.int32: tl.float32"),
    ("sizes", "torch.int64: tl.int64", "torch.int64: tl.float64"),
    ("numbers", "tl.div_rn(total.to(SUM_TYPE), by)", "total * (1 / by)"),
    ("numbers", "else total / by", "else total * (1 / by)"),
    ("numbers", "term * _number(y_scale, SUM_TYPE)", "term * _number(x_scale, SUM_TYPE)"),
    ("numbers", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    ("numbers", "torch.bfloat16: tl.float32", "torch.bfloat16: tl.bfloat16"),
    ("numbers", "bitcast=True).to(TYPE)", "bitcast=True).to(tl.float32).to(TYPE)"),
    # Of a half, the lower bytes of which are zeros, as of pytorch issue 190745.
    (
        "numbers",
        "word.to(tl.int64).to(tl.float64, bitcast=True)",
        "word.to(tl.int32).to(tl.float32, bitcast=True)",
    ),
    ("numbers", "scaled = x_scale != 1 or", "scaled = x_scale > 1 or"),
    ("numbers", "y is not None and y_scale != 1", "y is not None and y_scale > 1"),
    (
        "in place",
        "        term = tl.load(y",
        "        tl.store(out, total.to(out.dtype.element_ty), mask=inside)\n        term = tl.load(y",
    ),
    ("copies", "total = tl.load(x, mask=inside)", "total = tl.load(x, mask=inside) + 0"),
    ("rings", '"3d", x_scale, y_scale, divisor', '"3d", y_scale, x_scale, divisor'),
]


@pytest.fixture(scope="module", autouse=True)
def _triton() -> None:
    require_tool("triton", "pip install triton==3.9.0")


Found = dict[tuple[Path, str], list[str]]


@pytest.fixture(scope="module")
def interpreted(_triton: None, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What is wrong in each case, of the passes and of each fault: one process for all, since torch loads slowly."""
    jobs = [(KERNELS, case) for case in CASES]
    folder = tmp_path_factory.mktemp("faults")
    for i, (case, text, fault) in enumerate(FAULTS):
        source = KERNELS.read_text()
        assert source.count(text) == 1, text
        jobs.append((folder / f"fault_{i}.py", case))
        jobs[-1][0].write_text(source.replace(text, fault))
    done = subprocess.run(
        [sys.executable, "chunk_cases.py", *(str(part) for job in jobs for part in job)],
        cwd=TESTS,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_interpreted(interpreted: Found, case: str) -> None:
    assert interpreted[KERNELS, case] == []


def test_faults_are_seen(interpreted: Found) -> None:
    found = [wrong for (path, _), wrong in interpreted.items() if path != KERNELS]
    missed = [fault for fault, wrong in zip(FAULTS, found, strict=True) if not wrong]
    assert missed == []


# --- the launcher

X, LONG, MANY = torch.zeros(4), torch.zeros(5), torch.zeros(8)


@pytest.mark.parametrize(
    ("out", "x", "y", "error", "text"),
    [
        (X, X, LONG, ValueError, "y has 5 elements but x 4"),
        (LONG, X, X, ValueError, "out has 5 elements but x 4"),
        (X.double(), X, X, TypeError, "out is torch.float64 but x is torch.float32"),
        (X, X, X.half(), TypeError, "y is torch.float16 but x is torch.float32"),
        (X, X, torch.zeros(4, device="meta"), ValueError, "y is on meta but x on cpu"),
        (MANY[::2], X, X, ValueError, r"out has shape \(4,\) and strides \(2,\)"),
        (X, X.view(2, 2), X, ValueError, r"x has shape \(2, 2\)"),
    ],
)
def test_wrong_tensors(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, error: type[Exception], text: str
) -> None:
    from ring_reduce.kernels.chunk import combine

    with pytest.raises(error, match=text):
        combine(out, x, y)
    if not text.startswith("y "):
        with pytest.raises(error, match=text):
            combine(out, x)


def test_other_types_are_not_added() -> None:
    from ring_reduce.kernels.chunk import combine

    with pytest.raises(
        TypeError, match=r"x is torch.bool; what can be added up is float64, float32, float16"
    ):
        combine(X.bool(), X.bool(), X.bool())


@pytest.mark.parametrize("numbers", [{"x_scale": 0.5}, {"y_scale": 2.0}, {"divisor": 3}], ids=str)
def test_integers_are_only_added(numbers: dict[str, float]) -> None:
    from ring_reduce.kernels.chunk import combine

    with pytest.raises(ValueError, match="integers can only be added"):
        combine(X.int(), X.int(), X.int(), **numbers)


class Recorder:
    """In the place of the kernel: what it would be launched with."""

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        self.grid = grid
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.arguments, self.constants = arguments, constants


def test_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """MEAN and divide_by differ from SUM by the division and from each other by nothing; 1 costs nothing."""
    from ring_reduce.kernels import chunk

    recorder = Recorder()
    monkeypatch.setattr(chunk, "combine_kernel", recorder)
    room = torch.zeros(10_001)
    x, shifted = room[:10_000], room[1:]

    def launched(*tensors: torch.Tensor, **numbers: Any) -> dict[str, object]:
        chunk.combine(x, *tensors, **numbers)
        assert recorder.grid == (5,)
        return recorder.constants

    total = launched(x, x)
    assert (total["SCALED"], total["DIVIDED"], total["ALIGNMENT"]) == (False, False, 16)
    assert launched(x, x, divisor=4) == launched(x, x, divisor=256.5) == {**total, "DIVIDED": True}
    assert launched(x, x, x_scale=0.5) == launched(x, x, y_scale=0.5) == {**total, "SCALED": True}
    assert launched(x, y_scale=0.5) == total  # of no y
    assert launched(x, shifted) == launched(shifted, x) == {**total, "ALIGNMENT": 1}
    chunk.combine(shifted, x)
    assert recorder.constants["ALIGNMENT"] == 1
    out, from_x, from_y, *_ = recorder.arguments
    assert [out is shifted, from_x is x, from_y is None] == [True] * 3


def test_nothing_to_do() -> None:
    """Without elements nothing is launched: there is no GPU here."""
    from ring_reduce.kernels.chunk import combine

    combine(X[:0], X[:0], X[:0], divisor=3)
