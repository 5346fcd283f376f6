"""Each example runs, under its own launcher and under torchrun, and fails when its normalization is spoilt."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "launch.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

# What a reader is most likely to get wrong: every rank, or every micro-batch, counted alike.
SPOILT = {
    "numpy_all_reduce.py": ("count=len(rows)", "count=1"),
    "ddp_unequal_batches.py": ("add_count(len(inputs))", "add_count(1)"),
    "token_counts.py": ("int((labels != IGNORED).sum()))\n            #", "labels.numel())\n            #"),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_alone(recipe: str) -> None:
    done = run(str(EXAMPLES / recipe))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_torchrun(recipe: str) -> None:
    done = run(*TORCHRUN, "3", str(EXAMPLES / recipe))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("recipe", RECIPES)
def test_check_of_the_example_can_fail(recipe: str, tmp_path: Path) -> None:
    right, wrong = SPOILT[recipe]
    source = (EXAMPLES / recipe).read_text(encoding="utf-8")
    assert source.count(right) == 1
    (tmp_path / recipe).write_text(source.replace(right, wrong), encoding="utf-8")
    shutil.copy(EXAMPLES / "launch.py", tmp_path)
    done = run(*TORCHRUN, "2", str(tmp_path / recipe))
    assert done.returncode != 0, done.stdout
    assert "AssertionError" in done.stderr
