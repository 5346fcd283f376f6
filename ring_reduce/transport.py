"""Which transport a ring uses: the first that all of its ranks can, or the one that they ask for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from .bootstrap import Member, Store
from .bounded_store import BoundedStore
from .errors import PeerLost, RingError, RingMismatch, RingTimeout
from .handshake import check_equal
from .meeting import Hello, Meeting, meet
from .refusal import told_to_all
from .shm import Tuning, open_shm

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from .engine import Engine

TRANSPORTS = ("auto", "shm", "cuda_ipc", "process_group")


def open_engine(
    member: Member,
    store: Store | None,
    timeout: float,
    *,
    transport: str,
    device: torch.device | None,
    lanes: int | None,
    algorithm: str,
    tuning: dict[str, Any],
    has_group: bool,
) -> Engine:
    """Makes the ring's engine together with all other ranks; an error of one is an error on all.

    ``store`` is a torch.distributed one where ``has_group``; else ranks meet in it on one host, and there is no
    process_group. ``ValueError`` for a transport that there can't be for such a ring.
    """
    with told_to_all(member, store, has_group):
        check_request(transport, device, algorithm, has_group)
        hello = {
            "wire_version": _core.WIRE_VERSION,
            "transport": transport,
            "algorithm": algorithm,
            "device": "cpu" if device is None else device.type,
            "tuning": {key: tuning.get(key) for key in ("segment_bytes", "window")},
        }
        if has_group:
            hello["no_process_group"] = process_group_problem(on_gpu=device is not None)
            hello["gpu"] = _gpu_uuid(device)
    bounded = BoundedStore(member.who, store, timeout) if store is not None else None
    opener = _Opener(member, store, bounded, timeout, device, lanes, algorithm, tuning)
    try:
        if not has_group or bounded is None or member.world == 1:
            if transport == "process_group":
                return opener.process_group(None, "it was asked for")
            return _alone(opener, transport)
        met = meet(member, bounded, timeout, hello)
        check_equal(
            member,
            met.hellos[0],
            dict(enumerate(met.hellos)),
            {"wire_version", "transport", "algorithm", "device", "tuning"},
        )
        return _first_that_all_can(opener, met, transport)
    finally:
        if bounded is not None:
            bounded.close()


def check_request(transport: str, device: Any, algorithm: str, has_group: bool) -> None:
    """``ValueError`` where this rank alone can tell that there is no such ring."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}; there are {', '.join(TRANSPORTS)}")
    if transport == "shm" and device is not None:
        raise ValueError(
            f"transport='shm' is for CPU tensors, and device is {device}; use cuda_ipc or process_group"
        )
    if transport == "cuda_ipc" and device is None:
        raise ValueError(
            "transport='cuda_ipc' is for GPUs, and this ring's device is the CPU; pass device='cuda'"
        )
    if transport == "process_group" and not has_group:
        raise ValueError(
            "transport='process_group' needs a group of torch.distributed; use Ring.from_group()"
        )
    if transport == "process_group" and algorithm == "direct":
        raise ValueError(
            "algorithm='direct' reads the memory of other ranks, which process_group can't; use 'ring'"
        )


def ring_device(device: torch.device | str | None) -> torch.device | None:
    """The CUDA device that is meant; None for the CPU. ``ValueError`` for a device of another kind."""
    if device is None:
        return None
    import torch

    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {error}") from None
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}; a ring's tensors lie on the CPU or on a CUDA device")
    if named.type == "cpu":
        return None
    return named if named.index is not None else torch.device("cuda", torch.cuda.current_device())


def group_has_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a process group has a backend for CPU tensors."""
    import torch.distributed as dist

    config: str = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return any(entry.split(":")[0] == "cpu" for entry in config.split(","))


def process_group_problem(*, on_gpu: bool) -> str | None:
    """Why this process can't have groups of the ring's own; None if it can."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch was built without Gloo"
    if on_gpu and not dist.is_nccl_available():
        return "this torch was built without NCCL"
    if on_gpu and importlib.util.find_spec("triton") is None:
        return "there is no Triton, in which the passes on a GPU are written"
    return None


