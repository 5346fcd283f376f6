"""What the benchmark makes of its measurements: rows, ratios, targets met or missed, and the machine's name."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ring_reduce.benchmarks import compare as cli
from ring_reduce.benchmarks import report
from ring_reduce.benchmarks.measure import Measurement, Plan
from ring_reduce.benchmarks.report import MB, Target, compare, rows, targets
from ring_reduce.benchmarks.summary import Ratio

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


def measurement(nbytes: int, **medians: float) -> Measurement:
    times = {label.replace("_", " "): np.full((3, 2), value) for label, value in medians.items()}
    hops: Any = np.arange(3.0)
    wrong = {label: None if label.startswith("copy") else 0 for label in times}
    return Measurement(nbytes, times, wrong, hops)


def test_rows_hold_nccl_tests_bandwidths() -> None:
    plan = Plan(world=4, sizes=(MB,))
    found = rows(plan, [measurement(MB, ring_SUM=100.0, ring_MEAN=101.0, gloo_SUM=900.0, copy_SUM=80.0)])
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
        plan, measurement(64 * MB, ring_SUM=100.0, ring_MEAN=110.0, gloo_SUM=600.0, copy_SUM=50.0)
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
    found = compare(Plan(world=2, sizes=(MB,)), measurement(MB, gloo_SUM=600.0))
    assert (found.ratios, found.met) == ({}, {})


def test_processor_and_cache_are_told_or_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert report.processor_name()
    assert report.last_level_cache_bytes() > 0
    monkeypatch.setattr(
        report, "Path", lambda _: SimpleNamespace(glob=lambda _: iter(()), read_text=_unreadable)
    )
    assert report.last_level_cache_bytes(default=7) == 7
    assert report.processor_name() == platform.machine()


def _unreadable() -> str:
    raise OSError("no such file")


def test_the_readme_shows_the_committed_figures() -> None:
    root = Path(__file__).parents[1]
    readme = (root / "README.md").read_text()
    two, four = (
        json.loads((root / "benchmarks" / "results" / f"cpu-{world}-ranks.json").read_text())["comparisons"]
        for world in (2, 4)
    )
    for of_two, of_four in zip(two, four, strict=True):
        ratios = [of_two["ratios"][name] for name in ("gloo_over_ring", "ring_over_copy", "mean_over_sum")]
        ratios.append(of_four["ratios"]["gloo_over_ring"])
        cells = (f"{ratio['value']:.3g} [{ratio['low']:.3g}, {ratio['high']:.3g}]" for ratio in ratios)
        assert f" | {' | '.join(cells)} |" in readme
