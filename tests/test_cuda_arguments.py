"""What the GPU ring refuses, and what it says where it can't run; none of it needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ring_reduce as rr
from ring_reduce.cuda import VirtualRing, check_counts, check_tensors, why_unavailable

CPU = torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch, extension: Any) -> None:
    """What ``from . import _cuda`` finds; None: nothing, though it may be built here."""
    monkeypatch.delattr(rr, "_cuda", raising=False)
    monkeypatch.setitem(sys.modules, "ring_reduce._cuda", extension)
    if extension is not None:
        monkeypatch.setattr(rr, "_cuda", extension, raising=False)


def test_built_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    reason = why_unavailable()
    assert reason is not None
    assert "was built without CUDA" in reason
    assert "where nvcc is, with RING_REDUCE_CUDA=1" in reason
    with pytest.raises(rr.RingError, match="no ring on a GPU: ring_reduce was built without CUDA"):
        VirtualRing(2)


def test_a_module_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for want of CUDA when ring_reduce was built: a library is missing, or it is for another machine."""
    path = "/somewhere/ring_reduce/_cuda.so"

    class Finder:
        def find_spec(self, name: str, *_: Any) -> Any:
            if name == "ring_reduce._cuda":
                raise ImportError("libcuda.so.1: no such file", path=path)

    install(monkeypatch, None)
    monkeypatch.delitem(sys.modules, "ring_reduce._cuda")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert why_unavailable() == "ring_reduce's CUDA module does not load: libcuda.so.1: no such file"


def test_what_the_extension_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SimpleNamespace(why_no_cuda=lambda: "no driver"))
    assert why_unavailable() == "no driver"
    with pytest.raises(rr.RingError, match="no ring on a GPU: no driver"):
        VirtualRing(2)
    install(monkeypatch, SimpleNamespace(why_no_cuda=lambda: ""))
    assert why_unavailable() is None


@pytest.mark.parametrize("name", ["world", "lanes", "segment_bytes", "depth", "window"])
def test_settings_are_whole_numbers(name: str) -> None:
    settings: dict[str, Any] = {"world": 2, name: 2.5}
    with pytest.raises(TypeError, match=rf"{name} is 2\.5, a float"):
        VirtualRing(**settings)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_is_positive(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout is"):
        VirtualRing(2, timeout=timeout)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ([ones(4)], ValueError, "there are 1 tensors and 1 outputs"),
        ([ones(4), ones(5)], ValueError, r"tensor of rank 1 is torch.float32 of shape \(5,\)"),
        ([ones(4), ones(4, dtype=torch.float64)], ValueError, "tensor of rank 1 is torch.float64"),
        ([ones(4, dtype=torch.int8)] * 2, TypeError, "not int8; convert it first"),
        ([ones(2, 3).T, ones(3, 2)], ValueError, "tensor of rank 0 is not contiguous"),
        ([ones(4), ones(4).to("meta")], ValueError, "tensor of rank 1 is on meta, and the ring on cpu"),
    ],
)
def test_tensors_that_do_not_fit(tensors: list[torch.Tensor], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_tensors(tensors, tensors, 2, CPU)


def test_an_output_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"out of rank 1 is torch\.int32"):
        check_tensors([ones(4)] * 2, [ones(4), ones(4, dtype=torch.int32)], 2, CPU)


def test_tensors_that_fit() -> None:
    assert (
        check_tensors([ones(0, dtype=torch.bfloat16)] * 2, [ones(0, dtype=torch.bfloat16)] * 2, 2, CPU)
        == "bfloat16"
    )


@pytest.mark.parametrize(
    ("counts", "normalization", "name", "error", "text"),
    [
        (None, rr.MEAN, "int64", TypeError, "int64 can't hold a quotient; use SUM"),
        (None, rr.divide_by(1e-300), "float32", ValueError, "divided in float32"),
        ([1, 2], rr.SUM, "float32", rr.CountError, "does not use counts"),
        (None, rr.WEIGHTED_MEAN, "float32", rr.CountError, "pass counts=, one for each rank"),
        ([1], rr.WEIGHTED_MEAN, "float32", rr.CountError, "there are 1 counts for 2 ranks"),
        ([1, -1], rr.DIVIDE_BY_COUNT, "float32", rr.CountError, "count is -1"),
        ([1, float("nan")], rr.DIVIDE_BY_COUNT, "float32", rr.CountError, "count is nan"),
    ],
)
def test_counts_that_do_not_fit(
    counts: Any, normalization: rr.Normalization, name: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        check_counts(counts, normalization, name, 2, CPU)


def test_counts_that_fit() -> None:
    assert check_counts([3, 0], rr.WEIGHTED_MEAN, "float32", 2, CPU) == ([3.0, 0.0], None)
    assert check_counts(torch.tensor([3, 0.5]), rr.DIVIDE_BY_COUNT, "float64", 2, CPU) == ([3.0, 0.5], None)
    assert check_counts(None, rr.SUM, "int64", 2, CPU) == ([], None)


def test_captured_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would replay the numbers of its capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(rr.CountError, match="would stay as they are in the captured graph"):
        check_counts([3, 1], rr.WEIGHTED_MEAN, "float32", 2, torch.device("cuda", 0))
