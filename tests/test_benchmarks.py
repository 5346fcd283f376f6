"""The benchmark's statistics on numbers with known answers, its parts, and one tiny run through all of it."""

from __future__ import annotations

import json
import platform
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the benchmark's peers need torch: pip install torch")

import torch

from ring_reduce.benchmarks import compare as cli
from ring_reduce.benchmarks.barrier import Barrier, words_needed
from ring_reduce.benchmarks.buffers import SHIFTS, RotatedBuffers
from ring_reduce.benchmarks.measure import Contender, Measurement, Plan, _Timing, measure
from ring_reduce.benchmarks.peers import PEERS, CopyPeer, Op, Place
from ring_reduce.benchmarks.report import MB, RATIOS, Target, compare, rows, targets
from ring_reduce.benchmarks.summary import Ratio, ratio_of_medians, slowest_rank, summarize

ROW_KEYS = {
    "backend",
    "world",
    "bytes",
    "dtype",
    "op",
    "in_place",
    "time_us",
    "time_us_min",
    "time_us_p99",
    "algbw_GBps",
    "busbw_GBps",
    "wrong",
    "copy_us",
    "calls",
}


# --- statistics


def test_summary_is_of_all_calls() -> None:
    times: Any = np.arange(1.0, 102.0).reshape(101, 1)
    np.random.default_rng(0).shuffle(times)
    summary = summarize(times)
    assert (summary.median, summary.minimum, summary.p99) == (51.0, 1.0, 100.0)


def test_a_call_takes_what_its_slowest_rank_takes() -> None:
    by_rank = np.array([[[1.0, 9.0], [3.0, 4.0]], [[2.0, 5.0], [8.0, 1.0]]])
    assert slowest_rank(by_rank).tolist() == [[2.0, 9.0], [8.0, 4.0]]


def test_ratio_pairs_the_rounds() -> None:
    """Drift that hits both sides of a round alike must leave the ratio and its interval alone."""
    drift = np.random.default_rng(1).uniform(1, 10, (31, 1)) * np.ones((31, 5))
    ratio = ratio_of_medians(2 * drift, drift)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_interval_covers_the_true_ratio_in_spite_of_correlated_calls() -> None:
    """Calls of a round move together; an interval that took them for independent would cover far less than 95 %."""
    random = np.random.default_rng(2)
    covered = 0
    for trial in range(200):
        sides = [np.exp(random.normal(0, 0.1, (40, 1)) + random.normal(0, 0.02, (40, 16))) for _ in range(2)]
        ratio = ratio_of_medians(1.5 * sides[0], sides[1], resamples=300, seed=trial)
        covered += ratio.low <= 1.5 <= ratio.high
    # Binomial(200, 0.95) is below 177 once in 3,000 trials; resampling calls covers about 70.
    assert covered >= 177


def test_interval_shows_a_difference_and_does_not_invent_one() -> None:
    random = np.random.default_rng(3)
    slow, fast = random.normal(110, 5, (100, 8)), random.normal(100, 5, (100, 8))
    assert ratio_of_medians(slow, fast).low > 1.05
    same = ratio_of_medians(fast, random.normal(100, 5, (100, 8)))
    assert same.low < 1.0 < same.high


def test_ratio_refuses_sides_of_different_rounds() -> None:
    with pytest.raises(ValueError, match="3 and 4 rounds"):
        ratio_of_medians(np.ones((3, 2)), np.ones((4, 2)))


@pytest.mark.parametrize(("low", "high", "meaningless"), [(0.9, 1.1, False), (0.5, 1.6, True)])
def test_wide_intervals_are_called_meaningless(low: float, high: float, meaningless: bool) -> None:
    assert Ratio(1.0, low, high).is_meaningless is meaningless


# --- targets and rows


