"""Who is measured: peers by name, absent ones with a reason, and a copy that moves every byte."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from ring_reduce.benchmarks.peers import DTYPES, PEERS, Op, Place, UnknownPeer, missing, peer_class
from ring_reduce.benchmarks.peers.copy import CopyPeer
from ring_reduce.benchmarks.plan import Contender, Plan
from ring_reduce.benchmarks.trial import contenders_of

ALWAYS_THERE = ("ring", "gloo", "copy")


@pytest.mark.parametrize("name", ALWAYS_THERE)
def test_every_peer_keeps_the_protocol(name: str) -> None:
    peer = peer_class(name)()
    assert peer.name == name
    assert peer.ops
    assert set(peer.ops) <= set(Op)
    assert peer.dtypes <= DTYPES
    assert missing(name, "cpu") is None


def test_a_peer_of_the_users_own_goes_by_module_and_class() -> None:
    assert peer_class("benchmark_cases:WrongPeer").__name__ == "WrongPeer"
    with pytest.raises(UnknownPeer, match="backend 'nickel' is unknown; there are ring, gloo, mpi"):
        peer_class("nickel")
    with pytest.raises(UnknownPeer, match="NoSuchPeer"):
        peer_class("benchmark_cases:NoSuchPeer")


def test_why_a_peer_is_absent_is_told() -> None:
    assert missing("gloo", "cuda") == "it reduces tensors on cpu, not on cuda"
    assert "no_such_module" in str(missing("no_such_module:Peer", "cpu"))


def test_registered_peers_are_looked_up_by_module_and_class() -> None:
    assert {"ring", "gloo", "mpi", "deepspeed", "nccl", "symm_mem", "copy"} == set(PEERS)
    for place in PEERS.values():
        assert place.startswith("ring_reduce.benchmarks.peers.")


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_copy_moves_every_byte(dtype: str) -> None:
    peer = CopyPeer()
    peer.setup(Place(0, 1, None, 1, torch.device("cpu"), 0))
    x = torch.arange(1, 101).to(getattr(torch, dtype))
    out = torch.zeros_like(x)
    peer.all_reduce(x, out, Op.SUM)
    assert out.view(torch.uint8).numpy().tobytes() == x.view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match="in place"):
        peer.all_reduce(x, x, Op.SUM)


class _Peer:
    def __init__(self, ops: tuple[Op, ...], dtypes: frozenset[str], reduces: bool = True) -> None:
        self.ops, self.dtypes, self.reduces = ops, dtypes, reduces


def test_contenders_are_what_each_peer_can_do_of_what_is_asked() -> None:
    peers: Any = {
        "both": _Peer((Op.SUM, Op.MEAN), DTYPES),
        "sums": _Peer((Op.SUM,), frozenset({"float32"})),
        "copy": _Peer((Op.SUM,), DTYPES, reduces=False),
    }
    plan = Plan(world=2, sizes=(64,), ops=("SUM", "MEAN"))
    labels = {
        dtype: [str(each) for each in contenders_of(plan, peers, dtype)] for dtype in ("float32", "int32")
    }
    both = ["both sum out of place", "both sum in place"]
    means = ["both avg out of place", "both avg in place"]
    copy = ["copy sum out of place"]
    assert labels["float32"] == [*both, *means, "sums sum out of place", "sums sum in place", *copy]
    assert labels["int32"] == [*both, *copy]  # integers have no mean
    only_means = Plan(world=2, sizes=(64,), ops=("MEAN",))
    assert contenders_of(only_means, {"sums": peers["sums"]}, "float32") == []
    assert contenders_of(only_means, {"copy": peers["copy"]}, "float32") == [Contender("copy", Op.SUM, False)]


def test_importing_the_registry_imports_no_peer() -> None:
    registry = importlib.import_module("ring_reduce.benchmarks.peers.registry")
    assert not {"RingPeer", "GlooPeer", "CopyPeer"} & set(vars(registry))
