"""What people read of the benchmark, to the letter, on made-up measurements."""

from __future__ import annotations

import math

import pytest

from benchmark_cases import measurement, plan, report
from ring_reduce.benchmarks.host import MB
from ring_reduce.benchmarks.measurement import Report
from ring_reduce.benchmarks.plan import Plan
from ring_reduce.benchmarks.report import figures_of
from ring_reduce.benchmarks.summary import Ratio
from ring_reduce.benchmarks.table import figure, heading, ratio_text, table

MACHINE = {"processor": "A processor", "cores": 2, "last_level_cache_bytes": 32 * MB, "torch": "2.6.0"}
FULL = """\
#
# ring
#                                                     out-of-place                                   in-place
#      size      count     type redop    time  algbw  busbw #wrong     min     p99    time  algbw  busbw #wrong     min     p99    error       sent  2(n-1)s/n
#       (B) (elements)                   (us) (GB/s) (GB/s)           (us)    (us)    (us) (GB/s) (GB/s)           (us)    (us)                 (B)        (B)
       1024        256    float   sum    5.25   0.20   0.29      0    5.25    5.25    5.00   0.20   0.31      0    5.00    5.00  6.0e-08       1536       1536
       1024        256    float   avg       -      -      -      -       -       -    5.10   0.20   0.30      0    5.10    5.10  6.0e-08       1536       1536
   67108864   16777216    float   sum   12000   5.59   8.39      3   12000   12000   11000   6.10   9.15      3   11000   11000  5.0e-01          -  100663296
# Out of bounds values : 6 FAILED
# Avg bus bandwidth    : 3.6881
#
# gloo
#                                                     out-of-place                                   in-place
#      size      count     type redop    time  algbw  busbw #wrong     min     p99    time  algbw  busbw #wrong     min     p99    error       sent  2(n-1)s/n
#       (B) (elements)                   (us) (GB/s) (GB/s)           (us)    (us)    (us) (GB/s) (GB/s)           (us)    (us)                 (B)        (B)
       1024        256    float   sum       -      -      -      -       -       -  1234.5   0.00   0.00      0  1234.5  1234.5  6.0e-08       1536       1536
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.00124423
#
# Compared: ratios of medians with their 95 % interval; ? where the spread leaves nothing to compare. Of ring/copy less is better, of X/ring more.
#      size     type redop place       hop     copy             ring/copy               avg/sum             gloo/ring
#       (B)                           (ns)     (us)
       1024    float   sum   out       0-4     2.00     2.62 [2.62, 2.62]                     -                     -
       1024    float   sum    in       0-4     2.00        2.5 [2.5, 2.5]                     -        247 [247, 247]
       1024    float   avg    in       0-4     2.00     2.55 [2.55, 2.55]     1.02 [1.02, 1.02]                     -
   67108864    float   sum   out       0-4    10000        1.2 [1.2, 1.2]                     -                     -
   67108864    float   sum    in       0-4    10000        1.1 [1.1, 1.1]                     -                     -\
"""  # noqa: E501


def test_the_whole_table() -> None:
    asked = plan(world=4, ops=("SUM", "MEAN"))
    small = {
        "ring sum out": 5.25,
        "ring sum in": 5.0,
        "ring avg in": 5.1,
        "gloo sum in": 1234.5,
        "copy sum out": 2.0,
    }
    large = {"ring sum out": 12000.4, "ring sum in": 11000.0, "copy sum out": 10000.0}
    made = report(measurement(1024, small, sent=1536), measurement(64 * MB, large, wrong=3, error=0.5))
    assert "\n".join(table(asked, figures_of(asked, made))) == FULL


def test_no_line_of_figures_is_wider_than_a_wide_terminal() -> None:
    assert max(map(len, FULL.splitlines())) <= 160


def test_integers_have_no_error_and_what_a_backend_does_not_reduce_is_told() -> None:
    asked = plan(dtypes=("float32", "int32"), backends=("ring", "mpi", "copy"))
    made = measurement(1024, {"ring sum in": 1.0}, dtype="int32", error=None, sent=1024)
    lines = table(asked, figures_of(asked, report(made)))
    (line,) = [line for line in lines if not line.startswith("#") and "0.0" not in line.split()[0]][:1]
    assert line.split()[:4] == ["1024", "256", "int32", "sum"]
    assert line.split()[-3:] == ["-", "1024", "1024"]
    assert "# ring does not reduce float" in lines
    assert lines[lines.index("# mpi") + 1] == "# mpi does not reduce float, int32"


def test_integers_that_were_asked_for_a_mean_only_are_not_called_irreducible() -> None:
    asked = plan(dtypes=("float32", "int32"), ops=("MEAN",), backends=("ring", "copy"))
    lines = table(asked, figures_of(asked, report(measurement(1024, {"ring avg in": 1.0}))))
    assert not any("does not reduce" in line for line in lines)


def test_a_name_of_the_users_own_may_look_like_a_ratio() -> None:
    name = "my_over_module:One_over_N"
    for backends in (("ring", name, "copy"), (name, "gloo", "copy")):
        asked = plan(backends=backends)
        times = {f"{each} sum in": 2.0 for each in backends[:2]} | {"copy sum out": 1.0}
        titles = [
            line.split()
            for line in table(asked, figures_of(asked, report(measurement(1024, times))))
            if "hop" in line
        ]
        base, other = backends[:2]
        assert [words[-2:] for words in titles] == [[f"{base}/copy", f"{other}/{base}"]]


def test_heading_names_machine_calls_and_several_hosts() -> None:
    asked = Plan(world=2, sizes=(1024, 64 * MB), rotate_bytes=64 * MB)
    first, second, third = heading(asked, Report([], one_host=False), MACHINE, 0.25)
    assert first == (
        "# ring-reduce bench: 2 ranks on cpu: A processor, 2 cores, last-level cache 32M, load 0.25; torch 2.6.0"
    )
    assert second == "# 40 to 1600 calls of each, interleaved; buffers rotated over 64M a rank"
    assert "through the store" in third
    assert len(heading(asked, Report([], one_host=True), MACHINE, 0.25)) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.004, "0.00"), (999.5, "999.50"), (1234.56, "1234.6"), (123456.7, "123457")],
)
def test_figures_fit_their_columns(value: float | None, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "-"),
        (Ratio(1.0, 0.9, 1.1), "1 [0.9, 1.1]"),
        (Ratio(2.0, 1.0, 3.1), "2? [1, 3.1]"),
        (Ratio(1234.4, 1100.0, 1300.0), "1234 [1100, 1300]"),
        (Ratio(2.0, math.nan, math.nan), "2? [-, -]"),
    ],
)
def test_ratios_that_say_nothing_are_marked(ratio: Ratio | None, text: str) -> None:
    assert ratio_text(ratio) == text
