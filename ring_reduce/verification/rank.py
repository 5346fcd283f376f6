"""What one rank of ``ring-reduce verify`` does: joins the group, loads the file, checks each length of the group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ring_reduce.errors import VerifyError, text_of

from .collect import Request, verify_step
from .file import Orders, UserFile, load_file
from .report import Report
from .state import SEED


def run_rank(rank: int, orders: Orders, say: Callable[[str], None]) -> list[Report]:
    """One report for each length; every rank returns the same."""
    torch.set_num_threads(1)  # the ranks share the cores
    say(f"loading {orders.file}")
    with _named(f"{orders.file} could not be imported"):
        file = load_file(Path(orders.file))
    # A host name that resolves to nothing, as in some containers, would keep Gloo from starting.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{orders.store_path}",
        rank=rank,
        world_size=orders.world,
        timeout=timedelta(seconds=orders.timeout),
    )
    reports = [check_length(rank, orders, file, length, say) for length in orders.lengths]
    say("leaving")
    dist.barrier()
    dist.destroy_process_group()
    return reports


def check_length(
    rank: int, orders: Orders, file: UserFile, length: int, say: Callable[[str], None]
) -> Report:
    """With the first ``length`` micro-batches of each rank."""
    torch.manual_seed(SEED)
    with _named(f"{orders.file}: model() failed"):
        model = file.model()
    torch.manual_seed(SEED + 1 + rank)  # else ranks that draw their data would draw the same
    with _named(f"{orders.file}: batches() failed on rank {rank}"):
        batches = file.batches(rank, orders.world, orders.micro_batches)[:length]
    request = Request(
        model, batches, file.losses, file.step, orders.micro_batches, orders.sample, orders.tolerance
    )
    prefix = f"{length} of {orders.micro_batches} micro-batches: "
    return verify_step(request, None, lambda text: say(prefix + text))


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Says which part of the file an error comes from."""
    try:
        yield
    except VerifyError:
        raise
    except Exception as error:
        raise VerifyError(f"{what}: {text_of(error)}") from error
