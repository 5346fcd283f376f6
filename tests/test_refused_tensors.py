"""Tensors whose address is not where their elements are: refused before the core reads or writes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught


class Wrapper(torch.Tensor):
    """Shape and type of a tensor that it keeps to itself, as DTensor and quantized tensors do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Wrapper()"

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise NotImplementedError


class Named(torch.Tensor):
    """A subclass that holds its elements itself."""


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4)


def resized(elements: int) -> torch.Tensor:
    x = torch.ones(64)
    x.untyped_storage().resize_(4 * elements)
    return x


def strided_past_the_end() -> torch.Tensor:
    x = torch.ones(8)
    view = x[::2]
    x.untyped_storage().resize_(4 * 6)
    return view


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "freed storage": (lambda: resized(0), ValueError, "holds 0 bytes, and its elements need 256"),
    "small storage": (lambda: resized(63), ValueError, "holds 252 bytes, and its elements need 256"),
    "strided": (strided_past_the_end, ValueError, "holds 24 bytes, and its elements need 28"),
    "zero tensor": (lambda: torch._efficientzerotensor((4,)), ValueError, "has no memory of its own"),
    "part of a zero tensor": (
        lambda: torch._efficientzerotensor((4,))[1:],
        ValueError,
        "has no memory of its own",
    ),
    "fake": (fake, TypeError, "a FakeTensor stands for others; pass what it wraps"),
    "wrapper": (lambda: Wrapper(torch.ones(4)), TypeError, "a Wrapper stands for others; pass what it wraps"),
    "meta": (lambda: torch.empty(4, device="meta"), TypeError, "x is on meta"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_without_their_memory(what: str) -> None:
    make, kind, text = REFUSED[what]
    with rr.Ring(rank=0, world=1) as ring:
        for call in (ring.all_reduce, ring.reduce_scatter, ring.all_gather):
            with pytest.raises(kind, match=text):
                call(make())
        if what not in ("fake", "wrapper", "meta"):
            with pytest.raises(kind, match=text):
                ring.all_reduce(torch.ones(make().shape), out=make())
        assert ring.all_reduce(torch.ones(3)).tolist() == [1, 1, 1]


def test_tensors_that_hold_their_elements() -> None:
    base = torch.arange(8.0)
    with rr.Ring(rank=0, world=1) as ring:
        for x in (
            base[5:],
            base[1::3],
            torch.nn.Parameter(base.clone()).detach(),
            base.clone().as_subclass(Named),
        ):
            assert ring.all_reduce(x, rr.divide_by(1), out=torch.empty(x.shape)).tolist() == x.tolist()
        freed_and_empty = torch.ones(0)
        freed_and_empty.untyped_storage().resize_(0)
        assert ring.all_reduce(freed_and_empty).shape == (0,)


def test_masked_arrays() -> None:
    masked = np.ma.masked_array(  # type: ignore[no-untyped-call]
        np.ones(3, np.float32), mask=[False, True, False]
    )
    with rr.Ring(rank=0, world=1) as ring, pytest.raises(TypeError, match=r"use x.filled\(0\), or x.data"):
        ring.all_reduce(masked)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with rr.Ring(rank=0, world=1) as ring, pytest.raises(TypeError, match="not nested ones"):
        ring.all_reduce(nested)


@pytest.mark.parametrize("transform", ["functionalize", "vmap", "grad"])
def test_inside_of_a_transform(transform: str) -> None:
    """What torch.func's transforms pass holds no elements: its address is none."""
    with rr.Ring(rank=0, world=1) as ring:

        def reduced(x: torch.Tensor) -> torch.Tensor:
            ring.all_reduce(x * 1)
            return x.sum()

        with pytest.raises(TypeError, match=r"nor what torch\.func's transforms pass"):
            getattr(torch.func, transform)(reduced)(torch.ones(8))
        assert ring.all_reduce(torch.ones(2)).tolist() == [1, 1]


def half_written(seat: Seat) -> tuple[int, int]:
    """How often a tensor was marked as written: by a call that an abort ended, and by one of another size."""
    ring = seat.ring()
    x = torch.ones(3)
    ring.all_reduce(x)
    before = x._version
    if seat.rank == 0:
        ring.abort("by the test")
    assert isinstance(caught(lambda: ring.all_reduce(x)), rr.RingAborted)
    aborted = x._version - before
    other = seat.ring(name="other")
    y = torch.ones(3 + seat.rank)
    assert isinstance(caught(lambda: other.all_reduce(y)), rr.RingMismatch)
    return aborted, y._version


def test_what_a_failed_call_may_have_written_is_marked(run: Run) -> None:
    """After a mismatch no tensor has changed, and none is marked."""
    for aborted, mismatched in run(2, half_written):
        assert aborted == 1
        assert mismatched == 0
