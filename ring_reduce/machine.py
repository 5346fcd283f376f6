"""What the kernel says of this machine and of the limits around this process. Reads only; needs no package."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
CGROUPS = "sys/fs/cgroup"

# cgroup v1 writes "no limit" as the largest multiple of a page; nothing near it is a limit.
UNLIMITED_BYTES = 1 << 60


def usable_cores() -> int:
    """Cores that the scheduler may put this process on; a quota may allow less time than that."""
    return len(os.sched_getaffinity(0))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the cgroups grant, the tightest of them; None without a quota."""
    quotas = []
    for directory in _cgroup_directories("cpu", root):
        v2 = _words(directory / "cpu.max")
        v1 = _words(directory / "cpu.cfs_quota_us") + _words(directory / "cpu.cfs_period_us")
        quota, period = (v2 or v1 or ["max", "1"])[:2]
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def granted_cores() -> float:
    """Cores' worth of time that this process gets at most: of its affinity and of the cgroups' quota the less."""
    return min(usable_cores(), cpu_quota() or math.inf)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the cgroups allow, the tightest of them; None without a limit."""
    return min((limit for _, limit in _memory_limits(root)), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that the tightest cgroup still allows; None without a limit.

    Cached files count as left: the kernel drops them when memory is asked for.
    """
    left = []
    for directory, limit in _memory_limits(root):
        used = _words(directory / "memory.current") or _words(directory / "memory.usage_in_bytes") or ["0"]
        stat = dict(line.split()[:2] for line in _lines(directory / "memory.stat"))
        prefix = "total_" if "total_active_file" in stat else ""  # cgroup v1 counts the groups below apart
        cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        left.append(limit - max(0, int(used[0]) - cached))
    return min(left, default=None)


def physical_memory(root: Path = ROOT) -> tuple[int, int]:
    """(total, available) bytes of the machine."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemTotal"], sizes["MemAvailable"]


def soft_limit(name: str) -> int | None:
    """The soft limit RLIMIT_<name>; None where there is none."""
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return None if soft == resource.RLIM_INFINITY else soft


def filesystem_bytes(path: str) -> int | None:
    """The size of the file system at `path`; None where there is no such path."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def memfd_problem() -> str | None:
    """Why sealed memory behind a file descriptor does not work here; None when it does. Tries it."""
    try:
        fd = os.memfd_create("ring_reduce_doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mmap.mmap(fd, mmap.PAGESIZE).close()
        finally:
            os.close(fd)
    except (AttributeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def pidfd_problem() -> str | None:
    """Why a process cannot be watched through a descriptor here; None when it can. Tries it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    for directory in _cgroup_directories("memory", root):
        words = _words(directory / "memory.max") or _words(directory / "memory.limit_in_bytes")
        if words and words[0] != "max" and int(words[0]) < UNLIMITED_BYTES:
            yield directory, int(words[0])


def _cgroup_directories(controller: str, root: Path) -> Iterator[Path]:
    """Directories that limit this process: its own cgroup and those above it, in both versions of cgroups.

    In a container the path may be the host's and not exist here; the mount's top is then the container's own.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ["", "unified"]
        elif controller in controllers.split(","):
            mounts = [controllers, controller]
        else:
            continue
        for mount in dict.fromkeys(mounts):
            own = Path(path.lstrip("/"))
            yield from (root / CGROUPS / mount / part for part in (own, *own.parents))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]
