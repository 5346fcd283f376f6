"""What the DDP hook relies on in torch, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring_reduce as rr
from conftest import Run
from ddp_cases import BLOCKS, Blocks, assert_gradients, examples, make_model, quotient, summed, taken
from ddp_helpers import group
from launch import Seat, caught

# Private functions of torch that ring_reduce calls. A new torch that changes one fails here, and not as a wrong count.


def recorded_hook(ids: list[int]) -> Callable[[Any, Any], Any]:
    """A hook that leaves gradients alone, and notes the graph task that it is called in."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # register_comm_hook reads annotations
        ids.append(torch._C._current_graph_task_id())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook


def graph_tasks(seat: Seat, options: dict[str, Any]) -> list[list[int]]:
    """The graph task of every hook call, by step; rank 0 leaves join() after two of three."""
    with group(seat):
        model = make_model(**options)
        ids: list[int] = []
        model.register_comm_hook(None, recorded_hook(ids))
        seen: list[list[int]] = []
        with model.join():
            for step in range(2 + seat.rank):
                assert torch._C._current_graph_task_id() == -1
                model(examples(seat.rank, step, 2)).sum().backward()
                seen.append(ids[:])
                ids.clear()
        return [*seen, ids]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=repr)
def test_torch_tells_whether_a_hook_is_called_in_a_backward(run: Run, options: dict[str, Any]) -> None:
    """-1 on a rank that has left join(), 0 or more otherwise; static_graph delays the calls of its first backward."""
    first, second = run(2, graph_tasks, options)
    assert [len(step) for step in first[:2]] == [len(step) for step in second[:2]]
    for step in [*first[:2], *second[:3]]:
        assert step
        assert min(step) >= 0
    assert first[2] == [-1] * len(second[2]), "the third step of rank 0, which has joined"
    assert second[3] == []


def stores(seat: Seat) -> tuple[bytes, bool]:
    """What the other rank has put into the group's store."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    with group(seat):
        assert dist.group.WORLD is not None
        store = _get_process_group_store(dist.group.WORLD)
        store.set(f"test {seat.rank}", str(seat.rank))
        return store.get(f"test {1 - seat.rank}"), store.check(["nobody sets this"])


def test_torch_gives_the_store_of_a_group(run: Run) -> None:
    assert run(2, stores) == [(b"1", False), (b"0", False)]


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed\.init_process_group\(\) first"):
        rr.Ring.from_group()


def hooks(seat: Seat) -> list[Any]:
    """The hook as torch's documentation registers it, and by attach."""
    with group(seat) as ring:
        seen = []
        for by_hand in (True, False):
            model = make_model()
            if by_hand:
                state = rr.RingHookState(ring, rr.DIVIDE_BY_COUNT)
                model.register_comm_hook(state, rr.ring_hook)
            else:
                state = rr.attach(model, ring, rr.DIVIDE_BY_COUNT)
            for step in range(3):
                model.zero_grad()
                state.add_count(4)
                model(examples(seat.rank, step, 4)).sum().backward()
            seen.append(taken(model, state))
        return seen


def test_a_hook_by_hand_and_by_attach_is_the_same(run: Run) -> None:
    sums = summed(examples(rank, 2, 4, torch.float64).sum(0) for rank in range(2))
    for steps in run(2, hooks):
        for step in steps:
            assert_gradients(step, quotient(sums, 8), "the third step")
            assert step.last == (8.0, 8.0, BLOCKS)


def refusals(seat: Seat) -> dict[str, tuple[str, str]]:
    """What attach raises for each model or ring that does not fit; the ring serves a model afterwards."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parallel.distributed import _MixedPrecision

    with group(seat) as ring:
        alone = rr.Ring(rank=0, world=1)
        other_order = rr.Ring(seat.store, rank=1 - seat.rank, world=2, name="swapped", timeout=60)
        subgroup = dist.new_group([1, 0])
        has_hook = make_model()
        rr.attach(has_hook, ring, rr.SUM)
        foreign_hook = make_model()
        foreign_hook.register_comm_hook(None, recorded_hook([]))
        mixed = DistributedDataParallel(
            Blocks(torch.float32), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)
        )
        cases: dict[str, Callable[[], Any]] = {
            "not DDP": lambda: rr.attach(Blocks(torch.float32), ring, rr.MEAN),
            "twice": lambda: rr.attach(has_hook, ring, rr.MEAN),
            "foreign hook": lambda: rr.attach(foreign_hook, ring, rr.MEAN),
            "mixed_precision": lambda: rr.attach(mixed, ring, rr.MEAN),
            "world": lambda: rr.attach(make_model(), alone, rr.MEAN),
            "rank": lambda: rr.attach(make_model(process_group=subgroup), other_order, rr.MEAN),
            "normalization": lambda: rr.attach(make_model(), ring, "mean"),  # type: ignore[arg-type]
            "state": lambda: rr.RingHookState(ring, 8),  # type: ignore[arg-type]
        }
        errors = {name: caught(case) for name, case in cases.items()}
        model = make_model()
        state = rr.attach(model, ring, rr.MEAN)
        model(examples(seat.rank, 0, 4)).sum().backward()
        sums = summed(examples(rank, 0, 4, torch.float64).sum(0) for rank in range(2))
        assert_gradients(taken(model, state), quotient(sums, 2), "after the refusals")
        alone.close()
        other_order.close()
        return {name: (type(error).__name__, str(error)) for name, error in errors.items()}


REFUSALS = {
    "not DDP": ("TypeError", "takes a DistributedDataParallel model, not Blocks; wrap it first"),
    "twice": ("ValueError", "DDP takes one hook only"),
    "foreign hook": ("ValueError", "DDP takes one hook only"),
    "mixed_precision": ("ValueError", "mixed_precision, which installs a communication hook of its own"),
    "world": (
        "ValueError",
        "rank {rank} of 2 and the ring as rank 0 of 1; make the ring with Ring.from_group(group)",
    ),
    "rank": ("ValueError", "rank {rank} of 2 and the ring as rank {other} of 2"),
    "normalization": ("TypeError", "normalization is 'mean'; use one of ring_reduce, such as WEIGHTED_MEAN"),
    "state": ("TypeError", "normalization is 8; use one of ring_reduce"),
}


def test_what_attach_refuses(run: Run) -> None:
    for rank, errors in enumerate(run(2, refusals)):
        assert errors.keys() == REFUSALS.keys()
        for name, (kind, text) in REFUSALS.items():
            assert errors[name][0] == kind, errors[name]
            assert text.format(rank=rank, other=1 - rank) in errors[name][1]