class _Opener:
    """What each transport needs of the arguments of a ring."""

    def __init__(
        self,
        member: Member,
        store: Any,
        bounded: Store | None,
        timeout: float,
        device: torch.device | None,
        lanes: int | None,
        algorithm: str,
        tuning: dict[str, Any],
    ) -> None:
        self.member = member
        self.device = device
        self.algorithm = algorithm
        self._store = store
        self._bounded = bounded
        self._timeout = timeout
        self._lanes = lanes
        self._tuning = tuning

    def shm(self) -> Engine:
        tuning = Tuning(**self._tuning)
        return open_shm(self.member, self._bounded, self._timeout, self._lanes, self.algorithm, tuning)

    def cuda_ipc(self) -> Engine:
        from .cuda_ipc import open_cuda_ipc

        assert self.device is not None
        return open_cuda_ipc(self.member, self._bounded, self._timeout, self._lanes, self.device)

    def process_group(self, token: str | None, reason: str) -> Engine:
        """``token`` makes the keys of this ring; None in a world of 1."""
        from .process_group import ProcessGroupEngine

        return ProcessGroupEngine(
            self.member,
            self._own_store(token) if token is not None else None,
            self._timeout,
            reason=reason,
            device=self.device,
            **{key: self._tuning[key] for key in ("segment_bytes", "window") if key in self._tuning},
        )

    def _own_store(self, token: str) -> dist.Store:
        from torch.distributed import PrefixStore

        return PrefixStore(f"ring_reduce/{self.member.name}/{token}", self._store)


def _alone(opener: _Opener, transport: str) -> Engine:
    """Of a ring without a process group, or of one rank, which needs none."""
    if opener.device is None:
        return opener.shm()
    try:
        return opener.cuda_ipc()
    except RingError as error:
        if opener.member.world > 1 or transport != "auto" or process_group_problem(on_gpu=True) is not None:
            raise
        return opener.process_group(None, f"there is no cuda_ipc: {error}")


def _first_that_all_can(opener: _Opener, met: Meeting, transport: str) -> Engine:
    """Decided from what all ranks have heard, so all decide alike; what is only tried is tried by all."""
    local = "shm" if opener.device is None else "cuda_ipc"
    if transport == local:
        return opener.shm() if local == "shm" else opener.cuda_ipc()
    why_not_local = _why_not_one_host(met.hellos)
    if transport == "process_group":
        return _process_group(opener, met, "it was asked for")
    if why_not_local is None:
        if local == "shm":
            return opener.shm()
        try:
            return opener.cuda_ipc()
        except RingError as error:
            if isinstance(error, (RingTimeout, RingMismatch, PeerLost)):
                raise  # no other transport would help
            why_not_local = str(error)
    return _process_group(opener, met, f"there is no {local}: {why_not_local}")


def _process_group(opener: _Opener, met: Meeting, reason: str) -> Engine:
    problem = _why_no_process_group(met.hellos, opener.algorithm)
    if problem is not None:
        raise RingError(f"ring {opener.member.name!r}: process_group can't be used: {problem} ({reason})")
    return opener.process_group(met.token, reason)


def _why_not_one_host(hellos: Sequence[Hello]) -> str | None:
    for rank, hello in enumerate(hellos):
        if not hello["near"]:
            return (
                f"rank {rank} is on another host than rank 0, or in another container or network namespace, or of "
                f"another user"
            )
    return None


def _why_no_process_group(hellos: Sequence[Hello], algorithm: str) -> str | None:
    if algorithm == "direct":
        return "algorithm='direct' reads the memory of other ranks; use 'ring' or 'auto'"
    for rank, hello in enumerate(hellos):
        if hello["no_process_group"] is not None:
            return f"on rank {rank}, {hello['no_process_group']}"
    owners: dict[str, int] = {}
    for rank, hello in enumerate(hellos):
        if hello["gpu"] is not None and owners.setdefault(hello["gpu"], rank) != rank:
            return (
                f"ranks {owners[hello['gpu']]} and {rank} share a GPU, which NCCL refuses; give each its own"
            )
    return None


def _gpu_uuid(device: torch.device | None) -> str | None:
    if device is None:
        return None
    import torch

    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except (AssertionError, RuntimeError) as error:  # a torch for CPUs, no driver, no such device
        raise ValueError(f"device={str(device)!r}: {error}") from None
