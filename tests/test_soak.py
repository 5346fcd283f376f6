"""``ring-reduce soak``: that it finds what is wrong, and a short one with a new seed."""

from __future__ import annotations

import dataclasses
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from conftest import Run
from launch import Seat
from ring_reduce import cli
from ring_reduce.normalization import WEIGHTED_MEAN
from ring_reduce.soak import calls, check
from ring_reduce.soak.faults import EXPECTED
from ring_reduce.soak.judge import detection_of, problems_of
from ring_reduce.soak.outcome import Outcome
from ring_reduce.soak.plan import (
    DTYPES,
    FAULT_WEIGHTS,
    HURRIED_S,
    LAYOUTS,
    OPERATIONS,
    CallPlan,
    Episode,
    Fault,
    Orders,
    call_of,
    episode_of,
)
from ring_reduce.soak.rank import run_episode
from ring_reduce.soak.tensors import Placed, values_in, values_of

MINUTES = 2.0  # of the soak below
SOAK_TIMEOUT_S = 60 * MINUTES + 250.0  # the judge gives up an episode that takes 150 s
DETECTION_S = 10.0  # ten times what is promised: other tests may be running
ORDERS = Orders(world=3, seed=5, faults=tuple(FAULT_WEIGHTS), always=False, folder="")


