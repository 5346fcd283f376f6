"""A rank that ends in the middle of making a ring, at each of its exchanges: all others say which one, in time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

import ring_reduce as rr
from group_rings import group_ring
from launch import Seat, Team, caught, spawn
from ring_reduce import bootstrap, bounded_store, group_start, meeting
from ring_reduce.bounded_store import BoundedStore
from ring_reduce.channel import Channel
from ring_reduce.group_links import GlooLinks

WORLD = 3
TIMEOUT_S = 1.5  # where it is the deadline that ends the wait
GRACE_S = 2.0
IN_TIME_S = 30.0  # far more than both
LONG_S = 60.0  # where it is not


@contextlib.contextmanager
def little_grace() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (bootstrap, bounded_store, group_start, meeting):
            stack.enter_context(mock.patch.object(module, "GRACE_S", GRACE_S))
        yield


@contextlib.contextmanager
def dying(owner: Any, method: str, when: Callable[[tuple[Any, ...]], bool]) -> Iterator[None]:
    """Ends this process where it would call ``method`` so."""
    original = getattr(owner, method)

    def die(*arguments: Any) -> Any:
        if when(arguments):
            os._exit(1)
        return original(*arguments)

    with mock.patch.object(owner, method, die):
        yield


def make_and_call(seat: Seat, transport: str, has_group: bool, timeout: float = TIMEOUT_S) -> None:
    store: Any = (
        dist.FileStore(str(seat.directory / f"store {seat.job}")) if has_group else seat.store
    )  # without the world: it would remove the file with the first ring
    seat.meet("start")  # from here the time counts
    with rr.Ring(
        store,
        rank=seat.rank,
        world=seat.world,
        name="x",
        timeout=timeout,
        transport=transport,
        _has_group=has_group,
    ) as ring:
        ring.all_reduce(np.ones(9))


def die_at_a_question(
    seat: Seat, transport: str, has_group: bool, timeout: float, victim: int, question: str
) -> Exception | None:
    """The victim ends before it asks the Store this."""
    fault: Any = contextlib.nullcontext()
    if seat.rank == victim:
        fault = dying(BoundedStore, "_ask", lambda arguments: question in arguments[1])
    with little_grace(), fault:
        return caught(lambda: make_and_call(seat, transport, has_group, timeout))


NO_CONNECTION = "RingTimeout: .* no connection to rank 0 in"
NO_ANSWER = "RingTimeout: .* no answer from rank 0 in"
NO_WORD = "RingTimeout: ring 'x', rank 0: no word from rank {} of 3 in"
# Gloo may be the first to give up.
NO_SIGN = "Ring(Timeout|Error): .* no sign of rank {} of 3 while the ring was connected"

# With a group the ranks meet first; then come shm's exchanges, or the connections of process_group.
QUESTIONS = [
    ("shm", False, 0, "set('ring_reduce/x/address", NO_CONNECTION),
    ("shm", True, 0, "set('ring_reduce/x/meeting/token", NO_ANSWER),
    ("shm", True, 1, "set('ring_reduce/x/meeting/hello", NO_WORD),
    ("shm", True, 2, "check(['ring_reduce/x/address", NO_WORD),
    ("process_group", True, 0, "set('ring_reduce/x/meeting/answer", NO_ANSWER),
    ("process_group", True, 1, "set('gloo/0/1'", NO_SIGN),
    ("process_group", True, 0, "get('gloo/0/1'", NO_SIGN),
    ("process_group", True, 2, "get('gloo/0/2'", NO_SIGN),
    ("process_group", True, 1, "set('here/1'", f"PeerLost: .* lost its connection to rank 1 |{NO_SIGN}"),
]


@pytest.mark.parametrize(
    ("transport", "has_group", "victim", "question", "expected"),
    QUESTIONS,
    ids=[f"{transport} {victim} {question}" for transport, _, victim, question, _ in QUESTIONS],
)
def test_a_rank_that_ends_at_a_question_to_the_store(
    transport: str, has_group: bool, victim: int, question: str, expected: str
) -> None:
    timeout = LONG_S if "PeerLost" in expected else TIMEOUT_S
    errors = spawn(
        WORLD,
        die_at_a_question,
        transport,
        has_group,
        timeout,
        victim,
        question,
        lost=[victim],
        timeout=IN_TIME_S,
    )
    check_named(errors, victim, expected)


def check_named(errors: list[Any], victim: int, expected: str) -> None:
    """All others raised what is ``expected``: an expression for type and text, with the victim for ``{}``."""
    for rank, error in enumerate(errors):
        if rank != victim:
            assert re.match(expected.replace("{}", str(victim)), f"{type(error).__name__}: {error}"), error


def die_at_a_message(seat: Seat, timeout: float, victim: int, method: str, number: int) -> Exception | None:
    """The victim ends before it sends, or receives, the message of this number."""
    left = [number]

    def at_last(_: tuple[Any, ...]) -> bool:
        left[0] -= 1
        return left[0] == 0

    with little_grace(), dying(Channel, method, at_last) if seat.rank == victim else contextlib.nullcontext():
        return caught(lambda: make_and_call(seat, "shm", False, timeout))


ENDED = "RingError: .*: rank {} ended while the ring was made"
ENDED_IN_A_CALL = r"PeerLost: rank {} ended \(killed, crashed or exited\) after 0 calls"

# Rank 0 hears two hellos, parts and readies, and sends two of what is agreed, six parts, and two of go.
MESSAGES = [
    (0, "receive", 1, f"{ENDED}|{NO_CONNECTION}"),  # who had not yet connected can't any more
    *((0, "receive", number, ENDED) for number in (3, 5)),
    *((0, "send", number, ENDED) for number in (1, 2, 3, 9)),
    (0, "send", 10, f"{ENDED}|{ENDED_IN_A_CALL}"),  # one has its ring
    (1, "send", 1, NO_WORD),
    *((1, "send", number, ENDED) for number in (2, 3)),
    *((2, "receive", number, ENDED) for number in (1, 2)),
    (2, "receive", 5, f"{ENDED}|{ENDED_IN_A_CALL}"),  # rank 0 may be slower to say go
]


@pytest.mark.parametrize(
    ("victim", "method", "number", "expected"),
    MESSAGES,
    ids=[f"{victim} {method} {number}" for victim, method, number, _ in MESSAGES],
)
def test_a_rank_that_ends_at_a_message(victim: int, method: str, number: int, expected: str) -> None:
    timeout = TIMEOUT_S if "RingTimeout" in expected else LONG_S
    errors = spawn(WORLD, die_at_a_message, timeout, victim, method, number, lost=[victim], timeout=IN_TIME_S)
    check_named(errors, victim, expected)


def die_with_the_store(seat: Seat) -> Exception | None:
    """Rank 0, which hosts the TCPStore, ends once it has heard all hellos."""
    if seat.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        seat.store.set("port", str(store.port).encode())
    else:
        store = dist.TCPStore("127.0.0.1", int(seat.store.get("port")), is_master=False)
    with dying(Channel, "send", lambda _: True) if seat.rank == 0 else contextlib.nullcontext():
        return caught(lambda: rr.Ring(store, rank=seat.rank, world=seat.world, name="x", timeout=LONG_S))


def test_rank_0_is_named_though_its_store_ends_with_it() -> None:
    check_named(spawn(WORLD, die_with_the_store, lost=[0], timeout=IN_TIME_S), 0, ENDED)


def connect_without_the_last(seat: Seat, stopped: bool) -> Exception | None:
    """The last rank ends between meeting and connecting, or is stopped there."""

    def connect(*arguments: Any) -> Any:
        if seat.rank == seat.world - 1:
            os.kill(os.getpid(), signal.SIGSTOP if stopped else signal.SIGKILL)
        return GlooLinks(*arguments)

    with little_grace(), mock.patch.object(group_start, "GlooLinks", connect):
        return caught(lambda: make_and_call(seat, "process_group", True))


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_rank_that_does_not_connect_is_named(stopped: bool) -> None:
    """By all with one text, and not after five times the timeout, as Gloo would."""
    with Team(WORLD) as team:
        team.begin(connect_without_the_last, stopped)
        errors = [team.answer(rank, IN_TIME_S) for rank in range(WORLD - 1)]
        if stopped:
            os.kill(team.processes[-1].pid, signal.SIGCONT)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert type(error) is rr.RingTimeout
        assert "no sign of rank 2 of 3 while the ring was connected" in str(error)
        assert "not all ranks were connected in 1.5 s" in str(error)


# ---- Ctrl-C while a rank waits for another


def interrupted(seat: Seat, where: str) -> str:
    """Rank 1 does not connect, or makes no call, until rank 0 was interrupted."""

    def wait(*arguments: Any) -> Any:
        if seat.rank == 1:
            seat.store.get("interrupted")
        else:
            seat.store.set("waiting", b"")
        return GlooLinks(*arguments) if where == "connecting" else None

    try:
        if where == "connecting":
            with mock.patch.object(group_start, "GlooLinks", wait):
                make_and_call(seat, "process_group", True, LONG_S)
        else:
            with group_ring(seat, timeout=LONG_S) as ring:
                ring.all_reduce(np.ones(9))
                wait()
                ring.all_reduce(np.ones(9))
    except BaseException as error:
        if seat.rank == 0:
            seat.store.set("interrupted", b"")
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("where", ["connecting", "a call"])
def test_ctrl_c_ends_a_wait_over_gloo_at_once(where: str) -> None:
    with Team(2) as team:
        team.begin(interrupted, where)
        team.wait_for("waiting")
        time.sleep(0.3)  # so that it does wait
        os.kill(team.processes[0].pid, signal.SIGINT)
        first, second = team.finish(timeout=IN_TIME_S)
    assert first == "KeyboardInterrupt: "
    assert second == "RingAborted: rank 0 aborted the ring: KeyboardInterrupt: "
