"""What machine.py reads of the kernel's files: real ones, and trees of both cgroup versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_reduce import machine

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V2 = {
    "proc/self/cgroup": "0::/slice/job",
    "sys/fs/cgroup/slice/cpu.max": "150000 100000",
    "sys/fs/cgroup/slice/memory.max": str(4 * GIB),
    "sys/fs/cgroup/slice/job/cpu.max": "max 100000",
    "sys/fs/cgroup/slice/job/memory.max": str(8 * GIB),
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/\n0::/",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}
# A container whose /proc names the host's path, which it can't see.
V1_IN_CONTAINER = {
    "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
}
V1_UNLIMITED = {
    "proc/self/cgroup": "5:cpu:/\n4:memory:/",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}
V2_UNLIMITED = {
    "proc/self/cgroup": "0::/",
    "sys/fs/cgroup/cpu.max": "max 100000",
    "sys/fs/cgroup/memory.max": "max",
}


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        pytest.param(V2, 1.5, 4 * GIB, id="v2: the tightest of the ancestors"),
        pytest.param(V1, 0.5, 2 * GIB, id="v1"),
        pytest.param(V1_IN_CONTAINER, 2.0, GIB, id="v1 in a container"),
        pytest.param(V1_UNLIMITED, None, None, id="v1 without limits"),
        pytest.param(V2_UNLIMITED, None, None, id="v2 without limits"),
        pytest.param({}, None, None, id="no cgroups"),
    ],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], quota: float | None, limit: int | None) -> None:
    root = tree(tmp_path, files)
    assert machine.cpu_quota(root) == quota
    assert machine.memory_limit(root) == limit


def test_physical_memory_is_in_bytes(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB"})
    assert machine.physical_memory(root) == (2048 * 1024, 1024 * 1024)


def test_this_machine() -> None:
    total, available = machine.physical_memory()
    assert total >= available > 0
    assert machine.usable_cores() >= 1
    assert machine.filesystem_bytes("/") is not None
    assert machine.filesystem_bytes("/no such path") is None


def test_a_kernel_without_a_feature_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> int:
        raise OSError(38, "Function not implemented")

    assert machine.memfd_problem() is None
    assert machine.pidfd_problem() is None
    monkeypatch.setattr("os.memfd_create", refuse)
    monkeypatch.setattr("os.pidfd_open", refuse)
    assert "not implemented" in (machine.memfd_problem() or "")
    assert "not implemented" in (machine.pidfd_problem() or "")


@pytest.mark.parametrize(
    ("files", "left"),
    [
        pytest.param(
            {
                **V2,
                "sys/fs/cgroup/slice/memory.current": str(3 * GIB),
                "sys/fs/cgroup/slice/memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file {GIB // 2}",
            },
            4 * GIB - 3 * GIB + GIB + GIB // 2,
            id="v2: cached files can be dropped",
        ),
        pytest.param(
            {
                **V1,
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/job/memory.stat": (
                    "inactive_file 1\nactive_file 2\ntotal_inactive_file 100\ntotal_active_file 20"
                ),
            },
            GIB + 120,
            id="v1: totals, not the group's own",
        ),
        pytest.param(V2_UNLIMITED, None, id="no limit"),
    ],
)
def test_memory_left(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    assert machine.memory_left(tree(tmp_path, files)) == left
