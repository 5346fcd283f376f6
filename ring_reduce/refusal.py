"""Arguments that one rank alone gets wrong: it tells the others, which would wait for it until their deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .bootstrap import GRACE_S, Hub, Member, Store, connect, heard
from .bounded_store import BoundedStore
from .channel import Channel, refusal_of
from .errors import text_of
from .meeting import meet


@contextlib.contextmanager
def told_to_all(member: Member, store: Store | None, has_group: bool) -> Iterator[None]:
    """What is raised in here is an error on all ranks, with its text. Only where ``member`` and ``store`` are right.

    This rank stays for the others for up to ``GRACE_S``, not for the timeout: all of them may have the same wrong
    argument, and then none comes. Who comes later waits.
    """
    try:
        yield
    except Exception as error:
        if store is not None and member.world > 1:
            with contextlib.suppress(Exception):  # the error itself counts, whatever the Store says
                _tell(member, store, has_group, f"{member.who}: {text_of(error)}")
        raise


def _tell(member: Member, store: Store, has_group: bool, text: str) -> None:
    """Where the others wait for this rank, which is where ``open_engine`` lets them meet."""
    bounded = BoundedStore(member.who, store, GRACE_S)
    refusal = refusal_of(text, "error")
    try:
        if has_group:
            # Those that are not rank 0 wait GRACE_S longer than they are told to.
            meet(member, bounded, GRACE_S if member.rank == 0 else 0.0, refusal)
        elif member.rank == 0:
            _tell_as_hub(Hub(member, bounded, GRACE_S), refusal)
        else:
            _tell_hub(member, connect(member, bounded, 0.0), refusal)
    finally:
        bounded.close()


def _tell_as_hub(hub: Hub, refusal: dict[str, Any]) -> None:
    try:
        hub.gather_hellos(refusal)
    finally:
        hub.refuse(refusal)  # who is late reads it in the Store
        hub.close()


def _tell_hub(member: Member, hub: Channel, refusal: dict[str, Any]) -> None:
    heard.add((member.rank, hub.address))
    hub.send({"rank": member.rank, "world": member.world, "lanes": 1, **refusal})
    hub.close()
