"""``bench scale``: its figures on made-up times, what it measures, and tiny runs of all of it."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ring_reduce as rr
from conftest import Run
from launch import Seat
from ring_reduce.benchmarks import scale, scale_peers
from ring_reduce.benchmarks.measurement import Found, Measurement
from ring_reduce.benchmarks.peers import Op, Place
from ring_reduce.benchmarks.plan import Contender, Plan
from ring_reduce.benchmarks.scale_peers import RING_PEERS, SharedRing
from ring_reduce.benchmarks.scale_report import document, lines_of, table, wrong_results

pytestmark = pytest.mark.usefixtures("forked_ranks")

HOST = {"cores": 2, "processor": "a processor", "torch": "9.9"}
LABELS = [
    "ring SUM",
    "ring MEAN",
    "ring divide_by",
    "ring DIVIDE_BY_COUNT",
    "ring WEIGHTED_MEAN",
    "ring SUM, then div_",
    "gloo SUM",
    "gloo SUM, then div_",
]


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ring-reduce bench scale")
    scale.add_arguments(parser)
    return parser.parse_args(options)


def plan(**changes: Any) -> Plan:
    return Plan(**{"world": 2, "sizes": (4096,), "ops": ("SUM", "MEAN"), "backends": ("gloo",), **changes})


def measurement(
    in_place: bool, us: dict[str, list[float]], wrong: dict[str, int] | None = None
) -> Measurement:
    """Times by round of contenders by label."""
    backends = {peer.name: f"{peer.__module__}:{peer.__name__}" for peer in RING_PEERS}
    found = {}
    for label, times in us.items():
        op = Op.SUM if label in ("ring SUM", "gloo SUM") else Op.MEAN
        contender = Contender(backends.get(label, "gloo"), op, in_place)
        found[contender] = Found(np.array(times)[:, None], (wrong or {}).get(label, 0), 0.0, None)
    return Measurement("float32", 4096, found, np.full(1, math.nan))


# Figures.


def test_the_table_shows_what_dividing_costs() -> None:
    us = dict(zip(LABELS, (100, 101, 103, 103, 105, 150, 800, 850), strict=True))
    found = measurement(True, {label: [float(each)] * 6 for label, each in us.items()})
    found.found.update(measurement(False, {"ring SUM": [200.0] * 6, "ring MEAN": [150.0] * 6}).found)
    assert table(HOST, plan(), [found]).splitlines() == [
        "world 2, float32, on 2 cores (a processor), torch 9.9, 1 torch thread a rank",
        "  size             contender   place        us       p99               over ring SUM  at most +2 %",
        "    4K              ring SUM      in    100.00    100.00",
        "    4K             ring MEAN      in    101.00    101.00         +1.0 % [+1.0, +1.0]           met",
        "    4K        ring divide_by      in    103.00    103.00         +3.0 % [+3.0, +3.0]",
        "    4K  ring DIVIDE_BY_COUNT      in    103.00    103.00         +3.0 % [+3.0, +3.0]        MISSED",
        "    4K    ring WEIGHTED_MEAN      in    105.00    105.00         +5.0 % [+5.0, +5.0]",
        "    4K   ring SUM, then div_      in    150.00    150.00      +50.0 % [+50.0, +50.0]",
        "    4K              gloo SUM      in    800.00    800.00         +700 % [+700, +700]",
        "    4K   gloo SUM, then div_      in    850.00    850.00         +750 % [+750, +750]",
        "    4K              ring SUM  out of    200.00    200.00",
        "    4K             ring MEAN  out of    150.00    150.00      -25.0 % [-25.0, -25.0]           met",
    ]


@pytest.mark.parametrize(
    ("mean", "met"),
    [
        ([102.0] * 6, True),
        ([102.1] * 6, False),
        ([90.0, 130.0] * 3, True),  # the median is 110, and the interval reaches below 102
        ([102.1] * 2, False),  # too few rounds for an interval
        ([101.9] * 2, True),
    ],
)
def test_the_target_is_met_by_value_or_interval(mean: list[float], met: bool) -> None:
    found = measurement(True, {"ring SUM": [100.0] * len(mean), "ring MEAN": mean})
    found_lines = {line.label: line for line in lines_of(plan(), [with_both_places(found)])}
    assert found_lines["ring MEAN"].target_met is met
    assert found_lines["ring SUM"].target_met is None


def with_both_places(found: Measurement) -> Measurement:
    others = {
        contender._replace(in_place=not contender.in_place): each for contender, each in found.found.items()
    }
    return Measurement(found.dtype, found.nbytes, found.found | others, found.hops_ns)


def test_the_json_holds_every_row_and_no_nan() -> None:
    found = with_both_places(measurement(True, {"ring SUM": [100.0] * 2, "ring MEAN": [101.0] * 2}))
    written = document(HOST, plan(), [found])
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert written["plan"]["sizes"] == [4096]
    first, second = written["rows"][:2]
    assert (first["contender"], first["over_sum"], first["target_met"]) == ("ring SUM", None, None)
    assert (second["contender"], second["bytes"], second["time_us"]) == ("ring MEAN", 4096, 101.0)
    assert second["over_sum"] == {"value": 1.01, "low": None, "high": None}
    assert second["target_met"] is True
    assert [row["in_place"] for row in written["rows"]] == [True, True, False, False]


def test_wrong_results_are_named() -> None:
    found = with_both_places(
        measurement(True, {"ring SUM": [1.0] * 2, "ring MEAN": [1.0] * 2}, {"ring MEAN": 7})
    )
    wrong = [
        "ring MEAN in place at 4096 bytes: 7 elements",
        "ring MEAN out of place at 4096 bytes: 7 elements",
    ]
    assert wrong_results(plan(), [found]) == wrong
    assert table(HOST, plan(), [found]).splitlines()[-2:] == [f"WRONG RESULTS: {text}" for text in wrong]


# What is measured.


def reduced(seat: Seat, dtype: torch.dtype) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each peer: name, the result in place, the result out of place, and its input afterwards."""
    place = Place(seat.rank, seat.world, seat.store, 1, torch.device("cpu"), seat.rank)
    peers = [peer() for peer in RING_PEERS]
    for peer in peers:
        peer.setup(place)
    assert len({id(peer._ring) for peer in peers}) == 1
    found = []
    for peer in peers:
        x = torch.arange(50, dtype=dtype) % 4 + seat.rank
        y, out = x.clone(), torch.full_like(x, math.nan)
        peer.all_reduce(x, x, peer.ops[0])
        peer.all_reduce(y, out, peer.ops[0])
        found.append((peer.name, x, out, y))
    ring = peers[0]._ring
    for peer in peers:
        assert not ring.closed
        peer.close()
    assert ring.closed
    assert SharedRing._users == 0
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_peer_divides_by_the_ranks(run: Run, dtype: torch.dtype) -> None:
    world = 3
    for rank, found in enumerate(run(world, reduced, dtype)):
        assert [name for name, *_ in found] == LABELS[:6]
        base = torch.arange(50, dtype=torch.float32) % 4
        total = world * base + 3
        for name, in_place, out_of_place, source in found:
            expected = (total if name == "ring SUM" else total / world).to(dtype)
            assert torch.equal(in_place, expected), name
            assert torch.equal(out_of_place, expected), name
            assert torch.equal(source, (base + rank).to(dtype)), name


