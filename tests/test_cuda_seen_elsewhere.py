"""Faults that other libraries had, by their public reports, on the fake CUDA runtime: none of them is ours.

docs/gpu.md names for each of them the tests that would fail; those that the other files do not have are here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import fake_cuda
import ring_reduce as rr
from cases import Case
from conftest import Run
from ddp_helpers import group
from fake_cuda import SMALL, Gpu, call_on, difference, start, to_device
from launch import Seat
from ring_reduce.cuda_ipc import IpcTuning
from test_cuda_ipc_mutants import SHOWS_S, Mutant, assert_found, findings

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def module() -> Path:
    return fake_cuda.built()


def two_rings(mine: Gpu) -> list[str]:
    """Of the same processes at the same time; one goes on when the other is closed."""
    rings = {name: mine.open(name) for name in ("first", "second")}
    wrong = []
    for seed, name in enumerate(("first", "second", "first", "second", "second")):
        if seed == 4:
            rings["first"].close()
        case = Case("float32", 501, rr.MEAN, seed=seed)
        _, out = start(rings[name], mine, case)
        mine.synchronize()
        rings[name].check()
        wrong.append(difference(out, case, mine.seat.world))
    rings["second"].close()
    return wrong


def rings_in_turn(mine: Gpu) -> list[str]:
    """Each has memory of its own, which may lie where that of the one before lay."""
    wrong = []
    for seed in range(3):
        case = Case("float32", 501, rr.MEAN, seed=seed)
        engine = mine.open(f"ring {seed}")
        _, out = start(engine, mine, case)
        mine.synchronize()
        engine.check()
        engine.close()
        wrong.append(difference(out, case, mine.seat.world))
    return wrong


def other_numbers(mine: Gpu) -> list[str]:
    """The ranks' GPUs 0a and 0b reach each other; where one rank has its own, the other sees 0d, which reaches none."""
    os.environ["FAKE_CUDA_DEVICES"] = ("0a,0d,0b", "0d,0b")[mine.seat.rank]
    os.environ["FAKE_CUDA_NO_PEER"] = "0a-0d,0b-0d"
    case = Case("float32", 501, rr.MEAN)
    engine = mine.open(device=mine.seat.rank)
    _, out = start(engine, mine, case)
    mine.synchronize()
    engine.check()
    engine.close()
    return [difference(out, case, 2)]


def replays(mine: Gpu) -> list[str]:
    """A captured call that is replayed with other inputs and counts, with calls of the host between."""
    engine = mine.open(tuning=replace(SMALL, call_timeout_s=5.0))
    engine.device = torch.device("cpu")  # where the tensor of the count is
    x, out = torch.zeros(2, 501)
    count = torch.ones(1, dtype=torch.float64)
    mine.kept += [x, out, count]
    mine.capture(7)
    engine.run(call_on(x, out, rr.DIVIDE_BY_COUNT, count), False)
    mine.capture(0)
    wrong = []
    for seed in range(3):
        case = Case("float32", 501, rr.DIVIDE_BY_COUNT, seed=seed, counts=(1.0 + seed, 0.5))
        between = Case("float32", 333, rr.MEAN, seed=10 + seed)
        x.copy_(to_device(case.input(mine.seat.rank), case))
        count.fill_(case.counts[mine.seat.rank] if case.counts is not None else 0.0)
        out.fill_(77)
        if seed == 1 and mine.seat.rank == 1:
            # Rank 0 is in the call, where it might find what the last one left.
            mine.wait_for("nothing", SHOWS_S)
        mine.replay(7)
        _, next_out = start(engine, mine, between)
        mine.synchronize()
        engine.check()
        wrong += [difference(out, case, 2), difference(next_out, between, 2)]
    engine.close()
    return wrong


def halves(mine: Gpu) -> list[str]:
    """A scale of a half, of which the lower bytes are zeros in every type."""
    engine = mine.open()
    wrong = []
    for name in ("bfloat16", "float16", "float32"):
        for normalization, counts in ((rr.divide_by(2), None), (rr.WEIGHTED_MEAN, (0.5, 0.5))):
            case = Case(name, 333, normalization, counts=counts)
            _, out = start(engine, mine, case)
            mine.synchronize()
            engine.check()
            wrong.append(difference(out, case, 2))
    engine.close()
    return wrong


