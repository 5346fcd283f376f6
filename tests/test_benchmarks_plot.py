"""The picture: a PNG, on log axes, with every backend in both panels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_cases import measurement, plan
from ring_reduce import cli
from ring_reduce.benchmarks.host import MB
from ring_reduce.benchmarks.report import Row, rows


def made_rows() -> list[Row]:
    medians = {
        "ring sum out": 7.0,
        "ring sum in": 5.0,
        "ring avg in": 6.0,
        "gloo sum in": 300.0,
        "copy sum out": 2.0,
    }
    larger = {name: 1000 * value for name, value in medians.items()}
    return rows(plan(world=4), [measurement(1024, medians), measurement(MB, larger)])


def test_both_panels_show_every_backend_against_size() -> None:
    from ring_reduce.benchmarks.plot import make_figure

    picture: Any = make_figure(made_rows(), "title")
    bandwidth, latency = picture.axes
    for axes in (bandwidth, latency):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1K", "1M"]
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    lines: dict[str, Any] = {str(line.get_label()): line for line in latency.get_lines()}
    assert list(lines) == ["ring sum", "ring avg", "gloo sum", "copy"]
    assert lines["ring sum"].get_xydata().tolist() == [[1024, 5.0], [MB, 5000.0]]
    assert lines["ring sum"].get_color() == lines["ring avg"].get_color() != lines["gloo sum"].get_color()
    assert lines["ring sum"].get_linestyle() != lines["ring avg"].get_linestyle()
    of_ring = bandwidth.get_lines()[0].get_xydata().tolist()
    assert of_ring[0] == [1024, pytest.approx(1024 / 1e9 / 5e-6 * 1.5)]
    (legend,) = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == list(lines)


def test_types_have_colours_of_their_own_and_the_copy_is_there_once() -> None:
    from ring_reduce.benchmarks.plot import make_figure

    medians = {"ring sum in": 5.0, "copy sum out": 2.0}
    made = [measurement(1024, medians, dtype=dtype) for dtype in ("float16", "float32")]
    panels: Any = make_figure(rows(plan(), made), "title").axes
    colours = {str(line.get_label()): line.get_color() for line in panels[1].get_lines()}
    assert list(colours) == ["ring half", "copy", "ring float"]
    assert len(set(colours.values())) == 3


def test_one_rank_has_a_bandwidth_too() -> None:
    from ring_reduce.benchmarks.plot import make_figure

    alone = rows(plan(world=1), [measurement(1024, {"ring sum in": 2.0})])
    bandwidth: Any = make_figure(alone, "title").axes[0]
    assert bandwidth.get_ylabel() == "bandwidth, GB/s"
    assert bandwidth.get_lines()[0].get_xydata().tolist() == [[1024, pytest.approx(0.512)]]


def test_it_is_a_png(tmp_path: Path) -> None:
    from ring_reduce.benchmarks.plot import write_plot

    path = tmp_path / "picture.png"
    write_plot(path, made_rows(), "title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "ring_reduce.benchmarks.plot", raising=False)
    monkeypatch.delattr("ring_reduce.benchmarks.plot", raising=False)
    monkeypatch.setattr("ring_reduce.benchmarks.launch.start", lambda *_: pytest.fail("measured"))
    assert cli.main(["bench", "--backend", "ring", "--plot", str(tmp_path / "picture.png")]) == 2
    assert capsys.readouterr().err == (
        "ring-reduce bench: the module matplotlib.figure is missing: pip install '.[bench]' in ring_reduce's source\n"
    )
