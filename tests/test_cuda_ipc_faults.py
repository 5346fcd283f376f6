"""What goes wrong in calls of the ring over CUDA IPC, on the fake CUDA runtime: every rank says the same of it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fake_cuda
import ring_reduce as rr
from conftest import Run
from fake_cuda import SMALL, Gpu, call_on, gpu, violations
from launch import Seat, caught, spawn
from ring_reduce.cuda_ipc import CudaIpcEngine

Outcome = tuple[str, str, bool]  # kind of error, text, whether the output is NaN throughout


@pytest.fixture(scope="session")
def module() -> Path:
    return fake_cuda.built()


def reduce(
    engine: CudaIpcEngine, mine: Gpu, x: torch.Tensor, normalization: rr.Normalization = rr.SUM
) -> None:
    mine.kept.append(x)
    engine.run(call_on(x, x, normalization), False)


def outcome(engine: CudaIpcEngine, mine: Gpu, x: torch.Tensor) -> Outcome:
    """Of a call that was enqueued, and of what comes after it."""
    mine.synchronize()
    error = caught(engine.check)
    again = caught(lambda: reduce(engine, mine, torch.ones(3)))
    assert (type(again), str(again)) == (type(error), str(error))
    return type(error).__name__, str(error), bool(x.isnan().all())


def leave(engine: CudaIpcEngine, mine: Gpu) -> None:
    """Closes it, and looks that nothing is left."""
    engine.close()
    assert mine.held() == 0
    assert violations(mine.directory) == []


def agreed(outcomes: list[Outcome]) -> tuple[str, str]:
    """The kind and the text of all ranks, whose outputs are no results."""
    assert len({outcome[:2] for outcome in outcomes}) == 1, outcomes
    assert all(is_nan for _, _, is_nan in outcomes)
    return outcomes[0][:2]


def other_calls(seat: Seat, module: Path, one_size: int, size: int, divisor: float) -> Outcome:
    """Rank 1 makes another call than the others."""
    with gpu(seat, module) as mine:
        engine = mine.open()
        reduce(engine, mine, torch.ones(3))
        x = torch.ones(one_size if seat.rank == 1 else size)
        reduce(engine, mine, x, rr.divide_by(divisor if seat.rank == 1 else 2))
        result = outcome(engine, mine, x)
        leave(engine, mine)
        return result


@pytest.mark.parametrize(
    ("arguments", "text"), [((501, 500, 2), "element count is 50"), ((500, 500, 3), "divisor is ")]
)
def test_mismatch(run: Run, module: Path, arguments: tuple[int, int, float], text: str) -> None:
    kind, said = agreed(run(3, other_calls, module, *arguments))
    assert kind == "RingMismatch"
    assert said.startswith(f"ranks disagree in call 2: {text}")


def an_absent_rank(seat: Seat, module: Path) -> Outcome:
    """Rank 1 makes no second call."""
    with gpu(seat, module) as mine:
        engine = mine.open(tuning=replace(SMALL, call_timeout_s=0.3))
        reduce(engine, mine, torch.ones(3))
        mine.synchronize()
        seat.meet("the first call has ended")
        x = torch.full((500,), torch.nan if seat.rank == 1 else 1.0)
        if seat.rank != 1:
            reduce(engine, mine, x)
            mine.synchronize()
        seat.meet("it is over")
        result = outcome(engine, mine, x)
        leave(engine, mine)
        return result


def test_a_rank_that_does_not_come(run: Run, module: Path) -> None:
    kind, text = agreed(run(3, an_absent_rank, module))
    assert kind == "RingTimeout"
    assert " in 0.3 s (call 2, all_reduce of 500 float32, SUM)" in text
    assert "; rank 1 has not made call 2 (it has completed 1); is that process alive" in text


def end(engine: CudaIpcEngine, how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "aborted":
        engine.abort("rank 1 aborted the ring: for the test")
    else:
        engine.close()


def an_end(seat: Seat, module: Path, how: str) -> Outcome:
    """Rank 1 ends the ring while the others are in call 2."""
    with gpu(seat, module) as mine:
        engine = mine.open(timeout=60)
        reduce(engine, mine, torch.ones(3))
        mine.synchronize()
        seat.meet("the first call has ended")
        x = torch.full((500,), torch.nan if seat.rank == 1 else 1.0)
        if seat.rank != 1:
            reduce(engine, mine, x)
            seat.store.set(f"rank {seat.rank} is in the second call", b"")
        else:
            for rank in (0, 2):
                seat.store.get(f"rank {rank} is in the second call")
            end(engine, how)
        result = outcome(engine, mine, x)
        leave(engine, mine)
        return result


def test_a_killed_rank(module: Path) -> None:
    first, _, last = spawn(3, an_end, module, "killed", lost=[1])
    kind, text = agreed([first, last])
    assert kind == "PeerLost"
    assert text.startswith("rank 1 ended (killed, crashed or exited) after 1 calls, while rank ")
    assert text.endswith(" is in call 2; look at its output, then start the job again")


def test_abort(run: Run, module: Path) -> None:
    assert agreed(run(3, an_end, module, "aborted")) == (
        "RingAborted",
        "rank 1 aborted the ring: for the test",
    )


def test_a_rank_that_closed_the_ring(run: Run, module: Path) -> None:
    kind, text = agreed(run(3, an_end, module, "closed"))
    assert kind == "RingClosed"
    assert text.startswith("rank 1 closed the ring after 1 calls, while rank ")


def replay_after_a_close(seat: Seat, module: Path) -> Outcome:
    """Rank 1 has left, and its memory is about to go, when rank 0 replays a graph."""
    with gpu(seat, module) as mine:
        engine = mine.open()
        x = torch.ones(500)
        mine.capture(7)
        reduce(engine, mine, x)
        mine.capture(0)
        mine.replay(7)
        mine.synchronize()
        engine.check()
        assert x.tolist() == [2.0] * 500
        if seat.rank == 1:
            seat.store.set("process", str(os.getpid()).encode())
            engine.close()
            x.fill_(torch.nan)
        else:
            process = int(seat.store.get("process"))
            mine.wait_for(f"{process} cudaIpcCloseMemHandle")
            (memory,) = mine.directory.glob(f"memory.{process}.*")
            before = memory.read_bytes()
            mine.replay(7)
            mine.synchronize()
            assert memory.read_bytes() == before, "written into the memory of a rank that has left"
        result = outcome(engine, mine, x) if seat.rank == 0 else ("RingClosed", "", True)
        leave(engine, mine)
        return result


def test_a_graph_that_is_replayed_after_a_close(run: Run, module: Path) -> None:
    """The kernel writes nowhere but to its output, which is no result."""
    outcomes = run(2, replay_after_a_close, module)
    assert outcomes[0][0] == "RingClosed"
    assert outcomes[0][1].startswith("rank 1 closed the ring after 1 calls, while rank 0 is in call 2;")
    assert outcomes[0][2]


def a_bad_launch(seat: Seat, module: Path) -> Outcome:
    """Rank 1 can't launch."""
    with gpu(seat, module) as mine:
        engine = mine.open(timeout=60)
        if seat.rank == 1:
            os.environ["FAKE_CUDA_FAULTS"] = "cudaLaunchCooperativeKernel:1:720"
        x = torch.full((500,), torch.nan if seat.rank == 1 else 1.0)
        caught(lambda: reduce(engine, mine, x))  # of rank 0 too, if it comes later
        result = outcome(engine, mine, x)
        leave(engine, mine)
        return result