def test_the_division_behind_the_sum_is_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be measured as free."""
    asked: list[rr.Normalization] = []
    real = rr.Ring.all_reduce

    def all_reduce(ring: rr.Ring, x: Any, normalization: rr.Normalization, **options: Any) -> Any:
        asked.append(normalization)
        return real(ring, x, normalization, **options)

    monkeypatch.setattr(rr.Ring, "all_reduce", all_reduce)
    peers = [peer() for peer in RING_PEERS]
    for peer in peers:
        peer.setup(Place(0, 1, torch.distributed.HashStore(), 1, torch.device("cpu"), 0))
        peer.all_reduce(x := torch.ones(3), x, peer.ops[0])
    for peer in peers:
        peer.close()
    assert asked == [rr.SUM, rr.MEAN, rr.divide_by(1), rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN, rr.SUM]


# The command.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "0"], "0 is not between 1 and 64"),
        (["--sizes", "1K,0"], "size '0': give positive bytes"),
        (["--sizes", "1X"], "size '1X': give positive bytes"),
        (["--dtype", "int32"], "invalid choice: 'int32'"),
        (["--calls", "none"], "'none' is not a whole number"),
        (["--json", "."], "is a folder"),
    ],
)
def test_bad_options_get_a_clear_error(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tiny_run(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scale.json"
    options = ["--sizes", "64,4K", "--calls", "6", "--rotate", "16K", "--dtype", dtype, "--json", str(file)]
    assert scale.run(parsed(*options)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in rows] == LABELS * 4
    assert {(row["bytes"], row["in_place"], row["dtype"]) for row in rows} == {
        (nbytes, in_place, dtype) for nbytes in (64, 4096) for in_place in (True, False)
    }
    assert all(row["wrong"] == 0 and 0 < row["time_us_min"] <= row["time_us"] for row in rows)
    assert all((row["over_sum"] is None) is (row["contender"] == "ring SUM") for row in rows)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2 + len(rows)
    assert shown.err == ""


class NotDivided(scale_peers.Mean):
    """A mean that is a sum."""

    normalization = rr.SUM


def test_a_wrong_normalization_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "RING_PEERS", (scale_peers.Sum, NotDivided))
    assert scale.run(parsed("--sizes", "4K", "--calls", "2", "--rotate", "16K")) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG RESULTS")]
    assert [line.partition(" at ")[0] for line in wrong] == [
        "WRONG RESULTS: ring MEAN in place",
        "WRONG RESULTS: ring MEAN out of place",
    ]


class Failing(scale_peers.Mean):
    """A peer that can't be set up."""

    def setup(self, place: Place) -> None:
        raise OSError("no such luck")


def test_a_rank_that_fails_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "RING_PEERS", (scale_peers.Sum, Failing))
    assert scale.run(parsed("--sizes", "64", "--calls", "2", "--rotate", "16K")) == 2
    assert "no such luck" in capsys.readouterr().err


def test_a_size_below_one_element_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.run(parsed("--sizes", "64,2", "--calls", "2")) == 2
    assert "--sizes 2 is less than one element of 4 bytes" in capsys.readouterr().err