def large_counts(mine: Gpu) -> list[str]:
    """Those of the report, with segments of their usual size: neither ranks, packs nor segments divide them."""
    engine = mine.open(tuning=IpcTuning())
    wrong = []
    for size, normalization in ((9_999_999, rr.MEAN), (10_556_587, rr.SUM)):
        case = Case("float32", size, normalization, values="exact", out_of_place=True)
        _, out = start(engine, mine, case)
        mine.synchronize()
        engine.check()
        wrong.append(difference(out, case, 2))
        mine.kept.clear()
    engine.close()
    return wrong


SCENARIOS = [two_rings, rings_in_turn, other_numbers, replays, halves, large_counts]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_none_of_them_is_ours(run: Run, module: Path, scenario: Callable[[Gpu], list[str]]) -> None:
    assert run(2, findings, module, scenario) == [[], []]


MUTANTS = {
    "a mapping is kept": Mutant(
        "cuda_staging.cpp",
        "void* base = nullptr;",
        "static void* base = nullptr;\n  if (base == nullptr)",
        "did not arrive|violation: cudaMemcpy of memory",  # which is another's by now, or nobody's
        rings_in_turn,
    ),
    "GPUs are matched by number": Mutant(
        "cuda_ipc.cpp", "device_number(peer.uuid)", "rank", "has no peer access to that of", other_numbers
    ),
    "a captured count stays": Mutant(
        "cuda_ipc.cpp",
        "mine.device_count = reinterpret_cast<const double*>(call.device_count);",
        "if (call.device_count != 0) mine.count = *reinterpret_cast<const double*>(call.device_count);",
        "element 0 of 501",
        replays,
    ),
    "counters start anew": Mutant(
        "cuda_port.h", "me().counters[lane_] = counters_;", "", "ranks disagree in call", replays
    ),
    "a scale is read as a narrower type": Mutant(
        "cuda_chunk.h",
        "static_cast<Value>(c.own_scale)",
        "*reinterpret_cast<const Value*>(&c.own_scale)",
        "element 0 of 333",
        halves,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_is_found(name: str, tmp_path: Path) -> None:
    assert_found(MUTANTS[name], tmp_path)


# ---- CUDA after a fork


def refuse(*what: Any) -> Any:
    """In place of what would start CUDA."""
    raise AssertionError(f"CUDA was started {what}, and a fork of this process can't start it any more")


class Untouchable:
    """In place of a module that would."""

    __getattr__ = refuse


def on_the_cpu(seat: Seat) -> list[float]:
    """Rings on the CPU, of both transports, where everything of CUDA is forbidden."""
    untouchable: Any = Untouchable()
    names = ("_lazy_init", "current_device", "is_available", "device_count")
    forbidden: dict[str, Any] = dict.fromkeys(names, refuse)
    with (
        group(seat) as ring,
        mock.patch.dict(sys.modules, {"ring_reduce._cuda": untouchable}),
        mock.patch.object(rr, "_cuda", untouchable, create=True),
        mock.patch.multiple(torch.cuda, **forbidden),
    ):
        totals = [float(ring.all_reduce(np.ones(3))[0])]
        for transport in ("auto", "process_group"):
            with rr.Ring.from_group(name=transport, transport=transport) as another:
                totals.append(float(another.all_reduce(torch.ones(3), async_op=True).wait()[0]))
        return totals


def test_a_ring_on_the_cpu_starts_no_cuda(run: Run) -> None:
    """Or a process that is forked from it later, as a loader of data is, could not."""
    assert run(2, on_the_cpu) == [[2.0] * 3] * 2


# ---- the table of docs/gpu.md

REPORTS = {
    "vllm #42609",
    "tensorpipe PR 248",
    "ucx #3192",
    "ucx PR 2738",
    "rocm-systems PR 8136",
    "aiter PR 3928",
    "sglang #31117",
    "TensorRT-LLM PR 17034",
    "pytorch #190745",
    "pytorch PR 131244",
    "pytorch PR 150813",
    "mscclpp PR 697",
    "pytorch #40403",
    "pytorch #37790",
}


def test_for_each_report_the_tests_that_are_named_exist() -> None:
    text = (TESTS.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    table = text.partition("## Faults seen elsewhere")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert {re.sub(r"\[(.+)\]\(.+\)", r"\1", row[1]) for row in rows} == REPORTS
    for row in rows:
        named = re.findall(r"`(test_\w+)::(test_\w+)(?:\[(.+?)\])?`", row[-1])
        assert named, row
        for file, test, case in named:
            source = (TESTS / f"{file}.py").read_text(encoding="utf-8")
            assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file}::{test}"
            assert not case or re.search(rf"\b{re.escape(case)}\b", source), f"{test}[{case}]"