@pytest.mark.parametrize(
    ("target", "ratio", "met"),
    [
        (Target("gloo_over_ring", 5, at_least=True), Ratio(4.9, 4.0, 6.0), False),
        (Target("gloo_over_ring", 5, at_least=True), Ratio(5.0, 4.0, 6.0), True),
        (Target("ring_over_copy", 1.3, at_least=False), Ratio(1.31, 1.2, 1.4), False),
        (Target("mean_over_sum", 1.03, at_least=False, within_interval=True), Ratio(1.05, 1.02, 1.08), True),
        (Target("mean_over_sum", 1.03, at_least=False, within_interval=True), Ratio(1.05, 1.04, 1.06), False),
    ],
)
def test_target_is_judged_by_value_or_interval(target: Target, ratio: Ratio, met: bool) -> None:
    assert target.is_met(ratio) is met


def test_targets_by_world_and_size() -> None:
    def bounds(world: int, nbytes: int) -> dict[str, float]:
        return {target.ratio: target.bound for target in targets(world, nbytes)}

    mean = {"mean_over_sum": 1.03}
    assert bounds(2, 256 << 10) == mean | {"gloo_over_ring": 20}
    assert bounds(2, 512 << 10) == mean
    assert bounds(2, MB) == mean | {"gloo_over_ring": 5}
    assert bounds(2, 64 * MB) == mean | {"gloo_over_ring": 5, "ring_over_copy": 1.3}
    assert bounds(4, 1 << 10) == mean | {"gloo_over_ring": 10}
    assert bounds(4, 64 * MB) == mean | {"gloo_over_ring": 3}
    assert bounds(4, MB) == bounds(3, 1 << 10) == mean


def _measurement(nbytes: int, **medians: float) -> Measurement:
    times = {label.replace("_", " "): np.full((3, 2), value) for label, value in medians.items()}
    hops: Any = np.arange(3.0)
    wrong = {label: None if label.startswith("copy") else 0 for label in times}
    return Measurement(nbytes, times, wrong, hops)


def test_rows_hold_nccl_tests_bandwidths() -> None:
    plan = Plan(world=4, sizes=(MB,))
    found = rows(plan, [_measurement(MB, ring_SUM=100.0, ring_MEAN=101.0, gloo_SUM=900.0, copy_SUM=80.0)])
    assert [(row["backend"], row["op"]) for row in found] == [
        ("ring", "SUM"),
        ("ring", "MEAN"),
        ("gloo", "SUM"),
        ("copy", "SUM"),
    ]
    assert all(set(row) == ROW_KEYS for row in found)
    ring = found[0]
    assert ring["algbw_GBps"] == pytest.approx(MB / 1e9 / 100e-6)
    assert ring["busbw_GBps"] == pytest.approx(MB / 1e9 / 100e-6 * 1.5)
    assert (ring["copy_us"], ring["wrong"], ring["calls"], found[3]["wrong"]) == (80.0, 0, 6, None)


def test_comparison_divides_the_right_way_round_and_names_what_was_missed() -> None:
    plan = Plan(world=2, sizes=(64 * MB,))
    found = compare(
        plan, _measurement(64 * MB, ring_SUM=100.0, ring_MEAN=110.0, gloo_SUM=600.0, copy_SUM=50.0)
    )
    values = {name: ratio.value for name, ratio in found.ratios.items()}
    assert values == {"gloo_over_ring": 6.0, "ring_over_copy": 2.0, "mean_over_sum": 1.1}
    assert found.met == {
        "gloo_over_ring >= 5": True,
        "ring_over_copy <= 1.3": False,
        "mean_over_sum <= 1.03": False,
    }
    assert cli.verdict(found) == "MISSED mean_over_sum <= 1.03, ring_over_copy <= 1.3"
    assert cli.line_of(found)[:3] == ["64M", "0-2", "100.0"]


def test_comparison_without_the_ring_has_no_ratios() -> None:
    found = compare(Plan(world=2, sizes=(MB,)), _measurement(MB, gloo_SUM=600.0))
    assert (found.ratios, found.met) == ({}, {})


# --- parts


