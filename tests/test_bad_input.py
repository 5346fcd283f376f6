"""Bad input: an error that says who, what and what to do, and nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from cases import SMALL
from conftest import Run
from launch import Seat, caught

# What differs: the call of the odd rank, that of all others, and what the text has to say of both.
Call = tuple[str, int, str, Any]  # operation, elements, dtype, normalization
PLAIN: Call = ("all_reduce", 1000, "float32", rr.SUM)
DISAGREEMENTS: dict[str, tuple[Call, Call, list[str]]] = {
    "size": (("all_reduce", 1001, "float32", rr.SUM), PLAIN, ["element count", "1001", "1000"]),
    "nothing": (("all_reduce", 0, "float32", rr.SUM), PLAIN, ["element count", " 0 ", "1000"]),
    "dtype": (("all_reduce", 1000, "int64", rr.SUM), PLAIN, ["dtype", "int64", "float32"]),
    "dtype of equal size": (("all_reduce", 1000, "int32", rr.SUM), PLAIN, ["dtype", "int32", "float32"]),
    "normalization": (
        ("all_reduce", 1000, "float32", rr.MEAN),
        PLAIN,
        ["normalization", "MEAN", "SUM"],
    ),
    "counts": (
        ("all_reduce", 1000, "float32", rr.WEIGHTED_MEAN),
        ("all_reduce", 1000, "float32", rr.DIVIDE_BY_COUNT),
        ["normalization", "WEIGHTED_MEAN", "DIVIDE_BY_COUNT"],
    ),
    "divisor": (
        ("all_reduce", 1000, "float32", rr.divide_by(math.nextafter(256, 300))),
        ("all_reduce", 1000, "float32", rr.divide_by(256)),
        ["divisor", "256.00000000000006", " 256 "],
    ),
    "operation": (
        ("reduce_scatter", 1200, "float32", rr.SUM),
        ("all_reduce", 1200, "float32", rr.SUM),
        ["operation", "reduce_scatter", "all_reduce"],
    ),
    "size of a reduce_scatter": (
        ("reduce_scatter", 2400, "float32", rr.MEAN),
        ("reduce_scatter", 1200, "float32", rr.MEAN),
        ["element count", "2400", "1200"],
    ),
    "more lanes": (
        ("all_reduce", 1 << 22, "float32", rr.SUM),
        ("all_reduce", 1 << 17, "float32", rr.SUM),
        ["element count", "4194304", "131072"],
    ),
}


def make_call(ring: rr.Ring, call: Call, out_of_place: bool, async_op: bool) -> tuple[Exception | None, bool]:
    """What the call raises, and whether all its tensors are as they were."""
    operation, size, dtype, normalization = call
    x = (np.arange(size) % 100 + ring.rank).astype(dtype)
    out = None
    if operation == "reduce_scatter":
        out = np.full(size // ring.world, 77).astype(dtype)
    elif out_of_place:
        out = np.full(size, 77).astype(dtype)
    tensors = [x] if out is None else [x, out]
    before = [tensor.tobytes() for tensor in tensors]
    count = 3 if normalization.uses_count else None

    def run() -> None:
        result = getattr(ring, operation)(x, normalization, out=out, count=count, async_op=async_op)
        if async_op:
            result.wait()

    error = caught(run)
    return error, before == [tensor.tobytes() for tensor in tensors]


def disagree(
    seat: Seat, what: str, odd: int, out_of_place: bool, async_op: bool
) -> tuple[Exception | None, bool, bool, Exception | None, Exception | None]:
    theirs, ours, _ = DISAGREEMENTS[what]
    with seat.ring(lanes=2) as ring:
        for _ in range(2):
            ring.all_reduce(np.ones(10))  # a good start changes nothing
        seat.meet("started")
        error, unchanged = make_call(ring, theirs if seat.rank == odd else ours, out_of_place, async_op)
        later = caught(lambda: ring.all_reduce(np.ones(10)))
        return error, unchanged, ring.closed, later, ring.failure


def assert_all_heard(results: list[Any], kind: type[Exception], texts: list[str]) -> None:
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


def all_differ(seat: Seat) -> tuple[Exception | None, bool, bool, Exception | None, Exception | None]:
    with seat.ring() as ring:
        error, unchanged = make_call(ring, ("all_reduce", 100 + seat.rank, "float32", rr.SUM), False, False)
        later = caught(lambda: ring.all_reduce(np.ones(10)))
        return error, unchanged, ring.closed, later, ring.failure


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


def local_mistakes(ring: Any) -> list[tuple[Callable[[], Any], type[Exception], list[str]]]:
    """Calls that this rank alone makes, the error, and what its text has to say."""
    import torch

    f32, strided = torch.ones(8), np.lib.stride_tricks.as_strided
    count, ones = rr.WEIGHTED_MEAN, np.ones(8)
    read_only = np.ones(8)
    read_only.flags.writeable = False
    overlapping = strided(np.ones(8), (4, 4), (8, 8))
    return [
        (lambda: ring.all_reduce([1.0]), TypeError, ["list", "convert"]),
        (lambda: ring.all_reduce(None), TypeError, ["NoneType"]),
        (lambda: ring.all_reduce(torch.ones(3, dtype=torch.complex64)), TypeError, ["complex64", "convert"]),
        (lambda: ring.all_reduce(torch.ones(3, dtype=torch.bool)), TypeError, ["bool", "float32"]),
        (lambda: ring.all_reduce(torch.ones(3, dtype=torch.int16)), TypeError, ["int16"]),
        (lambda: ring.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)), TypeError, ["float8_e4m3fn"]),
        (lambda: ring.all_reduce(np.ones(3, np.uint32)), TypeError, ["uint32"]),
        (lambda: ring.all_reduce(np.ones(3, np.longdouble)), TypeError, ["float128", "float64"]),
        (lambda: ring.all_reduce(np.array(["a"])), TypeError, ["str"]),
        (lambda: ring.all_reduce(np.ones(3, object)), TypeError, ["object"]),
        (lambda: ring.all_reduce(np.ones(3, ">f4")), TypeError, ["byte order", ">f4", "newbyteorder"]),
        (lambda: ring.all_reduce(torch.eye(3).to_sparse()), TypeError, ["sparse_coo", "to_dense"]),
        (lambda: ring.all_reduce(torch.ones(3, device="meta")), TypeError, ["meta", "cpu"]),
        (lambda: ring.all_reduce(torch.ones(1).expand(5)), ValueError, ["share memory", "out="]),
        (lambda: ring.all_reduce(torch.ones(8).as_strided((4, 4), (1, 1))), ValueError, ["share memory"]),
        (lambda: ring.all_reduce(overlapping), ValueError, ["share memory", "(8, 8)"]),
        (lambda: ring.all_reduce(read_only), ValueError, ["read-only", "out="]),
        (lambda: ring.all_reduce(np.broadcast_to(1.0, 5)), ValueError, ["read-only"]),
        (lambda: ring.all_reduce(f32.int(), rr.MEAN), TypeError, ["MEAN", "int32", "SUM"]),
        (lambda: ring.all_reduce(f32.long(), rr.divide_by(3)), TypeError, ["divide_by(3)", "int64"]),
        (lambda: ring.all_reduce(f32.int(), count, count=3), TypeError, ["WEIGHTED_MEAN", "int32"]),
        (lambda: ring.reduce_scatter(f32.int(), rr.MEAN), TypeError, ["MEAN", "int32"]),
        (lambda: ring.all_reduce(f32, 8), TypeError, ["8", "divide_by"]),
        (lambda: ring.all_reduce(f32, "MEAN"), TypeError, ["'MEAN'", "WEIGHTED_MEAN"]),
        (lambda: ring.all_reduce(f32, rr.divide_by), TypeError, ["normalization"]),
        (lambda: ring.all_reduce(f32, rr.divide_by(0)), ValueError, ["0", "positive"]),
        (lambda: ring.all_reduce(f32, rr.divide_by(-4)), ValueError, ["-4", "positive"]),
        (lambda: ring.all_reduce(f32, rr.divide_by(math.nan)), ValueError, ["nan", "finite"]),
        (lambda: ring.all_reduce(f32, count), rr.CountError, ["WEIGHTED_MEAN", "count="]),
        (lambda: ring.all_reduce(f32, rr.DIVIDE_BY_COUNT), rr.CountError, ["DIVIDE_BY_COUNT", "count="]),
        (lambda: ring.all_reduce(f32, count, count=-1), rr.CountError, ["-1"]),
        (lambda: ring.all_reduce(f32, count, count=math.nan), rr.CountError, ["nan"]),
        (lambda: ring.all_reduce(f32, count, count=math.inf), rr.CountError, ["inf"]),
        (lambda: ring.all_reduce(f32, count, count=2**53 + 1), rr.CountError, ["9007199254740993", "2**53"]),
        (lambda: ring.all_reduce(f32, count, count="3"), rr.CountError, ["'3'"]),
        (lambda: ring.all_reduce(f32, count, count=[3]), rr.CountError, ["[3]"]),
        (lambda: ring.all_reduce(f32, rr.SUM, count=3), ValueError, ["SUM", "count=3"]),
        (lambda: ring.all_reduce(f32, rr.MEAN, count=3), ValueError, ["MEAN", "count=3"]),
        (lambda: ring.all_reduce(f32, out=torch.ones(7)), ValueError, ["(7,)", "(8,)"]),
        (lambda: ring.all_reduce(f32, out=torch.ones(2, 4)), ValueError, ["(2, 4)", "(8,)"]),
        (lambda: ring.all_reduce(f32, out=torch.ones(8).double()), TypeError, ["float64", "float32"]),
        (lambda: ring.all_reduce(f32, out=np.ones(8, np.float32)), TypeError, ["ndarray", "Tensor"]),
        (lambda: ring.all_reduce(f32, out=torch.ones(1).expand(8)), ValueError, ["out", "share memory"]),
        (lambda: ring.all_reduce(f32, out=torch.ones(8, device="meta")), TypeError, ["meta"]),
        (lambda: ring.all_reduce(ones, out=read_only), ValueError, ["out", "read-only"]),
        (lambda: ring.all_reduce(f32[:5], out=f32[3:]), ValueError, ["overlaps"]),
        (lambda: ring.all_reduce(ones[:5], out=ones[3:]), ValueError, ["overlaps"]),
        (lambda: ring.all_reduce(ones[::-1], out=ones), ValueError, ["overlaps"]),
        (lambda: ring.reduce_scatter(f32[:6], out=f32[3:5]), ValueError, ["overlaps"]),
        (lambda: ring.all_gather(f32[:1], out=f32[:3]), ValueError, ["overlaps"]),
    ]


def make_local_mistakes(seat: Seat, async_op: bool) -> tuple[list[str], list[float]]:
    """What was wrong with the errors, on the last rank; then a call of all ranks."""
    ring = seat.kept_ring(**SMALL)
    wrong = []
    if seat.rank == seat.world - 1:
        for number, (call, kind, texts) in enumerate(local_mistakes(ring)):
            error = caught(call)
            if type(error) is not kind or not all(text in str(error) for text in texts):
                wrong.append(
                    f"mistake {number}: {type(error).__name__}: {error}; not {kind.__name__}, {texts}"
                )
    result: list[float] = ring.all_reduce(np.arange(5.0)).tolist()
    return wrong, result


def test_mistakes_of_one_rank_leave_the_ring_as_it_was(run: Run) -> None:
    for wrong, result in run(3, make_local_mistakes, False):
        assert wrong == []
        assert result == [0.0, 3.0, 6.0, 9.0, 12.0]


def mistakes_lose_nothing(seat: Seat) -> None:
    """The tensors of refused calls are as they were, and asynchronous calls are refused at once."""
    ring: Any = seat.kept_ring(**SMALL)
    x, out = np.arange(8.0), np.arange(8.0) + 100
    mistakes: list[dict[str, Any]] = [{"count": 3}, {"normalization": 3}, {"out": out[:5]}, {"out": x[::-1]}]
    for options in mistakes:
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
    errors = [
        caught(call)
        for call in (
            lambda: ring.all_reduce(x),
            lambda: ring.all_reduce(x, async_op=True),
            lambda: ring.all_gather(x),
            ring.check,
        )
    ]
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
