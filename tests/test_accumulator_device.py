"""An accumulator on a GPU: its Triton passes and its counts that stay on the device, in Triton's interpreter.

The interpreter takes CPU tensors, so "on the device" is told by a subclass of Tensor here, and its values must not be
asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tools import require_tool

SCRIPT = """
import math, torch
from torch import nn
import ring_reduce as rr
from ring_reduce import accumulate, passes, sums

waited = []

def watch(owner, name):
    '''Records what would make the host wait for a device. Triton's interpreter itself works on arrays.'''
    plain = getattr(owner, name)
    def recorded(self, *arguments, **options):
        waited.append(name)
        return plain(self, *arguments, **options)
    setattr(owner, name, recorded)

for name in ("tolist", "item", "__bool__", "__float__", "__int__", "cpu", "numpy"):
    watch(torch.Tensor, name)

class Count(torch.Tensor):
    '''A number on a device: reading it would make the host wait.'''

accumulate.stays_on_device = lambda count: isinstance(count, Count)
sums.passes_for = lambda device: passes.GpuPasses()

def number(value):
    return torch.tensor(value).as_subclass(Count)

def group(normalization, micro_batches):
    '''Gradients of two parameters after a group of (gradient, count) pairs.'''
    model = nn.ParameterList([nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3000))])
    with rr.Accumulator(model, normalization) as accumulator:
        for gradient, count in micro_batches:
            for parameter in model:
                parameter.grad = torch.full_like(parameter, gradient)
            accumulator.add(count=count)
    assert not waited, waited
    values = {value for parameter in model for value in parameter.grad.float().tolist()}
    total = accumulator.last.total_count
    waited.clear()
    assert len(values) == 1 or all(math.isnan(value) for value in values), values
    return values.pop(), total

nan = math.nan
"""

CASES = {
    "sums": ("rr.DIVIDE_BY_COUNT, [(6.0, number(3)), (10.0, number(5))]", (2.0, 8.0)),
    "means": ("rr.WEIGHTED_MEAN, [(2.0, number(3)), (4.0, number(1))]", (2.5, 4.0)),
    "a count of 0": (
        "rr.DIVIDE_BY_COUNT, [(nan, number(0)), (6.0, number(3)), (nan, number(0))]",
        (2.0, 3.0),
    ),
    "a weight of 0": ("rr.WEIGHTED_MEAN, [(2.0, number(3)), (nan, number(0))]", (2.0, 3.0)),
    "a total of 0": ("rr.DIVIDE_BY_COUNT, [(nan, number(0)), (3.0, number(0))]", (0.0, 0.0)),
    "a number beside": ("rr.DIVIDE_BY_COUNT, [(6.0, number(3)), (10.0, 5)]", (2.0, 8.0)),
    "no counts": ("rr.divide_by(4), [(6.0, None), (10.0, None)]", (4.0, 0.0)),
    "a mean": ("rr.MEAN, [(6.0, None), (10.0, None)]", (8.0, 0.0)),
}
NO_COUNTS = ["-1.0", "nan", "math.inf"]


def run(code: str) -> None:
    require_tool("triton", "python -m pip install triton")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(code)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_normalization_without_waiting_for_the_device() -> None:
    run("\n".join(f"assert group({call}) == {right}, {name!r}" for name, (call, right) in CASES.items()))


@pytest.mark.parametrize("normalization", ["DIVIDE_BY_COUNT", "WEIGHTED_MEAN"])
def test_what_is_no_count_makes_the_gradient_nan(normalization: str) -> None:
    checks = (
        f"value, _ = group(rr.{normalization}, [(6.0, number(3.0)), (1.0, number({count}))])\nassert math.isnan(value)"
        for count in NO_COUNTS
    )
    run("\n".join(checks))
