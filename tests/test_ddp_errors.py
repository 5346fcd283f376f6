"""Errors of the DDP hook: each ends the step on every rank, with the same text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import ring_reduce as rr
from conftest import Run
from ddp_cases import Step, assert_gradients, examples, make_model, quotient, summed, taken
from ddp_helpers import group
from launch import Seat, caught
from ring_reduce.normalization import Normalization

# Of a rank that hears of another's failure: before its call, or in it, when torch wraps it.
STOPPED = {"RingAborted", "RuntimeError"}

# One rank's outcome: what it raised, as type and text, and why its ring failed.
Outcome = tuple[str, str, str]


def outcome(error: Exception | None, ring: rr.Ring) -> Outcome:
    return type(error).__name__, str(error), f"{type(ring.failure).__name__}: {ring.failure}"


def backward(model: Any, rank: int, step: int = 0) -> None:
    model.zero_grad()
    model(examples(rank, step, 4)).sum().backward()


def assert_same_end(outcomes: list[Outcome], culprit: int, kind: str, text: str) -> None:
    """The culprit raises ``kind``, the others what ended them; all carry the text, and the rings one reason."""
    assert len({failure for _, _, failure in outcomes}) == 1, outcomes
    for rank, (name, said, failure) in enumerate(outcomes):
        assert name in ({kind} if rank == culprit else STOPPED), outcomes
        assert text in said, f"rank {rank} raised {said}"
        assert text in failure
        assert failure.startswith(f"RingAborted: rank {culprit} aborted the ring")


def missing_count(seat: Seat, normalization: Normalization, culprit: int, good_steps: int) -> Outcome:
    """The culprit adds no count after some steps that went well."""
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, normalization)
        for step in range(good_steps):
            state.add_count(4)
            backward(model, seat.rank, step)
        seat.meet("good steps")  # or the culprit would end the last of them where it is still on its way
        if seat.rank != culprit:
            state.add_count(4)
        return outcome(caught(partial(backward, model, seat.rank)), ring)


@pytest.mark.parametrize(("world", "culprit"), [(1, 0), (2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("good_steps", [0, 2], ids=["at the start", "with several buckets"])
def test_a_missing_count_ends_the_step_on_every_rank(
    run: Run, world: int, culprit: int, good_steps: int
) -> None:
    outcomes = run(world, missing_count, rr.DIVIDE_BY_COUNT, culprit, good_steps)
    why = "the last one was used by the backward before" if good_steps else "none was added yet"
    text = f"rank {culprit}: a backward under DIVIDE_BY_COUNT has no count ({why}); call state.add_count("
    assert_same_end(outcomes, culprit, "CountError", text)


def count_used_twice(seat: Seat) -> tuple[Outcome, Any]:
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, rr.WEIGHTED_MEAN)
        state.add_count(4)
        backward(model, seat.rank)
        last = taken(model, state).last
        seat.meet("first backward")
        return outcome(caught(partial(backward, model, seat.rank, 1)), ring), last


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_count_serves_one_backward(run: Run, world: int) -> None:
    failures = set()
    for (kind, text, failure), last in run(world, count_used_twice):
        assert last == (4.0 * world, 4.0 * world, 1), "the first backward went well"
        assert kind == "CountError"  # each finds its own before it hears of another's
        assert "WEIGHTED_MEAN has no count (the last one was used by the backward before)" in text
        assert "the last one was used by the backward before" in failure
        failures.add(failure)
    assert len(failures) == 1


BAD_COUNTS: list[tuple[Any, str]] = [
    (float("nan"), "count is nan; it has to be a finite number, 0 or more"),
    (-1, "count is -1; it has to be a finite number, 0 or more"),
    (-0.5, "count is -0.5; it has to be a finite number, 0 or more"),
    (float("inf"), "count is inf; it has to be a finite number, 0 or more"),
    ("3", "count is '3'; it has to be a finite number, 0 or more"),
    (True, "count is True; it has to be a finite number, 0 or more"),
    (2**53 + 1, "count is 9007199254740993; counts go up to 2**53"),
    ([1, 2], "count is [1, 2]; it has to be a finite number, 0 or more"),
    (None, "pass count=, this rank's examples or tokens"),
    (torch.tensor([1, 2]), "count is tensor([1, 2]); it has to be one number"),
    (torch.tensor(float("nan")), "count is tensor(nan); it has to be a finite number"),
]


def bad_counts(seat: Seat) -> list[tuple[Outcome, Outcome]]:
    """Rank 1 adds each bad count, on a ring and a model of its own. What add_count and the backward after it raise."""
    seen = []
    with group(seat):
        for i, (count, _) in enumerate(BAD_COUNTS):
            with rr.Ring.from_group(name=f"bad {i}", timeout=60) as ring:
                model = make_model()
                state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
                added = caught(partial(state.add_count, 4 if seat.rank == 0 else count))
                first = outcome(added, ring)
                seen.append((first, outcome(caught(partial(backward, model, seat.rank)), ring)))
    return seen


def test_a_bad_count_ends_the_ring_on_every_rank(run: Run) -> None:
    good, bad = run(2, bad_counts)
    for (count, text), (added, stopped), (refused, after) in zip(BAD_COUNTS, good, bad, strict=True):
        assert added[:2] == ("NoneType", "None"), f"rank 0 added its own count, beside {count!r}"
        assert refused[0] == "CountError", repr(count)
        assert text in refused[1]
        assert stopped[0] in STOPPED
        for part in (text, "rank 1 aborted the ring: CountError"):
            assert part in stopped[1], f"{count!r}: rank 0 raised {stopped[1]}"
        assert {stopped[2], refused[2], after[2]} == {
            f"RingAborted: rank 1 aborted the ring: CountError: {refused[1]}"
        }
        assert after[0] in {"CountError", *STOPPED}, "rank 1 can't go on either"


def counts_that_nobody_uses(seat: Seat) -> list[tuple[Outcome, Step]]:
    seen = []
    with group(seat) as ring:
        for normalization in (rr.SUM, rr.MEAN, rr.divide_by(8)):
            model = make_model()
            state = rr.attach(model, ring, normalization)
            refused = outcome(caught(partial(state.add_count, 4)), ring)
            backward(model, seat.rank)
            seen.append((refused, taken(model, state)))
    return seen


def test_a_count_that_is_not_used_is_refused_and_the_ring_goes_on(run: Run) -> None:
    sums = summed(examples(rank, 0, 4, torch.float64).sum(0) for rank in range(2))
    for seen in run(2, counts_that_nobody_uses):
        for ((kind, text, failure), step), (name, divisor) in zip(
            seen, [("SUM", 1), ("MEAN", 2), ("divide_by(8)", 8)], strict=True
        ):
            assert kind == "CountError"
            assert f"{name} uses no count" in text
            assert failure == "NoneType: None"
            assert_gradients(step, quotient(sums, divisor), name)


def forward_that_fails(seat: Seat) -> Outcome:
    """Rank 1's exception leaves ``with Ring`` while rank 0 reduces."""
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
        state.add_count(4)

        def step() -> None:
            with ring:
                if seat.rank == 1:
                    raise OSError("no such image: 17.png")
                seen.append(caught(partial(backward, model, seat.rank)))

        seen: list[Exception | None] = []
        error = caught(step)
        return outcome(seen[0] if seen else error, ring)


