"""Which torch tensors the core takes itself, and that it leaves all others to who tells what is wrong with them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import ring_reduce as rr
from ring_reduce import _core, arrays, shm

# By the version, not by looking: a newer torch in which the API is gone has to fail, since every call got slower.
pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13),
    reason=f"torch {torch.__version__} may have no C exchange API: then every call goes the long way",
)


@pytest.fixture
def ring() -> Iterator[rr.Ring]:
    with rr.Ring(rank=0, world=1) as ring:
        ring.all_reduce(torch.zeros(1))  # the first tensor of a type shows it to the core
        yield ring


def taken(ring: rr.Ring, x: Any, out: Any = None, normalization: rr.Normalization = rr.SUM) -> bool:
    out = x if out is None else out
    total = ring._engine.reduce_tensors(x, out, normalization.number, normalization.total, 1.0, False)
    assert total in (0.0, -1.0)
    return bool(total == 0)


class Sub(torch.Tensor):
    pass


def shrunk(nbytes: int) -> torch.Tensor:
    x = torch.ones(8)
    x.untyped_storage().resize_(nbytes)
    return x


TAKEN: dict[str, Callable[[], torch.Tensor]] = {
    "a vector": lambda: torch.ones(8),
    "a matrix": lambda: torch.ones(3, 4, dtype=torch.bfloat16),
    "a scalar": lambda: torch.tensor(3.0),
    "nothing": lambda: torch.ones(0),
    "a part": lambda: torch.ones(9)[2:7],
    "rows": lambda: torch.ones(5, 3)[1:3],
    "one column of one": lambda: torch.ones(4, 1)[:, :1],
    "integers": lambda: torch.ones(3, dtype=torch.int64),
    "a leaf": lambda: torch.ones(3, requires_grad=True),
}
LEFT: dict[str, Callable[[], Any]] = {
    "every second": lambda: torch.ones(8)[::2],
    "a transposed matrix": lambda: torch.ones(3, 4).t(),
    "an expanded one": lambda: torch.ones(1).expand(4),
    "another sign in memory": lambda: torch._neg_view(torch.ones(4)),
    "of another type": lambda: torch.ones(4, dtype=torch.int8),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "freed": lambda: shrunk(0),
    "shrunk": lambda: shrunk(31),
    "zeros without memory": lambda: torch._efficientzerotensor((4,)),
    "a part of zeros without memory": lambda: torch._efficientzerotensor((4,))[1:],
    "on another device": lambda: torch.ones(4, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "of another class": lambda: torch.ones(3).as_subclass(Sub),
    "no tensor": lambda: [1.0, 2.0],
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(ring: rr.Ring, name: str) -> None:
    x = TAKEN[name]().detach()
    before, version = x.clone(), x._version
    assert taken(ring, x)
    assert torch.equal(x, before)  # the sum over one rank
    assert x._version == version + 1


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(ring: rr.Ring, name: str) -> None:
    assert not taken(ring, LEFT[name]())
    assert not taken(ring, torch.ones(4), LEFT[name]())


def test_pairs(ring: rr.Ring) -> None:
    memory = torch.arange(12.0)
    assert taken(ring, memory[:4], memory[4:8])
    assert memory[4:8].tolist() == [0, 1, 2, 3]
    for out in (memory[1:5], memory[:5], memory[:4].view(2, 2), torch.ones(4, dtype=torch.float64)):
        assert not taken(ring, memory[:4], out)
    assert memory.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11]


def test_what_can_not_be_divided(ring: rr.Ring) -> None:
    whole, single, double = (
        torch.ones(2, dtype=torch.int32),
        torch.ones(2),
        torch.ones(2, dtype=torch.float64),
    )
    assert not taken(ring, whole, normalization=rr.MEAN)
    for total in (1e-40, 1e300):
        assert not taken(ring, single, normalization=rr.divide_by(total))
        assert taken(ring, double, normalization=rr.divide_by(total))
    with pytest.raises(ValueError, match="out of range"):
        ring._engine.reduce_tensors(single, single, 5, 1.0, 1.0, False)


COUNTS_TAKEN: list[Any] = [None, 0, 3, 2**53, 0.0, 2.5, 2.0**-126]
COUNTS_LEFT: list[Any] = [
    -1,
    2**53 + 1,
    2**70,
    -0.5,
    math.nan,
    math.inf,
    2.0**-127,
    2.0**54,
    True,
    "3",
    np.int64(3),
]


def test_counts(ring: rr.Ring) -> None:
    """Python's own numbers that are a count; of the others the long way says whether they are one."""
    x = torch.ones(2)
    arguments = (x, x, rr.WEIGHTED_MEAN.number, 1.0)
    for count in COUNTS_TAKEN:
        total = ring._engine.reduce_tensors(*arguments, count, False)
        assert total == (1.0 if count is None else count)
    for count in COUNTS_LEFT:
        assert ring._engine.reduce_tensors(*arguments, count, False) == -1.0


def test_all_reduce_takes_the_short_way(ring: rr.Ring) -> None:
    """And only where nothing stands against it."""
    x = torch.ones(4)
    with mock.patch.object(ring, "_start") as long_way:
        assert ring.all_reduce(x) is x
        assert ring.all_reduce(x, rr.WEIGHTED_MEAN, count=3) is x
        long_way.assert_not_called()
        for arguments in ({"async_op": True}, {"normalization": rr.MEAN, "count": 1}, {"out": x.double()}):
            long_way.reset_mock()
            try:
                ring.all_reduce(x, **arguments)
            except (rr.CountError, TypeError):
                continue
            long_way.assert_called_once()
    assert ring.stats.last_count == 3


@pytest.mark.parametrize("found", [object(), None], ids=["another API", "no API"])
def test_a_torch_with_another_api_goes_the_long_way(found: Any) -> None:
    torch_arrays = arrays._Torch()
    torch_arrays.torch = torch
    with mock.patch.object(torch.Tensor, "__dlpack_c_exchange_api__", found):
        assert torch_arrays.check(torch.ones(2)) == "float32"
    assert torch_arrays._core_sees is False


def test_the_first_call_may_be_in_inference_mode() -> None:
    torch_arrays = arrays._Torch()
    torch_arrays.torch = torch
    with torch.inference_mode():
        torch_arrays.check(torch.ones(2))
    assert torch_arrays._core_sees is True


@pytest.mark.parametrize("world", [2, 4, 16, 64])
def test_one_shot_fits_whatever_the_lanes(world: int) -> None:
    """Or results would depend on the lanes: which algorithm is taken decides how 16-bit floats are rounded."""
    tuning = shm.Tuning()
    memory = shm._SharedMemory(mock.Mock(), 1.0, 64, tuning)
    for lanes in (1, 2, 4, 8, 64):
        hello = {
            "lanes": lanes,
            "world": world,
            "depth": tuning.depth,
            "segment_bytes": tuning.segment_bytes,
            "part_bytes": tuning.part_bytes,
        }
        agreed = memory.agree(hello, {})
        assert world * agreed["part_bytes"] >= tuning.one_shot_bytes
        assert agreed["segment_bytes"] >= 4096
        shape = {key: agreed[key] for key in ("lanes", "depth", "segment_bytes", "world", "part_bytes")}
        assert _core.region_bytes(**shape) <= shm.STAGING_LIMIT_BYTES


def test_another_thread_may_call(ring: rr.Ring) -> None:
    x = torch.ones(3)
    thread = threading.Thread(target=lambda: ring.all_reduce(x, rr.divide_by(2)))
    thread.start()
    thread.join()
    assert x.tolist() == [0.5] * 3
