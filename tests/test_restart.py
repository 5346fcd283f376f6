"""A job that starts again on the store of one that failed: its ranks meet, and hear nothing of the earlier try."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, Team, caught
from ring_reduce import _core, bootstrap
from stores import DictStore
from test_examples import EXAMPLES, TORCHRUN, free_port, run_recipe, start


def start_again(seat: Seat) -> tuple[str, float]:
    """Rank 0 gives up its first try; rank 1 comes for the second one, and before rank 0 does."""
    first = ""
    if seat.rank == 0:
        first = str(caught(lambda: seat.ring(name="again", timeout=0.5)))
    seat.meet("refused")
    if seat.rank == 0:
        time.sleep(1)
    with seat.ring(name="again", timeout=20) as ring:
        return first, float(ring.all_reduce(np.ones(3))[0])


def test_a_refusal_of_an_earlier_try_is_not_taken_for_one_s_own(run: Run) -> None:
    (refused, total), (_, other) = run(2, start_again)
    assert "no word from rank 1 of 2 in 0.5 s" in refused
    assert total == other == 2


def come_late(seat: Seat) -> Exception | None:
    """Rank 0 gives up and tries no more; rank 1 comes after that."""
    if seat.rank == 0:
        error = caught(lambda: seat.ring(timeout=0.5))
        seat.meet("refused")
        return error
    seat.meet("refused")
    return caught(lambda: seat.ring(timeout=20))


def test_a_rank_that_comes_too_late_hears_why_there_is_no_ring(run: Run) -> None:
    first, second = run(2, come_late)
    assert type(first) is type(second) is rr.RingTimeout
    assert str(first) == str(second)


def fail_and_try_again(seat: Seat) -> tuple[str, float]:
    """Rank 1 fails. Rank 0 is slow to write why there is no ring, and to write the next one's address."""
    refuse = bootstrap.Hub.refuse

    def refuse_late(hub: bootstrap.Hub, refusal: dict[str, Any]) -> None:
        time.sleep(0.5)
        refuse(hub, refusal)

    with mock.patch.object(bootstrap.Hub, "refuse", refuse_late), contextlib.ExitStack() as stack:
        if seat.rank == 1:
            failing = mock.patch.object(_core, "create_shared_memory", side_effect=MemoryError("none left"))
            stack.enter_context(failing)
        error = caught(lambda: seat.ring(name="again", timeout=20))
    time.sleep(0.3 if seat.rank == 0 else 0)
    with seat.ring(name="again", timeout=20) as ring:
        return str(error), float(ring.all_reduce(np.ones(3))[0])


def test_a_rank_that_failed_may_try_again_at_once(run: Run) -> None:
    for error, total in run(3, fail_and_try_again):
        assert "none left" in error
        assert total == 3


def fail_and_come_back_first(seat: Seat) -> tuple[str, float]:
    """Rank 1 fails, and is back before rank 0, longer than it would hesitate to believe an old refusal."""
    with contextlib.ExitStack() as stack:
        if seat.rank == 1:
            failing = mock.patch.object(_core, "create_shared_memory", side_effect=MemoryError("none left"))
            stack.enter_context(failing)
        error = caught(lambda: seat.ring(name="again"))
    time.sleep(1.0 if seat.rank == 0 else 0)
    hasty = mock.patch.object(bootstrap, "GRACE_S", 0.2) if seat.rank == 1 else contextlib.nullcontext()
    with hasty, seat.ring(name="again") as ring:
        return str(error), float(ring.all_reduce(np.ones(3))[0])


def test_a_rank_that_failed_does_not_hear_of_it_again(run: Run) -> None:
    for error, total in run(2, fail_and_come_back_first):
        assert "none left" in error
        assert total == 2


def test_a_rank_that_waits_for_a_new_address_says_so() -> None:
    member, store = bootstrap.Member(1, 2, "x"), DictStore()
    record = {"address": "of an earlier try", "boot_id": bootstrap.boot_id()}
    store.set(bootstrap.address_key(member), json.dumps(record).encode())
    with (
        mock.patch.object(bootstrap, "heard", {(1, "of an earlier try")}),
        mock.patch.object(bootstrap, "GRACE_S", 0.1),
        pytest.raises(
            rr.RingTimeout, match="no address since an earlier try, which failed; did rank 0 start"
        ),
    ):
        bootstrap.connect(member, store, 0.1)


# ---- torchrun's restarts


def join(kind: str, attempt: int) -> rr.Ring:
    """A ring of the environment that torchrun gives to a rank."""
    import torch.distributed as dist

    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
    if kind == "store":
        return rr.Ring(store, rank=rank, world=world, timeout=60)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=world
    )
    return rr.Ring.from_group(transport=kind, timeout=60)


def one_attempt(
    seat: Seat, kind: str, port: int, attempt: int, victim: int | None
) -> tuple[float, Exception | None]:
    """A sum, and what ends the calls behind it. The victim is killed when all have that sum."""
    os.environ.update(
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT=str(attempt),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    ring = join(kind, attempt)
    value = float(ring.all_reduce(np.full(3, 1.0 + attempt))[0])
    seat.meet("summed")
    if seat.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim is None:
        ring.close()
        return value, None

    def forever() -> None:
        while True:
            ring.all_reduce(np.ones(1 << 18))

    return value, caught(forever)


@pytest.mark.parametrize("kind", ["store", "shm", "process_group"])
def test_attempts_on_one_store_of_an_agent(kind: str) -> None:
    """What torchrun does: its store lives on, with all that earlier attempts wrote, and every rank is a new process."""
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt, victim in enumerate((1, 0, 2, None)):
        with Team(3) as team:
            lost = () if victim is None else {victim}
            results = team.run(one_attempt, kind, agent.port, attempt, victim, lost=lost)
        for rank in {0, 1, 2} - set(lost):
            value, error = results[rank]
            assert value == 3.0 * (1 + attempt)
            assert victim is None or type(error) is rr.PeerLost, error


def test_torchrun_starts_a_killed_job_again_and_no_bit_differs(tmp_path: Path, run: Run) -> None:
    """The weights at the end are those of three ranks of which none was killed."""
    example = EXAMPLES / "elastic.py"
    errors, (lived, *_) = zip(*run(3, run_recipe, example, free_port()), strict=True)
    assert errors == (None,) * 3
    assert "attempt 0: went from step 0 to 20" in lived
    killed = start(*TORCHRUN, "3", "--max-restarts", "1", str(example), str(tmp_path))
    assert killed.returncode == 0, killed.stderr
    assert "attempt 1: went from step 10 to 20" in killed.stdout
    digests = [re.findall("sha256 of the weights (.*)", said) for said in (lived, killed.stdout)]
    assert digests[0] == digests[1] != []
