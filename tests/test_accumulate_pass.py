"""The core's accumulate and divide_into: to the bit, with threads, at once, after a fork, and wrong arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cases are torch tensors: pip install torch")

import torch

from accumulate_cases import TYPES, accumulate, divide_into, wrong_lengths, wrong_many
from ring_reduce import _core
from tools import require_isa

TESTS = Path(__file__).resolve().parent
FLOAT32 = TYPES[torch.float32]
SHARED = 400_000  # elements that three threads share


def python(code: str, **environment: str) -> list[str]:
    """The lines that a process of its own prints. It fails the test if it hangs."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TESTS,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_length(dtype: torch.dtype) -> None:
    assert wrong_lengths(dtype) == []


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_tensors(threads: int) -> None:
    assert wrong_many(threads) == []


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_width(isa: str) -> None:
    code = "import accumulate_cases as c; print(c._core.vector_isa(), len(c.wrong_everywhere()))"
    ((used, wrong),) = [line.split() for line in python(code, RING_REDUCE_ISA=isa)]
    require_isa(isa)
    assert used == isa
    assert wrong == "0"


def test_no_tensors() -> None:
    _core.accumulate([], [], [], [], [], 1.0, 4)
    _core.divide_into([], [], [], [], 2.0, 4)


def test_the_quotient_may_replace_the_sum() -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    expected = x / 3
    divide_into([x], [x], divisor=3.0)
    assert torch.equal(x, expected)


def test_zero_divisor_clears_nan_in_place() -> None:
    x = torch.full((33,), torch.nan)
    divide_into([x], [x], divisor=0.0)
    assert torch.equal(x, torch.zeros(33))


def test_threads_flush_denormals_as_the_caller_does() -> None:
    code = f"""
import torch
from accumulate_cases import accumulate
sums = torch.zeros({SHARED})
x = torch.full(({SHARED},), 2.0 ** -126)
warm = torch.zeros({SHARED})
accumulate([warm], [x], fresh=[True], scale=1.0, threads=3)  # the threads start with denormals
torch.set_flush_denormal(True)
for _ in range(50):
    accumulate([sums], [x], fresh=[True], scale=0.5, threads=3)
    assert int(sums.view(torch.int32).count_nonzero()) == 0
print("flushed")
"""
    assert python(code) == ["flushed"]


def add_often(value: float, wrong: list[Any]) -> None:
    x, total = torch.full((SHARED,), value), torch.full((SHARED,), torch.nan)
    for turn in range(30):
        accumulate([total], [x], fresh=[turn == 0], scale=2.0, threads=3)
        if not bool((total == 2 * value * (turn + 1)).all()):
            wrong.append((value, turn))


