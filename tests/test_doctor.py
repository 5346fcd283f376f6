"""ring-reduce doctor: the whole of it once for real, and each way in which it says no."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ring_reduce import _core, doctor, probe


def run_doctor(report: Path, limit: str = "true") -> subprocess.CompletedProcess[str]:
    """Runs it for real, after the shell command `limit`."""
    doctor_command = [sys.executable, "-B", "-m", "ring_reduce", "doctor", "--json", str(report)]
    command = ["bash", "-c", f'{limit}; exec "$@"', "doctor", *doctor_command]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_doctor_here(tmp_path: Path) -> None:
    done = run_doctor(tmp_path / "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["transports"]["shm"]["usable"] is True
    assert report["transports"]["cuda_ipc"]["reason"]
    assert report["transports"]["process_group"]["usable"] is True
    assert report["kernel_features"] == {"memfd_create": True, "pidfd_open": True}
    assert report["cores"]["affinity"] == len(os.sched_getaffinity(0))
    assert (report["cores"]["vector_bits"], report["cores"]["vector_isa"]) == (
        _core.vector_bits(),
        _core.vector_isa(),
    )
    assert report["versions"]["python"] == sys.version.split()[0]
    assert report["cuda"]["usable"] is False
    assert report["cuda"]["reason"]
    assert {
        "total",
        "available",
        "cgroup_limit",
        "RLIMIT_AS",
        "RLIMIT_MEMLOCK",
        "RLIMIT_NOFILE",
        "dev_shm",
    } == set(report["memory"])


def test_doctor_where_shared_memory_cannot_be_had(tmp_path: Path) -> None:
    """A limit on file sizes holds for a memfd too: the test ring fails, and the doctor says so and why."""
    done = run_doctor(tmp_path / "report.json", "ulimit -f 64")
    assert done.returncode == 1, done.stdout + done.stderr
    shm = json.loads((tmp_path / "report.json").read_text())["transports"]["shm"]
    assert shm["usable"] is False
    assert "shared memory" in shm["reason"]
    assert f"no: {shm['reason']}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_columns_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "shm_problem", lambda: None)
    text = doctor.examine().to_text()
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    width = max(len(name) for facts in doctor.examine().facts.values() for name in (f.name for f in facts))
    assert all(row[2 + width : 4 + width] == "  " and row[4 + width] != " " for row in rows)
    assert "shm" in text
    assert "yes: 2 processes made a ring and reduced" in text


def test_a_ring_that_fails_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "shm_problem", lambda: "rank 1 of a test ring: no memory")
    assert doctor.run(argparse.Namespace(json=None)) == 1
    assert "no: rank 1 of a test ring: no memory" in capsys.readouterr().out


def test_a_report_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "shm_problem", lambda: None)
    with pytest.raises(SystemExit, match=r"cannot write .*no_such_directory"):
        doctor.run(argparse.Namespace(json=tmp_path / "no_such_directory" / "report.json"))


def test_the_probe_makes_a_ring() -> None:
    assert probe.shm_problem() is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise MemoryError('not one page')", "MemoryError: not one page"),
        ("import os; os._exit(7)", "exit status 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit status -9"),
    ],
)
def test_the_probe_says_why_a_rank_failed(code: str, reason: str) -> None:
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        problem = probe._problem_of(1, process)
    assert problem == f"rank 1 of a test ring: {reason}"


def test_the_probe_sees_a_wrong_sum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A ring that reduces nothing must not pass for one that works."""

    class IdleRing:
        def __init__(self, *_args: object, **_options: object) -> None: ...
        def __enter__(self) -> IdleRing:
            return self

        def __exit__(self, *_error: object) -> None: ...
        def all_reduce(self, _x: object) -> None: ...

    monkeypatch.setattr("ring_reduce.ring.Ring", IdleRing)
    with pytest.raises(RuntimeError, match="of a sum over 2 ranks are wrong"):
        probe.run_rank(tmp_path, 0)


def test_the_store_of_the_probe(tmp_path: Path) -> None:
    store = probe.DirectoryStore(tmp_path, timeout=0.0)
    assert not store.check(["a/b"])
    store.set("a/b", b"\x00\xff")
    store.set("c", "text")
    assert store.check(["a/b", "c"])
    assert not store.check(["a/b", "d"])
    assert (store.get("a/b"), store.get("c")) == (b"\x00\xff", b"text")
    with pytest.raises(TimeoutError, match="no key d"):
        store.get("d")


def fake_torch(cuda: str | None, devices: list[str]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        __version__="9.9",
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(
            is_available=lambda: bool(devices),
            device_count=lambda: len(devices),
            get_device_name=lambda device: devices[device],
        ),
    )


@pytest.mark.parametrize(
    ("torch", "has_driver", "reason"),
    [
        (None, True, "torch cannot be imported"),
        (fake_torch(None, []), True, "no torch CUDA build: torch 9.9 is for CPUs"),
        (fake_torch("13.0", []), False, "no driver"),
        (fake_torch("13.0", []), True, "finds no device"),
        (fake_torch("13.0", ["H200"]), True, "no kernel for it (torch sees H200)"),
    ],
)
def test_cuda_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: object, has_driver: bool, reason: str
) -> None:
    driver = tmp_path / "version"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", driver)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor, "why_unavailable", lambda: "no kernel for it")
    status = doctor.cuda_status()
    assert not status.usable
    assert reason in status.reason


def test_cuda_that_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", fake_torch("13.0", ["H200", "H200"]))
    monkeypatch.setattr(doctor, "why_unavailable", lambda: None)
    assert doctor.cuda_status() == doctor.Ability(True, "H200, H200")


def test_nvcc_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.nvcc_version() is None
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    assert doctor.nvcc_version() == "12.8.93"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    assert "does not say its version" in (doctor.nvcc_version() or "")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (8 << 20, "8.0 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_are_readable(value: int, text: str) -> None:
    assert doctor._bytes_text(value) == text
