"""Each example runs, one under its own launcher and one under torchrun, and fails when its normalization is spoilt."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Run
from launch import Seat, caught

EXAMPLES = Path(__file__).parents[1] / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "launch.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

# What a reader is most likely to get wrong: every rank, or every micro-batch, counted alike.
SPOILT = {
    "numpy_all_reduce.py": ("count=len(rows)", "count=1"),
    "ddp_unequal_batches.py": ("add_count(len(inputs))", "add_count(1)"),
    "cupy_all_reduce.py": ("count=len(rows)", "count=1"),
    "elastic.py": ("add_count(len(inputs))", "add_count(1)"),
    "ddp_on_gpus.py": ("add_count((labels != IGNORED).sum())", "add_count(labels.numel())"),
    "token_counts.py": ("int((labels != IGNORED).sum()))\n            #", "labels.numel())\n            #"),
}


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RING_REDUCE_TIMEOUT": "120"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_every_recipe_is_known() -> None:
    assert set(SPOILT) == set(RECIPES)
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[(\w+\.py)\]", index, re.MULTILINE)) == set(RECIPES)


def test_alone() -> None:
    done = start(str(EXAMPLES / "numpy_all_reduce.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_under_torchrun() -> None:
    done = start(*TORCHRUN, "3", str(EXAMPLES / "ddp_unequal_batches.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def run_recipe(seat: Seat, path: Path, port: int) -> tuple[Exception | None, str]:
    """What it raises and prints as a rank of torchrun's, in a process that is there."""
    os.environ.update(
        RANK=str(seat.rank), WORLD_SIZE=str(seat.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    ours = sys.modules.pop("launch")  # the examples have a module of that name too
    words = sys.argv
    sys.argv = [str(path), str(seat.directory / str(seat.job))]  # a folder, which is empty
    sys.path.insert(0, str(path.parent))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            error = caught(lambda: runpy.run_path(str(path), run_name="__main__"))
    finally:
        sys.path.remove(str(path.parent))
        sys.argv = words
        sys.modules["launch"] = ours
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    return error, said.getvalue()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe: str, run: Run) -> None:
    errors, (said, *_) = zip(*run(3, run_recipe, EXAMPLES / recipe, free_port()), strict=True)
    assert errors == (None,) * 3
    assert said.strip()


@pytest.mark.parametrize("recipe", RECIPES)
def test_check_of_the_example_can_fail(recipe: str, tmp_path: Path, run: Run) -> None:
    right, wrong = SPOILT[recipe]
    source = (EXAMPLES / recipe).read_text(encoding="utf-8")
    assert source.count(right) == 1
    (tmp_path / recipe).write_text(source.replace(right, wrong), encoding="utf-8")
    shutil.copy(EXAMPLES / "launch.py", tmp_path)
    errors = [error for error, _ in run(2, run_recipe, tmp_path / recipe, free_port())]
    assert any(isinstance(error, AssertionError) for error in errors), errors
