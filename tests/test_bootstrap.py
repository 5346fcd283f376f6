"""How ranks find each other: stores, groups, start methods, and every way in which one does not come."""

from __future__ import annotations

import codecs
import contextlib
import os
import socket
import stat
import threading
import time
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ring_reduce as rr
from conftest import Run
from launch import Seat, Team, caught, spawn
from ring_reduce import _core, bootstrap
from stores import DictStore


def total(seat: Seat) -> float:
    with seat.ring() as ring:
        return float(ring.all_reduce(np.full(1000, 1.0 + seat.rank), rr.MEAN)[-1])


@pytest.mark.parametrize("world", [1, 2, 8])
def test_spawned_ranks(world: int) -> None:
    assert spawn(min(world, 3), total, start="spawn") == [(1 + min(world, 3)) / 2] * min(world, 3)
    assert spawn(world, total) == [(1 + world) / 2] * world


def forked_team(seat: Seat, world: int) -> list[float]:
    """In a process without torch's threads, which a fork would lose."""
    with Team(world, "fork") as team:
        results: list[float] = team.run(total)
    return results


def test_forked_ranks() -> None:
    assert spawn(1, forked_team, 3, start="spawn") == [[2.0] * 3]


def stores_of_torch(seat: Seat, kind: str, port: int) -> float:
    import torch.distributed as dist

    store: Any
    if kind == "FileStore":
        store = dist.FileStore(str(seat.directory / f"file {seat.job}"), seat.world)
    else:
        store = dist.TCPStore("127.0.0.1", port, seat.world, is_master=seat.rank == 0)
    if kind == "PrefixStore":
        store = dist.PrefixStore("a/b", store)
    with rr.Ring(store, rank=seat.rank, world=seat.world, timeout=60) as ring:
        value = float(ring.all_reduce(np.full(9, 1.0))[0])
    seat.meet("done")  # the master's store lives until all have left
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("kind", ["FileStore", "TCPStore", "PrefixStore"])
def test_stores_of_torch(run: Run, kind: str) -> None:
    assert run(3, stores_of_torch, kind, free_port()) == [3.0] * 3


def test_any_object_with_three_methods_is_a_store() -> None:
    """And ranks may be threads of one process."""
    store, sums = DictStore(), dict[int, float]()

    def run(rank: int) -> None:
        with rr.Ring(store, rank=rank, world=3, timeout=60) as ring:
            sums[rank] = float(ring.all_reduce(np.full(1000, 2.0))[0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {0: 6.0, 1: 6.0, 2: 6.0}


@contextlib.contextmanager
def gloo(seat: Seat) -> Any:
    import torch.distributed as dist

    path = seat.directory / f"gloo {seat.job}"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=seat.rank, world_size=seat.world)
    try:
        yield dist
    finally:
        dist.destroy_process_group()


def groups_of_torch(seat: Seat) -> list[Any]:
    with gloo(seat) as dist:
        results: list[Any] = []
        with rr.Ring.from_group() as ring:
            results += [ring.rank, ring.world, float(ring.all_reduce(np.ones(5))[0])]
        groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
        for group in groups:  # overlapping: rank 2 is in both, as rank 1 of each
            if dist.get_rank(group) < 0:
                error = caught(partial(rr.Ring.from_group, group))
                assert isinstance(error, ValueError)
                assert "not a member" in str(error)
                continue
            with rr.Ring.from_group(group) as ring:
                value = float(ring.all_reduce(np.full(5, 1.0 + seat.rank))[0])
                results.append((ring.rank, ring.world, value))
        return results


def test_rings_of_torch_groups(run: Run) -> None:
    zero, one, two = run(3, groups_of_torch)
    assert zero == [0, 3, 3.0, (0, 2, 4.0)]
    assert one == [1, 3, 3.0, (0, 2, 5.0)]
    assert two == [2, 3, 3.0, (1, 2, 4.0), (1, 2, 5.0)]


def test_a_ring_of_a_group_needs_one() -> None:
    error = caught(lambda: rr.Ring.from_group())
    assert isinstance(error, RuntimeError)
    assert "init_process_group" in str(error)


def overlapping_rings(seat: Seat) -> list[float]:
    """Rings over {0, 1} and {1, 2} in use at once, and one over all."""
    with contextlib.ExitStack() as rings:
        mine = [rings.enter_context(seat.ring(name="all"))]
        for ranks in ((0, 1), (1, 2)):
            if seat.rank in ranks:
                ring = rr.Ring(
                    seat.store, rank=ranks.index(seat.rank), world=2, name=f"some {ranks}", timeout=60
                )
                mine.append(rings.enter_context(ring))
        works = [ring.all_reduce(np.full(5000, 1.0 + seat.rank), async_op=True) for ring in reversed(mine)]
        return [float(work.wait()[0]) for work in works]


def test_several_rings_at_once(run: Run) -> None:
    assert run(3, overlapping_rings) == [[3.0, 6.0], [5.0, 3.0, 6.0], [5.0, 6.0]]


def one_name_again_and_again(seat: Seat) -> list[float]:
    """A restarted job finds an old address in the store. Rank 0 is late, so that the others do find it."""
    sums = []
    for i in range(4):
        if seat.rank == 0 and i > 0:
            time.sleep(0.1)
        with seat.ring(name="again") as ring:
            sums.append(float(ring.all_reduce(np.full(3, float(i)))[0]))
    return sums


def test_a_name_may_be_used_again(run: Run) -> None:
    assert run(3, one_name_again_and_again) == [[0.0, 3.0, 6.0, 9.0]] * 3


def absent(seat: Seat, missing: list[int]) -> Exception | None:
    return None if seat.rank in missing else caught(lambda: seat.ring(timeout=1.0))


@pytest.mark.parametrize(
    ("world", "missing", "text"), [(3, [2], "rank 2 of 3"), (4, [1, 3], "rank 1, 3 of 4")]
)
def test_a_rank_that_never_arrives_is_named(run: Run, world: int, missing: list[int], text: str) -> None:
    errors = run(world, absent, missing)
    for rank in set(range(world)) - set(missing):
        assert type(errors[rank]) is rr.RingTimeout
        assert text in str(errors[rank])
        assert "in 1.0 s" in str(errors[rank])
        assert str(errors[rank]) == str(errors[0])


def test_rank_0_never_arrives(run: Run) -> None:
    errors = run(3, absent, [0])
    for rank in (1, 2):
        assert type(errors[rank]) is rr.RingTimeout
        assert f"rank {rank}: no connection to rank 0 in 1.0 s" in str(errors[rank])
        assert "did rank 0 start" in str(errors[rank])


def disagreeing(seat: Seat, options: list[dict[str, Any]]) -> Exception | None:
    arguments: dict[str, Any] = {"rank": seat.rank, "world": seat.world, "timeout": 20.0}
    return caught(lambda: rr.Ring(seat.store, **{**arguments, **options[seat.rank]}))


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ([{}, {}, {"world": 4}], ["rank 2", "rank 0", "4", "3"]),
        ([{"world": 2}, {}, {}], ["rank 0", "2", "3"]),
        ([{}, {"rank": 2}, {}], ["rank 2"]),
        ([{}, {}, {"_tuning": {"depth": 5}}], ["depth is 4 on rank 0 and 5 on rank 2"]),
        (
            [{}, {"_tuning": {"segment_bytes": 4096}}, {}],
            ["segment_bytes is 262144 on rank 0 and 4096 on rank 1"],
        ),
    ],
)
def test_ranks_that_disagree_at_the_start(run: Run, options: list[dict[str, Any]], texts: list[str]) -> None:
    errors = run(3, disagreeing, options)
    for error in errors:
        assert isinstance(error, rr.RingError)
        for text in texts:
            assert text in str(error)
    assert type(errors[0]) is rr.RingMismatch


