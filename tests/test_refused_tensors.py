"""Tensors whose address is not where their elements are: refused before the core reads or writes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ring_reduce as rr


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
