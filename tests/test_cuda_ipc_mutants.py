"""Faults planted in the host code of the ring over CUDA IPC: the tests on the fake CUDA runtime see each."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fake_cuda
import ring_reduce as rr
from cases import Case
from fake_cuda import SMALL, Gpu, call_on, difference, gpu, start, violations
from launch import Seat, spawn
from programs import CSRC

CASE = Case("float32", 1_001, rr.MEAN)


@pytest.fixture(scope="session")
def module() -> Path:
    return fake_cuda.built()


# A fault gets the time to show; where there is none nothing comes.
SHOWS_S = 0.5


def two_calls(mine: Gpu) -> list[str]:
    """On two streams, and one that is captured between them; rank 0 enqueues all before rank 1 comes, and closes
    first."""
    engine = mine.open(tuning=replace(SMALL, call_timeout_s=2.0))
    outs = []
    if mine.seat.rank == 1:
        mine.seat.store.get("rank 0 has enqueued")
    for capture in (0, 7, 0):
        mine.current = mine.stream()
        mine.capture(capture)
        out = start(engine, mine, CASE)[1]
        mine.capture(0)
        outs += [out] if capture == 0 else []
    if mine.seat.rank == 0:
        mine.wait_for("two calls of a rank", SHOWS_S)
        mine.seat.store.set("rank 0 has enqueued", b"")
    mine.synchronize()
    engine.check()
    calls = engine.stats().calls
    if mine.seat.rank == 1:
        mine.wait_for(" cudaFree", SHOWS_S)
    engine.close()
    return [difference(out, CASE, 2) for out in outs] + ([] if calls == 2 else [f"{calls} calls have ended"])


def a_call_alone(mine: Gpu) -> list[str]:
    """Rank 0 makes a call that rank 1 does not."""
    engine = mine.open(tuning=replace(SMALL, call_timeout_s=0.1))
    x = torch.ones(500)
    if mine.seat.rank == 0:
        engine.run(call_on(x, x, rr.SUM), False)
        mine.synchronize()
        mine.seat.store.set("rank 0 has waited", b"")
    else:
        mine.seat.store.get("rank 0 has waited")
    engine.close()
    poisoned = mine.seat.rank == 1 or bool(x.isnan().all())
    return [] if poisoned else ["a call that failed left what looks like a result"]


def findings(seat: Seat, module: Path, scenario: Callable[[Gpu], list[str]]) -> list[str]:
    """What is wrong on this rank."""
    with gpu(seat, module) as mine:
        try:
            wrong = [text for text in scenario(mine) if text]
        except rr.RingError as error:
            wrong = [str(error)]
        seat.meet("it is over")
        left = [f"{mine.held()} things were not given back"] if mine.held() else []
        return wrong + left + violations(mine.directory)


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands once in ``file`` of csrc/, becomes ``new``; what is then ``seen``, a regular expression."""

    file: str
    old: str
    new: str
    seen: str
    scenario: Callable[[Gpu], list[str]] = two_calls


def assert_found(mutant: Mutant, directory: Path) -> None:
    """Two ranks of a copy of csrc/ with that fault find it."""
    csrc = directory / "csrc"
    shutil.copytree(CSRC, csrc)
    text = (csrc / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    (csrc / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    planted = fake_cuda.build(csrc, directory)
    found = [text for texts in spawn(2, findings, planted, mutant.scenario) for text in texts]
    assert any(re.search(mutant.seen, text) for text in found), found


MUTANTS = {
    "offset dropped": Mutant(
        "cuda_staging.cpp", "return allocation_ + offset_;", "return allocation_;", "did not arrive"
    ),
    "memset missing": Mutant(
        "cuda_staging.cpp",
        "cudaMemset(state(), 0, sizeof(RankState))",
        "cudaSuccess",
        "ranks disagree in call",
    ),
    "no agreement round": Mutant(
        "cuda_ipc.cpp",
        "for (const int rank : neighbours()) r.control->wait_released(rank, kLeaveSeconds);",
        "",
        "violation: cudaFree while",
    ),
    "handle opened twice": Mutant(
        "cuda_ipc.cpp", "if (settings_.world > 2) opened(", "opened(", "violation: a handle is opened twice"
    ),
    "handle not closed": Mutant(
        "cuda_staging.cpp", "cudaIpcCloseMemHandle(allocation_);", "", "things were not given back"
    ),
    "a capture breaks the chain": Mutant(
        "cuda_chain.cpp",
        "if (capture == 0 && called_)",
        "if (capture == 0 && called_ && capture_ == 0)",
        "violation: two calls of a rank at the same time",
    ),
    "not poisoned": Mutant("cuda_port.h", "      poison();\n", "", "looks like a result", a_call_alone),
}


@pytest.mark.parametrize("scenario", [two_calls, a_call_alone])
def test_nothing_is_found_without_a_fault(module: Path, scenario: Callable[[Gpu], list[str]]) -> None:
    assert spawn(2, findings, module, scenario) == [[], []]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    assert_found(MUTANTS[name], tmp_path)
