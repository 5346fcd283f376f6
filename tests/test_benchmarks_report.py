"""What programs read of the benchmark: rows, ratios, the JSON file, the committed figures, and the machine's name."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmark_cases import ROW_KEYS, found, measurement, plan, report
from figures import DOCUMENTS, RESULTS, ddp_table, tables
from ring_reduce.benchmarks import host
from ring_reduce.benchmarks.host import MB
from ring_reduce.benchmarks.measurement import Found, merge
from ring_reduce.benchmarks.report import comparisons, document, figures_of, rows

MEDIANS = {
    "ring sum out": 120.0,
    "ring sum in": 100.0,
    "ring avg in": 110.0,
    "gloo sum in": 900.0,
    "copy sum out": 80.0,
}


def test_what_the_ranks_found_is_merged() -> None:
    """A call takes what its slowest rank takes; one rank's wrong element is as bad as another's."""
    ranks = [
        Found(np.array([[1.0, 9.0]]), 2, 1e-7, 100),
        Found(np.array([[3.0, 4.0]]), 5, 3e-7, 96),
    ]
    merged = merge(ranks)
    assert merged.times.tolist() == [[3.0, 9.0]]
    assert (merged.wrong, merged.relative_error, merged.bytes_sent) == (7, 3e-7, 100)
    untold = merge([found(1.0, wrong=None, error=None), found(1.0, wrong=None, error=None)])
    assert (untold.wrong, untold.relative_error, untold.bytes_sent) == (None, None, None)


def test_rows_hold_nccl_tests_bandwidths() -> None:
    made = measurement(MB, MEDIANS, sent=3 * MB // 2, error=1e-7)
    of_all = rows(plan(world=4), [made])
    assert [(row.backend, row.op, row.in_place) for row in of_all] == [
        ("ring", "SUM", False),
        ("ring", "SUM", True),
        ("ring", "MEAN", True),
        ("gloo", "SUM", True),
        ("copy", "SUM", False),
    ]
    ring = of_all[1]
    assert ring.algbw_GBps == pytest.approx(MB / 1e9 / 100e-6)
    assert ring.busbw_GBps == pytest.approx(MB / 1e9 / 100e-6 * 1.5)
    assert (ring.copy_us, ring.wrong, ring.calls, ring.max_relative_error) == (80.0, 0, 20, 1e-7)
    assert (ring.count, ring.bytes_sent, ring.formula_bytes) == (MB // 4, 1.5 * MB, 1.5 * MB)
    assert (ring.time_us_low, ring.time_us_high) == (100.0, 100.0)
    assert of_all[4].wrong is None


def test_ratios_are_within_an_operation_and_a_place() -> None:
    asked = plan(ops=("SUM", "MEAN"), backends=("ring", "gloo", "copy"))
    out_of_place, in_place, mean = comparisons(asked, [measurement(MB, MEDIANS)])
    assert not out_of_place.in_place
    assert {name: ratio.value for name, ratio in out_of_place.ratios.items()} == {"ring_over_copy": 1.5}
    assert {name: ratio.value for name, ratio in in_place.ratios.items()} == {
        "gloo_over_ring": 9.0,
        "ring_over_copy": 1.25,
    }
    assert {name: ratio.value for name, ratio in mean.ratios.items()} == {
        "ring_over_copy": 1.375,
        "mean_over_sum": 1.1,
    }
    assert in_place.hop_ns == (0.4, 2.0, 3.6)


def test_without_the_ring_the_first_backend_is_what_others_are_compared_with() -> None:
    made = measurement(MB, {"gloo sum in": 300.0, "mpi sum in": 100.0})
    (only,) = comparisons(plan(backends=("gloo", "mpi", "copy")), [made])
    assert only.ratios["mpi_over_gloo"].value == pytest.approx(1 / 3)
    assert comparisons(plan(backends=("copy",)), [measurement(MB, {"copy sum out": 1.0})]) == []


def test_the_file_is_json_whatever_was_found() -> None:
    made = measurement(MB, MEDIANS, error=math.inf, wrong=1)
    nowhere = dataclasses.replace(made, hops_ns=np.full(5, math.nan))
    made_up = report(nowhere)
    written = json.loads(
        json.dumps(document(plan(), made_up, figures_of(plan(), made_up), 0.5), allow_nan=False)
    )
    assert set(written) == {"machine", "plan", "rows", "comparisons", "time_a_byte"}
    assert all(set(row) == ROW_KEYS for row in written["rows"])
    assert written["machine"]["load_at_start"] == 0.5
    assert written["plan"]["backends"] == ["ring", "gloo", "copy"]
    assert written["comparisons"][0]["hop_ns"] is None
    assert written["rows"][0]["max_relative_error"] is None


def test_processor_and_cache_are_told_or_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.processor_name()
    assert host.last_level_cache_bytes() > 0
    monkeypatch.setattr(
        host, "Path", lambda _: SimpleNamespace(glob=lambda _: iter(()), read_text=_unreadable)
    )
    assert host.last_level_cache_bytes(default=7) == 7
    assert host.processor_name() == platform.machine()


def _unreadable() -> str:
    raise OSError("no such file")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_show_the_committed_figures(document: str) -> None:
    text = (Path(__file__).parents[1] / document).read_text()
    for lines in tables(document):
        assert "\n".join(lines) in text


def test_the_readme_says_what_training_steps_gain() -> None:
    first, second = (line.split(" | ")[1].split()[0] for line in ddp_table("cpu-2-ranks-ddp"))
    text = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    assert f"took {first} and {second} times as long with DDP's own reducer on Gloo" in text


def test_the_committed_results_are_right() -> None:
    for path in RESULTS.glob("*.json"):
        assert all(not row["wrong"] for row in json.loads(path.read_text()).get("rows", ()))