def test_an_exception_in_one_forward_ends_the_others_backward(run: Run) -> None:
    (kind, text, _), (own_kind, own_text, _) = run(2, forward_that_fails)
    assert (own_kind, own_text) == ("OSError", "no such image: 17.png")
    assert kind in STOPPED
    assert "rank 1 aborted the ring: OSError: no such image: 17.png" in text


def stale_count(seat: Seat, reset: bool) -> Step:
    """Rank 1's first forward fails after its count was added; the step is made again with another batch."""
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)

        def fail() -> None:
            state.add_count(100)
            raise ValueError("a batch of the wrong shape")

        if seat.rank == 1:
            assert isinstance(caught(fail), ValueError)
            if reset:
                state.reset()
        state.add_count(4)
        backward(model, seat.rank)
        return taken(model, state)


@pytest.mark.parametrize(("reset", "total"), [(True, 8), (False, 108)])
def test_reset_drops_the_count_of_a_failed_forward(run: Run, reset: bool, total: int) -> None:
    sums = summed(examples(rank, 0, 4, torch.float64).sum(0) for rank in range(2))
    for step in run(2, stale_count, reset):
        assert step.last == (total, total, 1)
        assert_gradients(step, quotient(sums, total), f"reset={reset}")


def reset_and_no_count(seat: Seat) -> Outcome:
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
        state.add_count(4)
        state.reset()
        return outcome(caught(partial(backward, model, seat.rank)), ring)


def test_after_reset_a_count_is_needed(run: Run) -> None:
    for kind, text, _ in run(2, reset_and_no_count):
        assert kind == "CountError"
        assert "none was added yet" in text


def different_normalizations(seat: Seat, normalizations: list[Normalization]) -> Outcome:
    with group(seat) as ring:
        model = make_model()
        state = rr.attach(model, ring, normalizations[seat.rank])
        if state.normalization.uses_count:
            state.add_count(4)
        return outcome(caught(partial(backward, model, seat.rank)), ring)


@pytest.mark.parametrize(
    "normalizations",
    [
        [rr.SUM, rr.MEAN],
        [rr.DIVIDE_BY_COUNT, rr.WEIGHTED_MEAN],
        [rr.divide_by(8), rr.divide_by(16)],
        [rr.MEAN, rr.MEAN, rr.WEIGHTED_MEAN, rr.MEAN],
    ],
    ids=repr,
)
def test_ranks_that_divide_differently(run: Run, normalizations: list[Normalization]) -> None:
    outcomes = run(len(normalizations), different_normalizations, normalizations)
    assert len({failure for _, _, failure in outcomes}) == 1
    for kind, text, failure in outcomes:
        assert kind in {"RingMismatch", "RuntimeError"}
        assert failure.startswith("RingMismatch: ")
        assert failure.removeprefix("RingMismatch: ") in text
        for normalization in normalizations:
            assert repr(normalization) in failure


def no_hook_after(seat: Seat, end: Callable[[rr.Ring], None]) -> tuple[Outcome, bool]:
    with group(seat) as ring:
        model = make_model()
        rr.attach(model, ring, rr.MEAN)
        backward(model, seat.rank)
        seat.meet("trained")
        end(ring)
        seat.meet("ended")
        return outcome(caught(partial(backward, model, seat.rank, 1)), ring), ring.closed


def close(ring: rr.Ring) -> None:
    ring.close()


def abort(ring: rr.Ring) -> None:
    ring.abort("the loss is 1e30")


@pytest.mark.parametrize(
    ("end", "kinds", "text"),
    [(close, {"RingClosed"}, "closed"), (abort, STOPPED, "aborted the ring: the loss is 1e30")],
    ids=["closed", "aborted"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_after_the_ring_has_ended(
    run: Run, world: int, end: Callable[[rr.Ring], None], kinds: set[str], text: str
) -> None:
    for (kind, said, _), closed in run(world, no_hook_after, end):
        assert kind in kinds
        assert text in said
        assert closed