@pytest.mark.parametrize("cores", [64, 1])
def test_barrier_lets_nobody_leave_before_all_have_come(cores: int) -> None:
    world, turns = 3, 50
    words = [0] * words_needed(world)
    arrived = [0] * world
    early: list[tuple[int, int]] = []

    def run(rank: int) -> None:
        barrier = Barrier(words, rank=rank, world=world, cores=cores, timeout=60)
        for turn in range(1, turns + 1):
            arrived[rank] = turn
            barrier.align()
            if min(arrived) < turn:
                early.append((rank, turn))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert early == []
    assert arrived == [turns] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_hops_are_timed_where_ranks_have_cores_and_leave_the_barrier_in_step(world: int) -> None:
    words = [0] * words_needed(world)
    hops: list[float] = []

    def run(rank: int) -> None:
        barrier = Barrier(words, rank=rank, world=world, cores=world, timeout=60)
        for _ in range(3):
            hops.append(barrier.hop_ns())
            barrier.align()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hops) == 3 * world
    assert all(np.isnan(hop) if world == 1 else hop > 0 for hop in hops)


def test_hops_are_not_timed_where_ranks_share_cores() -> None:
    assert np.isnan(Barrier([0] * words_needed(1), rank=0, world=1, cores=1).hop_ns())


def test_barrier_names_the_rank_that_does_not_come() -> None:
    words = [0] * words_needed(3)
    words[0] = 1  # rank 0 has come, rank 2 has not
    with pytest.raises(TimeoutError, match="rank 1: rank 2 did not reach turn 1"):
        Barrier(words, rank=1, world=3, timeout=0.01).align()


def _buffers(
    rank: int, *, count: int = 100, dtype: torch.dtype = torch.float32, rotate: int = 4096
) -> RotatedBuffers:
    return RotatedBuffers(rank=rank, world=3, count=count, dtype=dtype, rotate_bytes=rotate)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_buffers_know_the_exact_result(dtype: torch.dtype) -> None:
    ranks = [_buffers(rank, dtype=dtype) for rank in range(3)]
    for _ in range(50):
        inputs = [buffers.take() for buffers in ranks]
        total = sum(x.double() for x in inputs)
        assert isinstance(total, torch.Tensor)
        assert ranks[1].wrong(Op.SUM) > 0
        inputs[1].copy_(total)
        assert ranks[1].wrong(Op.SUM) == 0
        inputs[1][7] += 1
        assert ranks[1].wrong(Op.SUM) == 1
        inputs[1].copy_((total.float() / 3) if dtype is not torch.float64 else total / 3)
        assert ranks[1].wrong(Op.MEAN) == 0
        for buffers in ranks:
            buffers.refill()


def test_buffers_exceed_the_cache_and_change_in_every_call() -> None:
    buffers = _buffers(0, count=256, rotate=10 * 1024)
    lap = [buffers.take() for _ in range(10)]
    assert len({x.data_ptr() for x in lap}) == 10
    assert len({x.numpy().tobytes() for x in lap}) == 10
    again = buffers.take()
    before = again.clone()
    assert again.data_ptr() == lap[0].data_ptr()
    buffers.refill()
    assert not torch.equal(before, again)


def test_large_buffers_still_alternate() -> None:
    buffers = _buffers(0, count=4096, rotate=1)
    assert buffers.take().data_ptr() != buffers.take().data_ptr()


class _NoReduce:
    """A peer that forgets to reduce."""

    name, ops, reduces = "lazy", (Op.SUM,), True

    def setup(self, place: Place) -> None: ...

    def all_reduce(self, x: torch.Tensor, op: Op) -> None: ...

    def close(self) -> None: ...


def test_a_peer_that_does_not_reduce_is_found_out() -> None:
    words = [0] * words_needed(2)
    peer: Any = _NoReduce()
    contender = Contender(peer, Op.SUM)
    plan = Plan(world=2, sizes=(4096,), rotate_bytes=1)
    timing = _Timing(plan, 4096, 0, Barrier(words, rank=0, world=2), [contender])
    # Of two integers in 0..3 the second is 0, and the sum right by chance, once in 4.
    assert timing._count_wrong(contender) > 1024


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_copy_moves_every_byte_and_rotates_its_destination(dtype: torch.dtype) -> None:
    peer = CopyPeer()
    peer.setup(Place(0, 1, torch.distributed.HashStore(), rotate_bytes=1))
    x = torch.arange(1, 101).to(dtype)
    size = x.numel() * x.itemsize
    bits = x.view(torch.uint8).numpy().tobytes()
    for _ in range(3):
        peer.all_reduce(x, Op.SUM)
    assert peer._scratch.size == 2 * size
    assert peer._scratch[:size].tobytes() == peer._scratch[size:].tobytes() == bits


