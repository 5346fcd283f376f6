"""The peers for GPUs: what they say without one, and that this torch has the calls that they make."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

from ring_reduce.benchmarks.peers import missing
from ring_reduce.benchmarks.peers.nccl import NcclPeer
from ring_reduce.benchmarks.peers.symm_mem import SymmMemPeer

SCHEMAS = {
    "one_shot_all_reduce": "(Tensor input, str reduce_op, str group_name) -> Tensor",
    "two_shot_all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
    "multimem_all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
}


@pytest.mark.parametrize("name", ["nccl", "symm_mem"])
def test_they_need_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing(name, "cpu") == "it reduces tensors on cuda, not on cpu"
    assert "needs an NVIDIA GPU for each rank" in str(missing(name, "cuda"))


@pytest.mark.parametrize("peer", [NcclPeer, SymmMemPeer])
def test_a_torch_without_nccl_is_told(
    peer: type[NcclPeer] | type[SymmMemPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "built without NCCL" in str(peer.missing("cuda"))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert peer.missing("cuda") is None


@pytest.mark.parametrize("name", SCHEMAS)
def test_torch_has_the_kernels_that_symm_mem_calls(name: str) -> None:
    schema = str(getattr(torch.ops.symm_mem, name).default._schema)
    assert schema == f"symm_mem::{name}{SCHEMAS[name]}"


def test_torch_has_the_functions_that_they_call() -> None:
    import torch.distributed._symmetric_memory as memory

    assert list(inspect.signature(memory.rendezvous).parameters) == ["tensor", "group"]
    assert {"dtype", "device"} <= set(inspect.signature(memory.empty).parameters)
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "multicast_ptr")
    assert "device_id" in inspect.signature(dist.init_process_group).parameters
    assert dist.ReduceOp.AVG is not None