def test_python_threads_at_once() -> None:
    wrong: list[Any] = []
    threads = [threading.Thread(target=add_often, args=(value, wrong)) for value in (1.0, 3.0, 5.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_python_goes_on_beside_a_pass() -> None:
    """No thread is asked to hand on the interpreter, so that another one runs only where a pass gives it up."""
    size, passes = 1 << 22, 30
    x, total = torch.ones(size), torch.zeros(size)
    go, ran = threading.Lock(), threading.Event()

    def wait_and_run() -> None:
        with go:
            ran.set()

    interval = sys.getswitchinterval()
    other = threading.Thread(target=wait_and_run)
    with go:
        other.start()
        sys.setswitchinterval(1000)
    try:
        accumulate([total] * passes, [x] * passes, fresh=[False] * passes, scale=1.0)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()


FORK = f"""
import os, signal, sys, threading, torch
from accumulate_cases import accumulate

torch.set_num_threads(1)  # torch's own threads, once there, make the same calls hang in a fork
x = torch.ones({SHARED})

def works():
    signal.alarm(30)  # its death is the parent's failure
    total = torch.full(({SHARED},), torch.nan)
    accumulate([total], [x], fresh=[True], scale=3.0, threads=3)
    return bool((total == 3).all())

def works_with_threads():
    return works() and works() and len(os.listdir("/proc/self/task")) == 3

def child():
    signal.alarm(60)
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if works_with_threads() else 1)
    ok = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
    os._exit(0 if ok and works_with_threads() else 1)

def fork_works():
    pid = os.fork()
    if pid == 0:
        child()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

assert works()
"""


def test_a_fork_has_threads_of_its_own() -> None:
    assert python(FORK + "print([fork_works() for _ in range(5)], works())") == [f"{[True] * 5} True"]


def test_a_fork_amid_another_threads_pass() -> None:
    code = """
stop = threading.Event()
def keep_busy():
    while not stop.is_set():
        works()
busy = threading.Thread(target=keep_busy)
busy.start()
results = [fork_works() for _ in range(10)]
stop.set()
busy.join()
print(all(results), works())
"""
    assert python(FORK + code) == ["True True"]


def good() -> dict[str, Any]:
    """Arguments that both functions take."""
    return {
        "sums": [64, 0],
        "inputs": [4096, 0],
        "outputs": [4096, 0],
        "elements": [0, 0],
        "types": [FLOAT32, 3],
        "fresh": [False, True],
        "scale": 1.0,
        "divisor": 1.0,
        "threads": 1,
    }


def call_with(name: str, **changes: Any) -> None:
    others = ["outputs", "divisor"] if name == "accumulate" else ["inputs", "fresh", "scale"]
    arguments = {key: value for key, value in {**good(), **changes}.items() if key not in others}
    getattr(_core, name)(**arguments)


BOTH = [
    ({"elements": [1]}, "2 sums but 1 elements"),
    ({"types": [1, 1, 1]}, "2 sums but 3 types"),
    ({"types": [FLOAT32, 4]}, "type 4 of .* 1 is not one of 0 to 3"),
    ({"types": [-1, FLOAT32]}, "type -1 of .* 0 is not one of 0 to 3"),
    ({"threads": 0}, "threads is 0; it has to be 1 or more"),
    ({"threads": -2}, "threads is -2; it has to be 1 or more"),
    ({"elements": [0, 5]}, "sum 1 has 5 elements at address 0"),
]


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        *[(name, changes, text) for name in ("accumulate", "divide_into") for changes, text in BOTH],
        ("accumulate", {"inputs": [4096]}, "2 sums but 1 inputs"),
        ("accumulate", {"fresh": [True]}, "2 sums but 1 fresh"),
        ("accumulate", {"scale": float("inf")}, "scale is inf; it has to be a finite number"),
        ("accumulate", {"scale": float("nan")}, "scale is nan; it has to be a finite number"),
        (
            "accumulate",
            {"scale": 1e39},
            r"scale is 1e\+39, and sum 0 is float32, which holds .* to 3.40282e\+38",
        ),
        (
            "accumulate",
            {"scale": -1e-39},
            "scale is -1e-39, and sum 0 is float32, which holds 1.17549e-38 to",
        ),
        (
            "accumulate",
            {"sums": [64, 8], "inputs": [4096, 8]},
            "sum 1 and input 1 share .* float32 .* bfloat16",
        ),
        ("accumulate", {"elements": [7, 0], "inputs": [0, 0]}, "input 0 has 7 elements at address 0"),
        ("divide_into", {"outputs": [4096]}, "2 sums but 1 outputs"),
        ("divide_into", {"divisor": -1.0}, "divisor is -1; it has to be a number, 0 or more"),
        ("divide_into", {"divisor": float("nan")}, "divisor is -?nan; it has to be a number, 0 or more"),
        ("divide_into", {"divisor": 1e39}, r"divisor is 1e\+39, and sum 0 is float32"),
        ("divide_into", {"sums": [64, 8], "outputs": [4096, 8]}, "sum 1 and output 1 share"),
    ],
)
def test_wrong_arguments(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call_with(name, **changes)


def test_right_arguments() -> None:
    """What the tests of wrong ones start from; and float64 holds what float32 does not."""
    for name in ("accumulate", "divide_into"):
        call_with(name)
        call_with(name, types=[0, 0], scale=1e-300, divisor=1e300)
    call_with("divide_into", divisor=float("inf"))


@pytest.mark.parametrize("argument", ["sums", "elements", "types"])
def test_wrong_types_of_arguments(argument: str) -> None:
    for name in ("accumulate", "divide_into"):
        with pytest.raises(TypeError):
            call_with(name, **{argument: ["x", "y"]})


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ring_reduce.benchmarks import accumulate as benchmark

    monkeypatch.setitem(benchmark.CASES, "tiny", [5, 17, 33])
    monkeypatch.setattr(benchmark, "last_level_cache_bytes", lambda: 1000)
    assert benchmark.main(["--rounds", "2", "--cases", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("core" in line.split() for line in lines) in (2, 4)  # one default thread, or more
