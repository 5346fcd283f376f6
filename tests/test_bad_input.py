"""Bad input: an error that says who, what and what to do, and nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import ring_reduce as rr
from cases import SMALL
from conftest import Run
from launch import Seat, caught

Call = tuple[str, int, str, Any]  # operation, elements, dtype, normalization


def reduce(elements: int = 1000, dtype: str = "float32", by: Any = rr.SUM) -> Call:
    return "all_reduce", elements, dtype, by


def scatter(elements: int, by: Any) -> Call:
    return "reduce_scatter", elements, "float32", by


# What differs: the call of the odd rank, that of all others, and what the text has to say of both.
BY_COUNT, BY_WEIGHT = reduce(by=rr.DIVIDE_BY_COUNT), reduce(by=rr.WEIGHTED_MEAN)
BY_256, BY_MORE = reduce(by=rr.divide_by(256)), reduce(by=rr.divide_by(math.nextafter(256, 300)))
FEW, MANY = scatter(1200, rr.MEAN), scatter(2400, rr.MEAN)
DISAGREEMENTS: dict[str, tuple[Call, Call, list[str]]] = {
    "size": (reduce(1001), reduce(), ["element count", "1001", "1000"]),
    "nothing": (reduce(0), reduce(), ["element count", " 0 ", "1000"]),
    "dtype": (reduce(dtype="int64"), reduce(), ["dtype", "int64", "float32"]),
    "dtype of equal size": (reduce(dtype="int32"), reduce(), ["dtype", "int32", "float32"]),
    "normalization": (reduce(by=rr.MEAN), reduce(), ["normalization", "MEAN", "SUM"]),
    "counts": (BY_WEIGHT, BY_COUNT, ["normalization", "WEIGHTED_MEAN", "DIVIDE_BY_COUNT"]),
    "divisor": (BY_MORE, BY_256, ["divisor", "256.00000000000006", " 256 "]),
    "operation": (scatter(1200, rr.SUM), reduce(1200), ["operation", "reduce_scatter", "all_reduce"]),
    "size of a reduce_scatter": (MANY, FEW, ["element count", "2400", "1200"]),
    "more lanes": (reduce(1 << 22), reduce(1 << 17), ["element count", "4194304", "131072"]),
}


def make_call(ring: rr.Ring, call: Call, out_of_place: bool, async_op: bool) -> tuple[Exception | None, bool]:
    """What the call raises, and whether all its tensors are as they were."""
    operation, size, dtype, normalization = call
    x = (np.arange(size) % 100 + ring.rank).astype(dtype)
    parts = ring.world if operation == "reduce_scatter" else 1
    out = np.full(size // parts, 77).astype(dtype) if out_of_place or parts > 1 else None
    tensors = [x] if out is None else [x, out]
    before = [tensor.tobytes() for tensor in tensors]
    count = 3 if normalization.uses_count else None

    def run() -> None:
        result = getattr(ring, operation)(x, normalization, out=out, count=count, async_op=async_op)
        if async_op:
            result.wait()

    error = caught(run)
    return error, before == [tensor.tobytes() for tensor in tensors]


# What a call raised, whether its tensors are unchanged, whether the ring is closed, what the next call raised, and why.
Outcome = tuple[Exception | None, bool, bool, Exception | None, Exception | None]


def outcome_of(ring: rr.Ring, call: Call, out_of_place: bool, async_op: bool) -> Outcome:
    error, unchanged = make_call(ring, call, out_of_place, async_op)
    later = caught(lambda: ring.all_reduce(np.ones(10)))
    return error, unchanged, ring.closed, later, ring.failure


def disagree(seat: Seat, what: str, odd: int, out_of_place: bool, async_op: bool) -> Outcome:
    theirs, ours, _ = DISAGREEMENTS[what]
    with seat.ring(lanes=2) as ring:
        for _ in range(2):
            ring.all_reduce(np.ones(10))  # a good start changes nothing
        seat.meet("started")
        return outcome_of(ring, theirs if seat.rank == odd else ours, out_of_place, async_op)


def assert_all_heard(results: list[Outcome], kind: type[Exception], texts: list[str]) -> None:
    """Every rank got the same error, which holds all texts; its tensors are unchanged and its ring is closed."""
    for error, unchanged, closed, later, failure in results:
        assert type(error) is kind, error
        assert str(error) == str(results[0][0])
        for text in texts:
            assert text in str(error)
        assert unchanged
        assert closed
        assert type(later) is kind
        assert str(later) == str(failure) == str(error)


@pytest.mark.parametrize("out_of_place", [False, True])
@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize(("world", "odd"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 2)])
def test_ranks_that_disagree(run: Run, world: int, odd: int, what: str, out_of_place: bool) -> None:
    results = run(world, disagree, what, odd, out_of_place, False)
    texts = [*DISAGREEMENTS[what][2], f"rank {odd}", "in call 3", "same calls", "No tensor was changed"]
    assert_all_heard(results, rr.RingMismatch, texts)


@pytest.mark.parametrize("what", ["size", "divisor", "more lanes"])
def test_ranks_that_disagree_asynchronously(run: Run, what: str) -> None:
    results = run(3, disagree, what, 1, True, True)
    assert_all_heard(results, rr.RingMismatch, [*DISAGREEMENTS[what][2], "rank 1"])


def all_differ(seat: Seat) -> Outcome:
    with seat.ring() as ring:
        return outcome_of(ring, reduce(100 + seat.rank), False, False)


def test_the_first_of_several_failures_is_what_all_hear(run: Run) -> None:
    for _ in range(10):
        assert_all_heard(run(4, all_differ), rr.RingMismatch, ["element count"])


def disagree_after_a_good_call(seat: Seat) -> tuple[Exception | None, Exception | None]:
    with seat.ring(**SMALL) as ring:
        x = np.ones(4000)
        good = caught(lambda: ring.all_reduce(x))
        assert good is not None or (x == seat.world).all()
        return good, caught(lambda: ring.all_reduce(np.ones(10 + (seat.rank == 2))))


def test_a_mismatch_leaves_the_calls_before_it_whole(run: Run) -> None:
    """A slow rank that is still in the call before gets all of it: the others have sent all their parts."""
    for _ in range(12):
        for good, bad in run(4, disagree_after_a_good_call):
            assert good is None
            assert type(bad) is rr.RingMismatch


# Calls that one rank alone makes: what they all raise, and what the text of each has to say.
F32, ONES, WEIGHTED = torch.ones(8), np.ones(8), rr.WEIGHTED_MEAN
READ_ONLY = np.frombuffer(bytes(64))
OVERLAPPING = np.lib.stride_tricks.as_strided(np.ones(8), (4, 4), (8, 8))
MISTAKES: dict[tuple[str, type[Exception]], list[tuple[Callable[[Any], Any], list[str]]]] = {
    ("tensors that no ring takes", TypeError): [
        (lambda ring: ring.all_reduce([1.0]), ["list", "convert"]),
        (lambda ring: ring.all_reduce(None), ["NoneType"]),
        (lambda ring: ring.all_reduce(torch.ones(3, dtype=torch.complex64)), ["complex64", "convert"]),
        (lambda ring: ring.all_reduce(torch.ones(3, dtype=torch.bool)), ["bool", "float32"]),
        (lambda ring: ring.all_reduce(torch.ones(3, dtype=torch.int16)), ["int16"]),
        (lambda ring: ring.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)), ["float8_e4m3fn"]),
        (lambda ring: ring.all_reduce(np.ones(3, np.uint32)), ["uint32"]),
        (lambda ring: ring.all_reduce(np.ones(3, np.longdouble)), ["float128", "float64"]),
        (lambda ring: ring.all_reduce(np.array(["a"])), ["str"]),
        (lambda ring: ring.all_reduce(np.ones(3, object)), ["object"]),
        (lambda ring: ring.all_reduce(np.ones(3, ">f4")), ["byte order", ">f4", "newbyteorder"]),
        (lambda ring: ring.all_reduce(torch.eye(3).to_sparse()), ["sparse_coo", "to_dense"]),
        (lambda ring: ring.all_reduce(torch.ones(3, device="meta")), ["meta", "cpu"]),
    ],
    ("tensors that cannot be written in place", ValueError): [
        (lambda ring: ring.all_reduce(torch.ones(1).expand(5)), ["share memory", "out="]),
        (lambda ring: ring.all_reduce(torch.ones(8).as_strided((4, 4), (1, 1))), ["share memory"]),
        (lambda ring: ring.all_reduce(OVERLAPPING), ["share memory", "(8, 8)"]),
        (lambda ring: ring.all_reduce(READ_ONLY), ["read-only", "out="]),
        (lambda ring: ring.all_reduce(np.broadcast_to(1.0, 5)), ["read-only"]),
    ],
    ("normalizations that do not fit", TypeError): [
        (lambda ring: ring.all_reduce(F32.int(), rr.MEAN), ["MEAN", "int32", "SUM"]),
        (lambda ring: ring.all_reduce(F32.long(), rr.divide_by(3)), ["divide_by(3)", "int64"]),
        (lambda ring: ring.all_reduce(F32.int(), WEIGHTED, count=3), ["WEIGHTED_MEAN", "int32"]),
        (lambda ring: ring.reduce_scatter(F32.int(), rr.MEAN), ["MEAN", "int32"]),
        (lambda ring: ring.all_reduce(F32, 8), ["8", "divide_by"]),
        (lambda ring: ring.all_reduce(F32, "MEAN"), ["'MEAN'", "WEIGHTED_MEAN"]),
        (lambda ring: ring.all_reduce(F32, rr.divide_by), ["normalization"]),
    ],
    ("divisors", ValueError): [
        (lambda ring: ring.all_reduce(F32, rr.divide_by(0)), ["0", "positive"]),
        (lambda ring: ring.all_reduce(F32, rr.divide_by(-4)), ["-4", "positive"]),
        (lambda ring: ring.all_reduce(F32, rr.divide_by(math.nan)), ["nan", "finite"]),
    ],
    ("counts", rr.CountError): [
        (lambda ring: ring.all_reduce(F32, rr.SUM, count=3), ["SUM", "count=3"]),
        (lambda ring: ring.all_reduce(F32, rr.MEAN, count=3), ["MEAN", "count=3"]),
        (lambda ring: ring.all_reduce(F32, WEIGHTED), ["WEIGHTED_MEAN", "count="]),
        (lambda ring: ring.all_reduce(F32, rr.DIVIDE_BY_COUNT), ["DIVIDE_BY_COUNT", "count="]),
        (lambda ring: ring.all_reduce(F32, WEIGHTED, count=-1), ["-1"]),
        (lambda ring: ring.all_reduce(F32, WEIGHTED, count=math.nan), ["nan"]),
        (lambda ring: ring.all_reduce(F32, WEIGHTED, count=math.inf), ["inf"]),
        (lambda ring: ring.all_reduce(F32, WEIGHTED, count=2**53 + 1), ["9007199254740993", "2**53"]),
        (lambda ring: ring.all_reduce(F32, WEIGHTED, count="3"), ["'3'"]),
        (lambda ring: ring.all_reduce(F32, WEIGHTED, count=[3]), ["[3]"]),
    ],
    ("out= of another type", TypeError): [
        (lambda ring: ring.all_reduce(F32, out=torch.ones(8).double()), ["float64", "float32"]),
        (lambda ring: ring.all_reduce(F32, out=np.ones(8, np.float32)), ["ndarray", "Tensor"]),
        (lambda ring: ring.all_reduce(F32, out=torch.ones(8, device="meta")), ["meta"]),
    ],
    ("out= of another shape or place", ValueError): [
        (lambda ring: ring.all_reduce(F32, out=torch.ones(7)), ["(7,)", "(8,)"]),
        (lambda ring: ring.all_reduce(F32, out=torch.ones(2, 4)), ["(2, 4)", "(8,)"]),
        (lambda ring: ring.all_reduce(F32, out=torch.ones(1).expand(8)), ["out", "share memory"]),
        (lambda ring: ring.all_reduce(ONES, out=READ_ONLY), ["out", "read-only"]),
        (lambda ring: ring.all_reduce(F32[:5], out=F32[3:]), ["overlaps"]),
        (lambda ring: ring.all_reduce(ONES[:5], out=ONES[3:]), ["overlaps"]),
        (lambda ring: ring.all_reduce(ONES[::-1], out=ONES), ["overlaps"]),
        (lambda ring: ring.reduce_scatter(F32[:6], out=F32[3:5]), ["overlaps"]),
        (lambda ring: ring.all_gather(F32[:1], out=F32[:3]), ["overlaps"]),
    ],
}


def make_mistakes(seat: Seat, what: tuple[str, type[Exception]]) -> tuple[list[str], list[float]]:
    """What was wrong with the errors, on the last rank; then a call of all ranks."""
    ring = seat.kept_ring(**SMALL)
    wrong = []
    for number, (call, texts) in enumerate(MISTAKES[what] if seat.rank == seat.world - 1 else []):
        error = caught(partial(call, ring))
        if type(error) is not what[1] or not all(text in str(error) for text in texts):
            wrong.append(f"mistake {number}: {error!r}; not {what[1].__name__}, {texts}")
    result: list[float] = ring.all_reduce(np.arange(5.0)).tolist()
    return wrong, result


@pytest.mark.parametrize("what", MISTAKES, ids=lambda what: what[0])
def test_mistakes_of_one_rank_leave_the_ring_as_it_was(run: Run, what: tuple[str, type[Exception]]) -> None:
    for wrong, result in run(3, make_mistakes, what):
        assert wrong == []
        assert result == [0.0, 3.0, 6.0, 9.0, 12.0]


def mistakes_lose_nothing(seat: Seat) -> None:
    """The tensors of refused calls are as they were, and asynchronous calls are refused at once."""
    ring: Any = seat.kept_ring(**SMALL)
    x, out = np.arange(8.0), np.arange(8.0) + 100
    for options in ({"count": 3}, {"normalization": 3}, {"out": out[:5]}, {"out": x[::-1]}):
        assert caught(partial(ring.all_reduce, x, **options)) is not None
        assert caught(partial(ring.all_reduce, x, **options, async_op=True)) is not None
    assert x.tolist() == list(range(8))
    assert out.tolist() == list(range(100, 108))
    assert ring.all_reduce(x).tolist() == [2.0 * v for v in range(8)]


def test_refused_calls_lose_nothing(run: Run) -> None:
    run(2, mistakes_lose_nothing)


def after_close(seat: Seat) -> list[Exception | None]:
    ring = seat.ring()
    ring.all_reduce(np.ones(3))
    ring.close()
    ring.close()
    assert ring.closed
    assert ring.failure is None
    assert ring.stats.calls == 1
    assert "closed" in repr(ring)
    x = np.ones(3)
    errors = [caught(partial(call, x)) for call in (ring.all_reduce, ring.all_gather)]
    errors += [caught(lambda: ring.all_reduce(x, async_op=True)), caught(ring.check)]
    ring.abort("too late")
    assert x.tolist() == [1.0] * 3
    return errors


def test_calls_after_close(run: Run) -> None:
    for rank, errors in enumerate(run(2, after_close)):
        for error in errors:
            assert type(error) is rr.RingClosed
            assert f"rank {rank}" in str(error)
            assert "make a new one" in str(error)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 0, "world": 0}, "world >= 1"),
        ({"rank": 2, "world": 2}, "rank 2 of a world of 2"),
        ({"rank": -1, "world": 2}, "rank -1"),
        ({"rank": 0, "world": 1, "lanes": 0}, "lanes=0"),
        ({"rank": 0, "world": 1, "timeout": 0}, "timeout is 0"),
        ({"rank": 0, "world": 1, "timeout": -1.0}, "timeout is -1.0"),
        ({"rank": 0, "world": 1, "timeout": math.nan}, "timeout is nan"),
        ({"rank": 0, "world": 1, "timeout": math.inf}, "timeout is inf"),
        ({"rank": 0, "world": 2}, "needs a store"),
    ],
)
def test_a_ring_of_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    error = caught(lambda: rr.Ring(**arguments))
    assert isinstance(error, ValueError)
    assert text in str(error)


def test_a_timeout_of_the_environment_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_REDUCE_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="RING_REDUCE_TIMEOUT is 'soon'"):
        rr.Ring(rank=0, world=1)
    monkeypatch.setenv("RING_REDUCE_TIMEOUT", "12.5")
    with rr.Ring(rank=0, world=1) as ring:
        assert ring.timeout == 12.5
    with rr.Ring(rank=0, world=1, timeout=7) as ring:
        assert ring.timeout == 7
