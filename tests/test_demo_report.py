"""What fails the demo, and what its JSON can hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import ring_reduce as rr
from ring_reduce.benchmarks.summary import Ratio
from ring_reduce.demo import report
from ring_reduce.demo.factors import Case, Loss, name_factor, predict_factor
from ring_reduce.demo.results import Duel, Result, Timings, Traffic, Training


def make_case(loss: Loss, normalization: rr.Normalization, factor: float, residual: float = 0.0) -> Case:
    counts = (16, 16)
    verdict = name_factor(factor, residual, world=2, global_batch=32)
    predicted = predict_factor(loss, normalization, counts)
    return Case(loss, repr(normalization), counts, factor, residual, predicted, verdict)


def make_result() -> Result:
    """A result in which everything is as it must be."""
    duel = Duel(1000, 10.0, 20.0, Ratio(2.0, 1.9, 2.1))
    cases = [make_case(Loss.GLOBAL, rr.SUM, 1.0), make_case(Loss.GLOBAL, rr.MEAN, 0.5)]
    return Result(
        transport="shm",
        parameters=250,
        training=Training([2.0, 1.0], 1, [0.9, 0.97], [1e-6]),
        equal_cases=cases,
        unequal_cases=[],
        traffic=Traffic(1000, [1008, 992]),
        timings=Timings(1000, [duel], [duel]),
    )


def test_a_result_as_it_must_be_has_no_failures() -> None:
    assert report.find_failures(make_result(), accuracy_counts=True) == []


def test_low_accuracy_fails_unless_it_does_not_count() -> None:
    result = replace(make_result(), training=Training([2.0], 1, [0.94], [1e-6]))
    assert "94.00%" in report.find_failures(result, accuracy_counts=True)[0]
    assert report.find_failures(result, accuracy_counts=False) == []


@pytest.mark.parametrize("error", [1e-3, math.inf])
def test_a_gradient_that_differs_fails(error: float) -> None:
    result = replace(make_result(), training=Training([2.0], 1, [0.97], [1e-6, error]))
    assert "differs" in report.find_failures(result, accuracy_counts=True)[0]


def test_a_training_that_diverged_is_still_json() -> None:
    result = replace(make_result(), training=Training([math.nan], 1, [0.1], [math.inf]))
    found = report.as_json(result, [], seconds=1.0)
    assert (found["losses"], found["max_relative_gradient_error"]) == ([None], None)
    json.dumps(found, allow_nan=False)


def test_a_wrong_verdict_fails() -> None:
    wrong = [
        make_case(Loss.GLOBAL, rr.SUM, 0.5),
        make_case(Loss.GLOBAL, rr.MEAN, 1.0),
        make_case(Loss.LOCAL_MEAN, rr.MEAN, 1.0, 0.1),
    ]
    failures = report.find_failures(replace(make_result(), equal_cases=wrong), accuracy_counts=True)
    assert len(failures) == 3
    assert "measured factor 0.5" in failures[0]
    assert "predicted factor 1" in failures[0]


def test_too_many_bytes_fail() -> None:
    result = replace(make_result(), traffic=Traffic(1000, [1000, 1065]))
    assert "[1000, 1065] bytes" in report.find_failures(result, accuracy_counts=True)[0]


@pytest.mark.parametrize("sent", [[229704, 229704, 229704, 229656], [229680, 229680, 229704, 229704]])
def test_bytes_of_both_algorithms_at_four_ranks(sent: list[int]) -> None:
    """Of the demo's network: directly, and round the ring."""
    traffic = Traffic(153128, sent)
    assert sum(sent) == 4 * traffic.formula
    assert traffic.worst_difference <= traffic.tolerance < 153128 / 4
