"""Exact sums of a benchmark's peer, in place and out of place."""

from __future__ import annotations

import torch

from ring_reduce.benchmarks.peers import Op, Peer

SIZES = (1, 3, 257, 5001, 300_000)  # DeepSpeed and MPI change algorithms between the last two


def check_sums(peer: Peer, rank: int, world: int, dtype: torch.dtype, op: Op) -> None:
    """Every element of sums, or of means where these are exact, at all sizes; the input of out of place is kept.

    Two rounds on the same memory with other numbers: a peer that keeps something of an address must read it anew.
    """
    if op is Op.MEAN and not dtype.is_floating_point:
        return
    for size in SIZES:
        x, out = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        for turn in range(2):
            inputs = [((torch.arange(size) * (other + 1) + turn) % 32).to(dtype) for other in range(world)]
            expected = torch.stack(inputs).sum(0, dtype=dtype)
            if op is Op.MEAN:
                expected = expected / world
            x.copy_(inputs[rank])
            out.fill_(99)
            peer.all_reduce(x, out, op)
            assert torch.equal(x, inputs[rank]), f"{dtype} {size}: out of place changed its input"
            assert torch.equal(out, expected), f"{dtype} {size} {op}: out of place is wrong"
            peer.all_reduce(x, x, op)
            assert torch.equal(x, expected), f"{dtype} {size} {op}: in place is wrong"