def test_a_call_that_one_rank_can_not_start(run: Run, module: Path) -> None:
    """It ends the ring for all, since the others would wait."""
    outcomes = run(2, a_bad_launch, module)
    assert {each[:2] for each in outcomes} == {
        (
            "RingAborted",
            "rank 1 could not start a call: launching blocks of the ring: a fault of the fake runtime (error 720)",
        )
    }


def in_a_fork(engine: CudaIpcEngine, mine: Gpu) -> str:
    """What a fork of this process gets from the ring."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = [caught(engine.check), caught(lambda: reduce(engine, mine, torch.ones(3)))]
        engine.abort("by the fork")
        engine.close()
        del engine
        os.write(writer, "\n".join(f"{type(error).__name__}: {error}" for error in said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def forked(seat: Seat, module: Path) -> str:
    with gpu(seat, module) as mine:
        engine = mine.open()
        reduce(engine, mine, torch.ones(3))
        mine.synchronize()
        text = in_a_fork(engine, mine)
        x = torch.ones(3)
        reduce(engine, mine, x)
        mine.synchronize()
        engine.check()
        assert x.tolist() == [2.0] * 3
        leave(engine, mine)
        return text


def test_a_fork_is_not_the_rank(run: Run, module: Path) -> None:
    for rank, text in enumerate(run(2, forked, module)):
        for line in text.splitlines():
            assert line.startswith(
                f"RingClosed: rank {rank}: this process is a fork of the one that made the ring"
            )
        assert len(text.splitlines()) == 2


def closed_twice(seat: Seat, module: Path) -> str:
    with gpu(seat, module) as mine:
        engine = mine.open()
        leave(engine, mine)
        engine.close()
        return str(caught(engine.check))


def test_a_closed_ring(run: Run, module: Path) -> None:
    texts = run(2, closed_twice, module)
    assert texts == [f"rank {rank}: the ring is closed; make a new one for further calls" for rank in (0, 1)]
