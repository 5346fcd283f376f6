"""The ranks of a check: data goes over their process group, errors through its store.

An error must reach ranks that wait for this one in a collective of the user's step, and a collective of the same group
would meet theirs. So ranks agree through the store after each part, and use the group only when all are well.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ring_reduce.errors import VerifyError, is_echo, text_of

WAIT_S = 1800.0  # for the slowest rank, as torch.distributed's own default
_GRACE_S = 3.0  # for the rank that an error came from to say so first, and for the others to hear
_POLL_S = 0.02


class Ranks:
    """This process and the others of its group; alone if there is no group."""

    rank = 0
    world = 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value by rank, on rank 0; nothing elsewhere."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        return value

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Returns once every rank has ended the block; raises VerifyError on all of them if it raised on one."""
        try:
            yield
        except Exception as error:
            raise VerifyError(_text(self, what, error)) from error

    def run(self, function: Callable[[], Any], what: str) -> Any:
        """As :meth:`together`, for what may wait for another rank that has failed."""
        with self.together(what):
            return function()


class GroupRanks(Ranks):
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        from torch.distributed.distributed_c10d import _get_process_group_store

        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._root = dist.get_global_rank(group, 0)
        name = self.broadcast(f"ring_reduce.verify {uuid.uuid4().hex}")
        self._store = dist.PrefixStore(name, _own_connection(_get_process_group_store(group)))
        self._parts = 0

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, values, dst=self._root, group=self._group)
        return values or []

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=self._root, group=self._group)
        return values[0]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            text = self._report(what, error)
            if not isinstance(error, Exception):  # Ctrl-C, sys.exit()
                raise
            raise VerifyError(text) from error
        self._parts += 1
        self._store.set(f"{self._parts} {self.rank}", "")
        self._wait_for_all(what)

    def run(self, function: Callable[[], Any], what: str) -> Any:
        with self.together(what):
            return self._watch(function)

    def _watch(self, function: Callable[[], Any]) -> Any:
        """Runs it in a thread of its own: nothing ends a wait in a collective for a rank that will never come."""
        results: list[Any] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                with as_in(settings):
                    results.append(function())
            except BaseException as error:
                errors.append(error)

        settings = ThreadSettings()
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(call,), name="ring_reduce verify", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)
            self._raise_failure()
        if errors:
            raise errors[0]
        return results[0]

    def _wait_for_all(self, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        waiting_for = [rank for rank in range(self.world) if rank != self.rank]
        while waiting_for:
            waiting_for = [rank for rank in waiting_for if not self._store.check([f"{self._parts} {rank}"])]
            if not waiting_for:
                return
            self._raise_failure()
            if time.monotonic() > deadline:
                raise VerifyError(
                    f"rank {self.rank}: no word from rank {waiting_for} for {WAIT_S:.0f} s, since {what}; is it alive?"
                )
            time.sleep(_POLL_S)

    def _report(self, what: str, error: BaseException) -> str:
        """Tells the others of an error of this rank, and returns the text that all raise: that of the first to fail."""
        try:
            if is_echo(error):
                self._wait_for(["failure"], _GRACE_S)
            if not self._store.check(["failure"]) and self._store.add("failures", 1) == 1:
                self._store.set("failure", _text(self, what, error))
            return self._failure()
        except RuntimeError:  # the store is gone, and with it whom to tell
            return _text(self, what, error)

    def _raise_failure(self) -> None:
        if self._store.check(["failure"]):
            raise VerifyError(self._failure())

    def _failure(self) -> str:
        """The text that all raise. Returns when all have it, since the store may end with this process."""
        text = bytes(self._store.get("failure")).decode()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"seen {self.rank}", "")
            self._wait_for([f"seen {rank}" for rank in range(self.world)], _GRACE_S)
        return text

    def _wait_for(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _own_connection(store: Any) -> Any:
    """A connection of a store keeps all others off while one waits, and a step may wait: for a new group, say."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # an older torch, and stores that are no connection
        return store


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """Those of ``group``, or of all processes; this process alone where torch.distributed is not in use.

    Raises ValueError if this process is not in ``group``.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    members = group if group is not None else dist.group.WORLD
    assert members is not None  # there is one after init_process_group
    if dist.get_rank(members) < 0:
        raise ValueError("this process is not a member of the group; call verify on its members only")
    return GroupRanks(members) if dist.get_world_size(members) > 1 else Ranks()


def _text(ranks: Ranks, what: str, error: BaseException) -> str:
    return (
        str(error) if isinstance(error, VerifyError) else f"rank {ranks.rank}: {what} raised {text_of(error)}"
    )


class ThreadSettings:
    """What torch keeps for each thread apart, as it is in this one."""

    def __init__(self) -> None:
        self.default_device = torch.get_default_device()
        self.cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        kinds = ("cpu", "cuda")
        self.autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)
        }


@contextlib.contextmanager
def as_in(settings: ThreadSettings) -> Iterator[None]:
    """Another thread's settings in this one."""
    if settings.cuda_device is not None:
        torch.cuda.set_device(settings.cuda_device)
    with contextlib.ExitStack() as stack:
        if settings.default_device != torch.get_default_device():
            stack.enter_context(settings.default_device)
        for kind, dtype in settings.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield
