"""Files for ``ring-reduce verify``, and the command as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples" / "verify"
LONGEST_S = 120

GOOD = """
import time
import torch
import torch.distributed as dist

def model():
    return torch.nn.Linear(3, 1)

def batches(rank, world, micro_batches):
    return [torch.arange(6.0).reshape(2, 3) + rank + index for index in range(micro_batches)]

def losses(model, batch):
    return model(batch).square().flatten()

def step(model, batches, job):
    for batch in batches:
        (losses(model, batch).mean() / len(batches)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= job.world
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


def with_step(body: str) -> str:
    return (
        GOOD.replace("def step", "def right_step")
        + "\ndef step(model, batches, job):\n"
        + textwrap.indent(body, "    ")
    )


def run_command(*words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"TMPDIR": str(folder)} if folder else {})}
    line = [sys.executable, "-m", "ring_reduce", "verify", *map(str, words)]
    return subprocess.run(
        line, capture_output=True, text=True, env=environment, timeout=LONGEST_S, check=False
    )