def test_repeats_depend_on_the_size_alone_and_meet_the_calls_asked_for() -> None:
    plan = Plan(world=2, sizes=(1024, 64 * MB))
    assert plan.repeats(1024) == (100, 16)
    assert plan.repeats(64 * MB) == (40, 1)
    assert Plan(world=2, sizes=(1024,), calls=3).repeats(1024) == (1, 3)
    assert max(plan.repeats(nbytes)[0] for nbytes in plan.sizes) < SHIFTS


# --- the command


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("16K", 16384), ("64m", 64 * MB), ("1G", 1 << 30)]
)
def test_sizes_are_parsed_and_printed(text: str, nbytes: int) -> None:
    assert cli.parse_size(text) == nbytes
    assert cli.parse_size(cli.size_text(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sizes", "0"),
        ("--sizes", "1X"),
        ("--sizes", "1K,1024"),
        ("--peers", "nickel"),
        ("--world", "0"),
        ("--calls", "0"),
    ],
)
def test_bad_arguments_end_with_a_usage_error(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([option, value])
    message = capsys.readouterr().err.splitlines()[-1]
    assert option in message
    assert value in message


@pytest.mark.parametrize(("wrong", "status"), [(0, 0), (5, 1)])
def test_wrong_results_are_shown_and_set_the_exit_status(
    wrong: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _measurement(1024, ring_SUM=1.0)
    found.wrong["ring SUM"] = wrong
    monkeypatch.setattr(cli, "measure", lambda plan, progress: [found])
    assert cli.main(["--sizes", "1K"]) == status
    assert ("WRONG RESULTS: ring SUM at 1K: 5 elements" in capsys.readouterr().out) is bool(wrong)


def test_a_tiny_run_measures_all_contenders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--world", "2", "--sizes", "64,4K", "--calls", "3", "--rotate", "16K", "--json", str(file)]
    assert cli.main(arguments) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert set(found) == {"machine", "plan", "rows", "comparisons"}
    assert all(set(row) == ROW_KEYS for row in found["rows"])
    seen = {(row["bytes"], row["backend"], row["op"]): row for row in found["rows"]}
    contenders = {("ring", "SUM"), ("ring", "MEAN"), ("gloo", "SUM"), ("copy", "SUM")}
    assert set(seen) == {(nbytes, *contender) for nbytes in (64, 4096) for contender in contenders}
    assert all(0 < row["time_us_min"] <= row["time_us"] <= row["time_us_p99"] for row in found["rows"])
    assert all(row["wrong"] == (None if row["backend"] == "copy" else 0) for row in found["rows"])
    assert all(set(size["ratios"]) == set(RATIOS) for size in found["comparisons"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("world 2, float32, in place")
    assert [line.split()[0] for line in lines[2:]] == ["64", "4K"]


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types_give_exact_results(dtype: str) -> None:
    found = measure(Plan(world=3, sizes=(1040,), dtype=dtype, peers=("ring",), calls=2, rotate_bytes=4096))
    assert found[0].wrong == {"ring SUM": 0, "ring MEAN": 0}


def test_a_rank_that_fails_ends_the_run() -> None:
    """The other ranks must not be waited for; here both fail, for want of the peer."""
    with pytest.raises(Exception, match="no-such-peer"):
        measure(Plan(world=2, sizes=(64,), peers=("no-such-peer",), calls=1))


def test_every_peer_keeps_the_protocol() -> None:
    for name, make in PEERS.items():
        peer = make()
        assert peer.name == name
        assert peer.ops
        assert set(peer.ops) <= set(Op)


def test_processor_and_cache_are_told_or_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ring_reduce.benchmarks import report

    assert report.processor_name()
    assert report.last_level_cache_bytes() > 0
    monkeypatch.setattr(
        report, "Path", lambda _: SimpleNamespace(glob=lambda _: iter(()), read_text=_unreadable)
    )
    assert report.last_level_cache_bytes(default=7) == 7
    assert report.processor_name() == platform.machine()


def _unreadable() -> str:
    raise OSError("no such file")
