"""What is compared: every all-reduce behind one small Protocol, and a plain copy as the memory limit."""

from .base import DTYPES, Op, Peer, Place
from .registry import PEERS, UnknownPeer, missing, peer_class

__all__ = ["DTYPES", "PEERS", "Op", "Peer", "Place", "UnknownPeer", "missing", "peer_class"]