def other_version(seat: Seat) -> Exception | None:
    with mock.patch.object(_core, "WIRE_VERSION", _core.WIRE_VERSION + seat.rank):
        return caught(lambda: seat.ring())


def test_ranks_of_different_versions(run: Run) -> None:
    for error in run(2, other_version):
        assert type(error) is rr.RingMismatch
        assert "wire_version" in str(error)
        assert "same version" in str(error)


def lanes_of(seat: Seat, wanted: list[int]) -> int:
    with seat.ring(lanes=wanted[seat.rank]) as ring:
        return ring.lanes


def test_the_fewest_lanes_that_a_rank_wants(run: Run) -> None:
    assert run(3, lanes_of, [3, 2, 4]) == [2] * 3


def on_another_host(seat: Seat) -> Exception | None:
    host = "another" if seat.rank == 1 else bootstrap.boot_id()
    with mock.patch.object(bootstrap, "boot_id", return_value=host):
        return caught(lambda: seat.ring(timeout=20.0))


def test_a_rank_on_another_host_is_an_error_on_all(run: Run) -> None:
    for error in run(3, on_another_host):
        assert isinstance(error, rr.RingError)
        assert "rank 1 is on another host than rank 0" in str(error)


def _die(_: int) -> None:
    os._exit(1)


def die_while_the_ring_is_made(seat: Seat, victim: int) -> Exception | None:
    if seat.rank == victim:
        # After its hello, when it has been told what is agreed.
        with mock.patch.object(_core, "create_shared_memory", side_effect=_die):
            seat.ring()
    return caught(lambda: seat.ring())


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_while_the_ring_is_made(victim: int) -> None:
    errors = spawn(3, die_while_the_ring_is_made, victim, lost={victim}, timeout=30)
    for rank in {0, 1, 2} - {victim}:
        assert isinstance(errors[rank], rr.RingError)
        assert f"rank {victim} ended while the ring was made" in str(errors[rank])


def as_another_user(seat: Seat) -> Exception | None:
    codecs.lookup("ascii")  # a module, which another user may not be allowed to read
    if seat.rank == 1:
        os.seteuid(65534)
    try:
        return caught(lambda: seat.ring(timeout=1.0))
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a rank as another user: sudo make test")
def test_another_user_is_turned_away() -> None:
    """An abstract socket has no permissions: anybody on the host can connect."""
    with Team(2) as team:
        for path in (team.directory, team.directory.parent):
            os.chmod(path, stat.S_IMODE(path.stat().st_mode) | 0o755)
        team.begin(as_another_user)
        first, second = team.finish()
    assert type(first) is rr.RingTimeout
    assert "rank 1" in str(first)
    assert isinstance(second, rr.RingError)
    assert "user" in str(second)


def test_a_start_that_failed_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    assert type(caught(lambda: rr.Ring(DictStore(), rank=0, world=2, timeout=0.1))) is rr.RingTimeout
    assert os.listdir("/proc/self/fd") == before
