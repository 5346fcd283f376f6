"""What a ring takes: torch tensors and NumPy arrays of any shape, strides and place in memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, caught

WORLD = 2


def views(make: Any) -> dict[str, tuple[Any, Any]]:
    """Views of many layouts, each with the array that it is a view of. ``make`` turns a NumPy array into a tensor."""

    def base(*shape: int) -> Any:
        return make(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))

    plain, cube, line = base(6, 8), base(3, 4, 5), base(60)
    return {
        "contiguous": (plain, plain),
        "transposed": (base(6, 8).T, None),
        "every second": (line[::2], line),
        "one column": (plain[:, 3], plain),
        "a block": (plain[1:4, 2:7], plain),
        "permuted": (cube.swapaxes(0, 2), cube),
        "one element": (line[7:8], line),
        "strided, one element": (line[::60], line),
        "a scalar": (line[5:6].reshape(()), line),
        "no elements": (line[:0], line),
        "no elements, two dimensions": (plain[:0], plain),
        "no elements, no columns": (plain[:, :0], plain),
        "a dimension of one": (base(4, 1, 3), None),
    }


def reduce_views(seat: Seat, kind: str) -> None:
    """In place and out of place: the view is reduced, and nothing around it is written."""
    import torch

    make: Any = torch.from_numpy if kind == "torch" else (lambda x: x)
    ring = seat.kept_ring()
    for name in views(make):
        x, around = views(make)[name]
        before, before_around = np.array(x), np.array(around if around is not None else x)
        out = make(np.full(before.shape, np.nan, np.float32))
        assert ring.all_reduce(x, out=out) is out
        assert np.array_equal(np.array(out), WORLD * before), name
        assert np.array_equal(np.array(x), before), name
        assert ring.all_reduce(x) is x
        assert np.array_equal(np.array(x), WORLD * before), name
        if around is not None:
            assert np.array(around).sum() == before_around.sum() + before.sum(), f"{name}: written outside"
        back = views(make)[name][0]  # into a view
        ring.all_reduce(make(before.copy()), out=back)
        assert np.array_equal(np.array(back), WORLD * before), name


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_layout(run: Run, kind: str) -> None:
    run(WORLD, reduce_views, kind)


def reverse_and_broadcast(seat: Seat) -> None:
    import torch

    ring = seat.kept_ring()
    line = np.arange(20.0)
    ring.all_reduce(line[::-1])
    assert np.array_equal(line, WORLD * np.arange(20.0))
    # Elements that share memory can be read, into another tensor.
    assert ring.all_reduce(torch.ones(1).expand(5), out=torch.empty(5)).tolist() == [2.0] * 5
    assert ring.all_reduce(np.broadcast_to(1.0, 5), out=np.empty(5)).tolist() == [2.0] * 5
    overlapping = torch.arange(6.0).as_strided((3, 3), (1, 1))
    assert torch.equal(ring.all_reduce(overlapping, out=torch.empty(3, 3)), 2 * overlapping)


def test_reversed_and_broadcast_arrays(run: Run) -> None:
    run(WORLD, reverse_and_broadcast)


def empty_arrays(seat: Seat) -> list[tuple[int, ...]]:
    ring = seat.kept_ring()
    arrays = [np.ones(0), np.ones((2, 0)), np.ones((0, 3)), np.ones((2, 0, 3), np.float32)]
    return [ring.all_reduce(array).shape for array in arrays]


def test_numpy_arrays_without_elements(run: Run) -> None:
    """NumPy gives them strides of 0, which share no memory since there is none."""
    assert run(WORLD, empty_arrays) == [[(0,), (2, 0), (0, 3), (2, 0, 3)]] * WORLD


def negated(seat: Seat) -> list[list[float]]:
    import torch

    ring = seat.kept_ring()
    lazily = torch._neg_view(torch.tensor([1.0, 2.0]))
    out = ring.all_reduce(lazily, out=torch.empty(2)).tolist()
    ring.all_reduce(lazily)
    conjugate = torch.tensor([1 + 2j]).conj().imag  # contiguous, being one element
    return [out, lazily.tolist(), ring.all_reduce(conjugate).tolist()]


def test_tensors_that_torch_negates_lazily(run: Run) -> None:
    """Their memory holds the opposite of their values."""
    assert run(WORLD, negated) == [[[-2.0, -4.0], [-2.0, -4.0], [-4.0]]] * WORLD


def mixed_libraries(seat: Seat) -> list[float]:
    """Rank 0 has a torch tensor and rank 1 a NumPy array: the wire knows no library."""
    import torch

    x: Any = torch.arange(5.0) if seat.rank == 0 else np.arange(5, dtype=np.float32)
    result: list[float] = seat.kept_ring().all_reduce(x).tolist()
    return result


def test_ranks_may_use_different_libraries(run: Run) -> None:
    assert run(WORLD, mixed_libraries) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * WORLD


def autograd(seat: Seat) -> None:
    import torch

    ring = seat.kept_ring()
    parameter = torch.nn.Parameter(torch.ones(4))
    version = parameter._version
    assert ring.all_reduce(parameter) is parameter  # a leaf: as torch.distributed does
    assert parameter.detach().tolist() == [2.0] * 4
    assert parameter._version > version

    x = torch.ones(4, requires_grad=True)
    saved = x * 1
    loss = (saved * saved).sum()
    ring.all_reduce(saved)
    error = caught(loss.backward)
    assert isinstance(error, RuntimeError)
    assert "modified by an inplace operation" in str(error)

    out = torch.empty(4)
    version = out._version
    ring.all_reduce(torch.ones(4), out=out)
    assert out._version > version
    with torch.inference_mode():
        assert ring.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    strided = torch.ones(8)
    version = strided._version
    ring.all_reduce(strided[::2])
    assert strided._version > version


def test_autograd_sees_that_a_tensor_was_written(run: Run) -> None:
    run(WORLD, autograd)


def names_of_results(seat: Seat) -> list[str]:
    import torch

    ring = seat.kept_ring()
    return [
        type(x).__name__
        for x in (
            ring.all_reduce(np.ones(3)),
            ring.all_reduce(torch.ones(3)),
            ring.all_gather(np.ones(3)),
            ring.all_gather(torch.ones(3)),
            ring.reduce_scatter(np.ones(4)),
            ring.reduce_scatter(torch.ones(4)),
        )
    ]


def test_results_are_of_the_library_of_x(run: Run) -> None:
    assert run(WORLD, names_of_results) == [["ndarray", "Tensor"] * 3] * WORLD


NO_TORCH = """
import sys
import numpy as np
import ring_reduce as rr
for name in ("SUM", "MEAN"):
    with rr.Ring(rank=0, world=1) as ring:
        ring.all_reduce(np.ones(5), getattr(rr, name), async_op=True).wait()
loaded = [name for name in ("torch", "triton", "cupy", "cuda") if name in sys.modules]
assert not loaded, loaded
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "libtorch" not in maps
"""


def test_import_and_numpy_calls_load_neither_torch_nor_a_gpu_library() -> None:
    subprocess.run([sys.executable, "-c", NO_TORCH], check=True, timeout=100)


def test_a_world_of_one_divides_too() -> None:
    with rr.Ring(rank=0, world=1) as ring:
        assert ring.all_reduce(np.full(3, 6.0), rr.divide_by(4)).tolist() == [1.5] * 3
        assert ring.all_reduce(np.full(3, 6.0), rr.MEAN).tolist() == [6.0] * 3
        assert ring.all_reduce(np.full(3, 6.0), rr.DIVIDE_BY_COUNT, count=3).tolist() == [2.0] * 3
        assert ring.stats.bytes_sent == 0