def run_soak(*options: str, timeout: float = 250.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ring_reduce", "soak", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.timeout(SOAK_TIMEOUT_S + 50)
def test_a_short_soak() -> None:
    """A new seed each time; what failed is run again by the command that it prints."""
    seed = str(secrets.randbelow(2**32))
    print(f"seed {seed}")  # pytest shows it if anything below fails, a soak that does not end too
    options = ("--minutes", str(MINUTES), "--seed", seed, "--detection", str(DETECTION_S))
    done = run_soak(*options, timeout=SOAK_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, (made, faults, survived) = re.findall(
        r"(\d+) calls, .* GB, (\d+) faults, (\d+) survived", done.stdout
    )
    assert int(made) > 20
    assert int(faults) == int(survived) > 0
    assert f"seed {seed}" in done.stdout


def test_a_fault_that_is_not_survived_is_1_and_how_to_run_it_again() -> None:
    """Nobody hears of anything in no time at all."""
    done = run_soak(
        "--world", "2", "--seed", "3", "--faults", "leave", "--injections", "2", "--detection", "1e-9"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "until every rank knew, and 1e-09 s are allowed" in done.stdout
    assert "ring-reduce soak --world 2 --seed 3 --first 0 --faults leave --injections 1" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world", "1"], "not between 2 and 16"),
        (["--minutes", "0"], "0 is not a positive number"),
        (["--minutes", "soon"], "'soon' is not a number"),
        (["--detection", "nan"], "nan is not a positive number"),
        (["--faults", "kill,rain"], "no fault is called 'rain'; there are kill, stop"),
        (["--faults", "none", "--injections", "3"], "--injections needs faults"),
        (["--json", "/no/such/folder/soak.json"], "does not exist"),
    ],
)
def test_bad_arguments(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["soak", *options])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status == 2
    assert said in capsys.readouterr().err


def test_ranks_that_can_not_run_are_2(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    command = [sys.executable, "-m", "ring_reduce", "soak", "--world", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={"PYTHONPATH": str(tmp_path)}, check=False
    )
    assert done.returncode == 2, done.stdout
    assert "no torch today" in done.stderr


# ---- the plan


def test_the_plan_follows_from_the_seed() -> None:
    for number in range(20):
        episode = episode_of(ORDERS, number)
        assert episode == episode_of(dataclasses.replace(ORDERS, folder="another"), number)
        assert call_of(ORDERS, episode, 3) == call_of(ORDERS, episode, 3)
    other = dataclasses.replace(ORDERS, seed=6)
    assert [episode_of(ORDERS, n) for n in range(5)] != [episode_of(other, n) for n in range(5)]


def test_the_plan_leaves_nothing_out() -> None:
    episodes = [episode_of(ORDERS, number) for number in range(400)]
    planned = [call_of(ORDERS, episode, 0) for episode in episodes]
    assert {each.fault.kind for each in episodes if each.fault} == set(FAULT_WEIGHTS)
    assert {each.fault.victim for each in episodes if each.fault} == {0, 1, 2}
    assert {len(ring.members) for each in episodes for ring in each.rings} == {1, 2, 3}
    assert {ring.algorithm for each in episodes for ring in each.rings} == {"auto", "ring", "direct"}
    assert {call.dtype for call in planned} == set(DTYPES)
    assert {call.layout for call in planned} == set(LAYOUTS)
    assert {call.operation for call in planned} == set(OPERATIONS)
    assert len({call.normalization.kind for call in planned}) == 5
    assert min(call.elements for call in planned) == 0


# ---- what is checked


def plan_of(dtype: str, **options: Any) -> CallPlan:
    plan = call_of(ORDERS, episode_of(ORDERS, 0), 0)
    plain: dict[str, Any] = {
        "dtype": dtype,
        "operation": "all_reduce",
        "elements": 50,
        "counts": (1.0, 0.0, 3.0),
    }
    return dataclasses.replace(plan, **{**plain, "normalization": WEIGHTED_MEAN, "special": False, **options})


@pytest.mark.parametrize("dtype", [name for name in DTYPES if "float" in name])
def test_a_value_out_of_bounds_is_seen(dtype: str) -> None:
    """By little more than the bound, in either direction, and NaN for a number."""
    plan = plan_of(dtype)
    expected, bound = check.expectation(plan, 3)
    assert (bound > 0).all()
    assert (bound < 0.1 * np.abs(expected).max()).all()
    assert check.problem_of(plan, 3, 0, expected) is None
    for wrong in (expected[49] + 1.01 * bound[49], expected[49] - 1.01 * bound[49], np.nan):
        got = expected.copy()
        got[49] = wrong
        assert "1 of 50 elements are wrong: the first, number 49" in str(check.problem_of(plan, 3, 0, got))


def test_special_values_are_expected() -> None:
    plan = plan_of("float32", special=True, elements=4, counts=(1.0, 1.0, 1.0))
    columns = [[np.nan, np.inf, np.inf, 1.0], [1.0, 1.0, -np.inf, 1.0], [1.0, 1.0, 0.0, 1.0]]
    with mock.patch.object(check, "values_of", lambda _, member: np.array(columns[member])):
        assert check.problem_of(plan, 3, 0, np.array([np.nan, np.inf, np.nan, 1.0])) is None
        for wrong in ([0, np.inf, np.nan, 1], [np.nan, -np.inf, np.nan, 1], [np.nan, np.inf, np.nan, np.inf]):
            assert check.problem_of(plan, 3, 0, np.array(wrong, np.float64)) is not None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_writes_beside_a_tensor_are_seen(arrays: str, layout: str) -> None:
    plan = plan_of("float32", arrays=arrays, layout=layout)
    placed = Placed(plan, 50)
    placed.put(values_of(plan, 1))
    assert (values_in(placed.tensor) == values_of(plan, 1)).all()
    assert placed.untouched_around()
    placed._around[-1] = 3
    assert not placed.untouched_around()


def soaked(seat: Seat, damage: bool) -> list[str]:
    """Checked calls of one rank. Damaged are the results of rank 1's synchronous calls."""
    orders = Orders(world=seat.world, seed=1, faults=(), always=False, folder="")
    call = calls._call

    def call_and_damage(ring, plan, member, source, target):  # type: ignore[no-untyped-def]
        work = call(ring, plan, member, source, target)
        if work is None and seat.rank == 1:
            Placed.put(target or source, np.full((target or source).tensor.shape, 50.0))
        return work

    outcome = Outcome(seat.rank)
    with mock.patch.object(calls, "_call", call_and_damage if damage else call):
        episode = dataclasses.replace(episode_of(orders, 4), calls=6, fault=None)
        run_episode(seat.rank, orders, episode, seat.store, outcome)
    return outcome.problems


def test_a_wrong_result_is_a_problem(run: Run) -> None:
    assert run(2, soaked, False) == [[], []]
    good, bad = run(2, soaked, True)
    assert good == []
    assert "rank 1: " in bad[0]
    assert "elements are wrong" in bad[0]


def aborted_late(seat: Seat) -> tuple[str, str, list[str]]:
    orders = Orders(world=seat.world, seed=1, faults=("abort",), always=True, folder="")
    episode = episode_of(orders, 0)
    fault = Fault("abort", victim=1, after_s=0.5)
    late = dataclasses.replace(
        episode, calls=0, fault=fault, steady=dataclasses.replace(episode.steady, elements=1)
    )
    outcome = Outcome(seat.rank)
    run_episode(seat.rank, orders, late, seat.store, outcome)
    return outcome.error, outcome.text, outcome.problems


def test_a_fault_that_strikes_late_finds_calls_to_end(run: Run) -> None:
    """Where cores are free, a number of calls would be over by then."""
    assert run(2, aborted_late) == 2 * [("RingAborted", EXPECTED["abort"].names.format(victim=1), [])]


# ---- the judge


KILL = Fault("kill", victim=1, after_s=0.0)
LOST = "rank 1 ended (killed, crashed or exited) after 3 calls"


def judged(fault: Fault | None, *outcomes: Outcome) -> list[str]:
    episode = dataclasses.replace(episode_of(ORDERS, 0), fault=fault, calls=0)
    return problems_of(ORDERS, episode, list(outcomes))


def outcome(rank: int, error: str = "PeerLost", text: str = LOST, heard_at: float = 10.5) -> Outcome:
    return Outcome(rank, error=error, text=text, heard_at=heard_at, fault_at=10.0)


def test_a_fault_that_all_heard_of_is_survived() -> None:
    assert judged(KILL, outcome(0), outcome(1), outcome(2)) == []
    assert judged(None, Outcome(0), Outcome(1), Outcome(2)) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (outcome(2, error="RingTimeout"), "rank 2 should raise PeerLost"),
        (outcome(2, text="rank 0 ended"), "rank 2 should raise PeerLost that says 'rank 1 ended"),
        (outcome(2, text=LOST + "!"), "different texts"),
        (outcome(2, error="", text=""), "and raised nothing"),
        (outcome(2, heard_at=11.5), "it took 1.50 s until every rank knew"),
        (
            Outcome(2, error="PeerLost", text=LOST, problems=["a call that failed changed"]),
            "a call that failed changed",
        ),
    ],
)
def test_a_fault_that_is_not_survived(wrong: Outcome, said: str) -> None:
    assert said in judged(KILL, outcome(0), outcome(1), wrong)[0]


