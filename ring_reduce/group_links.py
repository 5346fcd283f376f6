"""The process groups of a ring's own, over which its ranks send: never the caller's, whose order of calls is DDP's.

They are made from the backend's class and not by ``new_group``. That names a group by its ranks and by how many groups
this process has, which differs between ranks that are in different groups, and is the same again for a group made after
another was destroyed; either way ranks would meet under different keys of the store, or under old ones. Nor does
``destroy_process_group()`` then end them under the ring.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from .bootstrap import Member

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Tags of Gloo, which pairs up the messages of two ranks by them. NCCL has none.
_HOP, _RECORD, _NOTHING = 0, 1, 2

# Some 30 years. Gloo adds a timeout to its clock, in nanoseconds of 64 bits.
_LONGEST_S = 1e9

# That torch's watchdog waits longer than Gloo does for the record of the same call: it would end the process.
_WATCHDOG_GRACE_S = 30.0


class LinkError(Exception):
    """Another rank could not be heard, or reached."""

    def __init__(self, peer: int, what: str, waited_s: float, cause: str) -> None:
        super().__init__(f"{what}: {cause}")
        self.peer = peer
        self.what = what  # "segment 3 from rank 1"
        self.waited_s = waited_s
        self.cause = cause  # what the backend said


class Hop:
    """A message to the right and one from the left, under way."""

    def __init__(self, sent: Any, received: Any) -> None:
        self._sent = sent  # a Work; None: nothing to send, or done
        self._received = received

    def wait_received(self) -> None:
        """Until the message from the left is there; on a GPU its current stream waits."""
        if self._received is not None:
            self._received.wait()
            if self._sent is self._received:
                self._sent = None
            self._received = None

    def wait_sent(self) -> None:
        """Until what was sent may be overwritten; on a GPU its current stream waits."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None


class Links(Protocol):
    """How segments travel. All ranks make the same hops in the same order."""

    def hop(self, sent: torch.Tensor, received: torch.Tensor) -> Hop:
        """Starts one. Either tensor may be empty, then nothing goes that way."""

    def abort(self) -> None:
        """Ends hops that are under way, on all ranks as far as the backend can; from any thread."""

    def close(self) -> None:
        """Closes the connections, after the last hop."""


class GlooLinks:
    """Gloo over TCP, between CPU tensors; and the records by which ranks agree, whatever the ring's device."""

    def __init__(self, member: Member, store: dist.Store, timeout_s: float) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self._member = member
        self._store = store  # of which Gloo keeps only what is not Python
        # Point to point alone: a collective of Gloo runs in a thread of its own, for which the group's destructor
        # waits with the lock that the thread needs to let go of its tensors.
        self._group: Any = ProcessGroupGloo(
            PrefixStore("gloo", store),
            member.rank,
            member.world,
            timedelta(seconds=min(timeout_s, _LONGEST_S)),
        )

    def hop(self, sent: torch.Tensor, received: torch.Tensor) -> Hop:
        left, right = neighbours(self._member)
        incoming = _started(left, self._group.recv, received, _HOP) if received.numel() else None
        outgoing = _started(right, self._group.send, sent, _HOP) if sent.numel() else None
        return Hop(outgoing, incoming)

    def exchange(self, record: bytes) -> Exchange:
        """Starts to tell all other ranks ``record``, as long as theirs."""
        return Exchange(self._group, self._member, record)

    def abort(self) -> None:
        # Gloo's own abort() and shutdown() leave waits as they are. One that runs into its deadline closes all
        # connections of its group, which ends all other waits for them, here and on the ranks at their other ends.
        # It takes a connection that still stands.
        import torch

        for peer in others(self._member):
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, _NOTHING).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self.abort()  # at once, and not when the last reference is gone


class NcclLinks:
    """NCCL between GPUs, on its own streams."""

    def __init__(self, member: Member, store: dist.Store, timeout_s: float, device: torch.device) -> None:
        from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupNCCL

        self._member = member
        self._device = device
        store = PrefixStore("nccl", own_connection(store))
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=min(timeout_s, _LONGEST_S) + _WATCHDOG_GRACE_S)
        self._backend = ProcessGroupNCCL(store, member.rank, member.world, options)
        self._group = ProcessGroup(store, member.rank, member.world)
        self._group._set_default_backend(ProcessGroup.BackendType.NCCL)
        self._group._register_backend(device, ProcessGroup.BackendType.NCCL, self._backend)

    def hop(self, sent: torch.Tensor, received: torch.Tensor) -> Hop:
        if not sent.numel() and not received.numel():
            return Hop(None, None)
        left, right = neighbours(self._member)
        # In one batch, as dist.batch_isend_irecv makes it: all ranks sending first would wait for each other.
        self._group._start_coalescing(self._device)
        if sent.numel():
            self._group.send([sent], right, 0)
        if received.numel():
            self._group.recv([received], left, 0)
        work = self._group._end_coalescing(self._device)
        return Hop(work, work)

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)  # hops may be enqueued
        self._backend.shutdown()


class Exchange:
    """A record of every rank for every other, under way."""

    def __init__(self, group: Any, member: Member, record: bytes) -> None:
        import torch

        self.bytes_sent = len(record) * (member.world - 1)
        self._record = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        self._records = [torch.empty_like(self._record) for _ in range(member.world)]
        self._records[member.rank] = self._record
        peers = others(member)
        self._receives = [(o, _started(o, group.recv, self._records[o], _RECORD)) for o in peers]
        self._sends = [(o, _started(o, group.send, self._record, _RECORD)) for o in peers]

    def wait(self) -> list[bytes]:
        """The records of all ranks. ``LinkError`` names the first that sent none."""
        for rank, work in [*self._receives, *self._sends]:
            waiting(rank, f"a word from rank {rank}", work.wait)
        return [bytes(record.numpy()) for record in self._records]


def own_connection(store: dist.Store) -> dist.Store:
    """``store`` over a connection of its own, where torch can make one. NCCL waits for its first key in C++, and would
    keep whoever looks for failures over the same connection waiting."""
    unbound: Any = store
    try:
        return unbound.clone()  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # before torch had it; a store written in Python, which has none
        return store


def neighbours(member: Member) -> tuple[int, int]:
    """Left, from which this rank receives, and right, to which it sends."""
    return (member.rank - 1) % member.world, (member.rank + 1) % member.world


def others(member: Member) -> list[int]:
    """All ranks but this one."""
    return [rank for rank in range(member.world) if rank != member.rank]


def _started(peer: int, start: Callable[..., Any], tensor: torch.Tensor, tag: int) -> Any:
    """The work of a ``send`` or ``recv``. ``LinkError`` where the connection is closed already."""
    try:
        return start([tensor], peer, tag)
    except RuntimeError as error:
        raise LinkError(peer, f"a connection to rank {peer}", 0.0, first_line(error)) from None


def waiting(peer: int, what: str, wait: Callable[[], object]) -> float:
    """Calls ``wait``; the seconds that it took. ``LinkError`` for what a backend raises."""
    start = time.monotonic()
    try:
        wait()
    except RuntimeError as error:
        raise LinkError(peer, what, time.monotonic() - start, first_line(error)) from None
    return time.monotonic() - start


def first_line(error: BaseException) -> str:
    """Without the traces that torch puts behind it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
