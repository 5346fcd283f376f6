"""The peers by name. Each is imported when it is asked for, and not before."""

from __future__ import annotations

import importlib

from .base import Peer

# module:class. A user's own all-reduce is measured by giving its module:class in place of a name.
PEERS = {
    "ring": "ring_reduce.benchmarks.peers.ring:RingPeer",
    "gloo": "ring_reduce.benchmarks.peers.gloo:GlooPeer",
    "mpi": "ring_reduce.benchmarks.peers.mpi:MpiPeer",
    "deepspeed": "ring_reduce.benchmarks.peers.deepspeed:DeepSpeedPeer",
    "nccl": "ring_reduce.benchmarks.peers.nccl:NcclPeer",
    "symm_mem": "ring_reduce.benchmarks.peers.symm_mem:SymmMemPeer",
    "copy": "ring_reduce.benchmarks.peers.copy:CopyPeer",
}


class UnknownPeer(ValueError):
    """There is no such peer; the text lists those that there are."""


def peer_class(name: str) -> type[Peer]:
    """The class of a peer. Raises ``UnknownPeer``, also for a ``module:Class`` that can't be imported."""
    if name not in PEERS and ":" not in name:
        raise UnknownPeer(f"backend {name!r} is unknown; there are {', '.join(PEERS)}, or module:Class")
    module, _, cls = PEERS.get(name, name).partition(":")
    try:
        found: type[Peer] = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise UnknownPeer(f"backend {name!r}: {error}") from error
    return found


def missing(name: str, device: str) -> str | None:
    """Why a peer can't be measured on ``device`` here; None if it can."""
    try:
        found = peer_class(name)
    except UnknownPeer as error:
        return str(error)
    if device not in found.devices:
        return f"it reduces tensors on {' and '.join(sorted(found.devices))}, not on {device}"
    return found.missing(device)