def test_an_error_without_a_fault() -> None:
    (problem,) = judged(None, Outcome(0), outcome(1), Outcome(2))
    assert "rank 1 raised PeerLost, which nothing explains" in problem


def test_a_stop_is_blamed_on_who_was_stopped() -> None:
    stop, text = Fault("stop", victim=1, after_s=0.0), "rank {}: no segment 3 from rank 1 in 2.0 s"
    late = 10.0 + HURRIED_S
    by_another = [outcome(rank, "RingTimeout", text.format(0), late) for rank in range(3)]
    by_itself = [outcome(rank, "RingTimeout", text.format(1), late) for rank in range(3)]
    assert judged(stop, *by_another) == []
    assert "rank 0 should raise RingTimeout" in judged(stop, *by_itself)[0]
    assert detection_of(stop, by_another) == 0.0


def test_bits_that_differ_are_a_problem() -> None:
    episode = next(
        each
        for each in (episode_of(ORDERS, number) for number in range(100))
        if each.calls
        and call_of(ORDERS, each, 0).operation == "all_reduce"
        and call_of(ORDERS, each, 0).ring == 0
    )
    one_call: Episode = dataclasses.replace(episode, calls=1, fault=None)
    same = [Outcome(rank, digests=[7]) for rank in range(3)]
    assert problems_of(ORDERS, one_call, same) == []
    same[2].digests = [8]
    (problem,) = problems_of(ORDERS, one_call, same)
    assert "got different bits" in problem
