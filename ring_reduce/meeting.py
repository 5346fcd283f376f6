"""How ranks that may be on several hosts tell each other what they can do: one exchange through their Store.

Rank 0 writes a token and waits for the hello of every other rank under it; then it writes them all as its answer. A
store may hold the tokens and answers of earlier rings, so each hello has a number of its own, and a rank believes an
answer only if that number is in it; until then it looks for a newer token.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import bootstrap
from .bootstrap import GRACE_S, Member, Store
from .channel import dial, json_object, raise_refusal, refusal_of
from .errors import RingError, RingTimeout, text_of

Hello = dict[str, Any]

_POLL_S = 0.005


@dataclass(frozen=True)
class Meeting:
    """The hellos of all ranks, by rank, with ``near`` in each: whether it is on rank 0's host, proved by connecting."""

    token: str  # of this meeting alone
    hellos: list[Hello]


def meet(member: Member, store: Store, timeout: float, hello: Hello) -> Meeting:
    """Gives ``hello`` to all ranks. ``RingTimeout`` names who did not come; the same on all that did."""
    return (
        _as_host(member, store, timeout, hello)
        if member.rank == 0
        else _as_guest(member, store, timeout, hello)
    )


def _as_host(member: Member, store: Store, timeout: float, hello: Hello) -> Meeting:
    token, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    hellos: list[Hello | None] = [{**hello, "near": True}, *[None] * (member.world - 1)]
    answer: dict[str, Any] = {"hellos": hellos}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + _address(token))
        listener.listen(max(16, member.world))  # a connection needs no accept() to prove that it can be made
        _write(member, store, "token", {"token": token, "boot_id": bootstrap.boot_id()})
        is_last = False
        try:
            while None in hellos and not is_last:
                is_last = time.monotonic() >= deadline  # and who has come by now has come
                came = _collect(member, store, token, hellos)
                if "error" not in answer and _refusals(hellos):
                    answer |= _refusals(hellos)[0]
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                if (
                    "error" in answer and came
                ):  # who is here hears it at once, and this rank stays for who is not
                    _write(member, store, f"answer/{token}", answer)
                time.sleep(_POLL_S if None in hellos else 0)
        except BaseException as error:  # of a signal's handler, say
            with contextlib.suppress(Exception):
                _write(member, store, f"answer/{token}", answer | _aborted(member, error))
            raise
    if None in hellos and "error" not in answer:
        missing = ", ".join(str(rank) for rank, said in enumerate(hellos) if said is None)
        answer["kind"] = "timeout"
        answer["error"] = (
            f"{member.who}: no word from rank {missing} of {member.world} in {timeout:.1f} s; did every rank start, "
            f"and make the ring?"
        )
    _write(member, store, f"answer/{token}", answer)
    raise_refusal(answer)
    return Meeting(token, [said for said in hellos if said is not None])


def _collect(member: Member, store: Store, token: str, hellos: list[Hello | None]) -> bool:
    """Whether any rank that had not yet come has said its hello."""
    came = False
    for rank, said in enumerate(hellos):
        key = _key(member, f"hello/{token}/{rank}")
        if said is None and store.check([key]):
            hellos[rank], came = json.loads(bytes(store.get(key))), True
    return came


def _refusals(hellos: list[Hello | None]) -> list[dict[str, Any]]:
    """Of ranks that came only to say why there is no ring, see refusal.py."""
    return [
        {"error": said["error"], "kind": said["kind"]}
        for said in hellos
        if said is not None and "error" in said
    ]


def _as_guest(member: Member, store: Store, timeout: float, hello: Hello) -> Meeting:
    number, greeted = uuid.uuid4().hex, ""
    deadline = time.monotonic() + timeout + GRACE_S  # rank 0 knows who is missing, and says so first
    try:
        while time.monotonic() < deadline:
            # The answer last of the two: a token that is newer comes after it.
            record = _read(member, store, _key(member, "token"))
            answer = _read(member, store, _key(member, f"answer/{greeted}")) if greeted else None
            said = (
                answer["hellos"][member.rank]
                if answer is not None and len(answer["hellos"]) > member.rank
                else None
            )
            if answer is not None and said is not None and said["number"] == number:
                raise_refusal(answer)
                return Meeting(greeted, answer["hellos"])
            if record is not None and record["token"] != greeted:
                greeted = record["token"]
                mine = {**hello, "near": _is_near(record), "number": number}
                _write(member, store, f"hello/{greeted}/{member.rank}", mine)
            time.sleep(_POLL_S)
    except RingError:
        raise
    except BaseException as error:  # of a signal's handler, say
        if greeted:
            last_words = {**_aborted(member, error), "number": number}
            with contextlib.suppress(Exception):
                _write(member, store, f"hello/{greeted}/{member.rank}", last_words)
        raise
    raise RingTimeout(
        f"{member.who}: no answer from rank 0 in {timeout:.1f} s while the ring was made; did it start?"
    )


def _aborted(member: Member, error: BaseException) -> dict[str, Any]:
    return refusal_of(f"rank {member.rank} aborted the ring: {text_of(error)}", "aborted")


def _is_near(record: dict[str, Any]) -> bool:
    """Whether this rank is on rank 0's host, within reach of its sockets, and of the same user."""
    if record["boot_id"] != bootstrap.boot_id():
        return False
    channel = dial(_address(record["token"]))
    if channel is None:
        return False
    try:
        return channel.peer_uid() == os.geteuid()
    finally:
        channel.close()


def _address(token: str) -> str:
    return f"ring_reduce-meeting-{token}"


def _key(member: Member, what: str) -> str:
    return f"ring_reduce/{member.name}/meeting/{what}"


def _write(member: Member, store: Store, what: str, words: Mapping[str, Any]) -> None:
    store.set(_key(member, what), json.dumps(words).encode())


def _read(member: Member, store: Store, key: str) -> dict[str, Any] | None:
    if not store.check([key]):
        return None
    try:
        return json_object(bytes(store.get(key)))
    except ValueError:
        raise RingError(
            f"{member.who}: what the Store holds as {key!r} is no word of rank 0; does anything else write there, or "
            f"another version of ring_reduce?"
        ) from None
