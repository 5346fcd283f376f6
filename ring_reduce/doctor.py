"""``ring-reduce doctor``: versions, cores, memory and limits, CUDA with the reason, what each transport can do here."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ring_reduce import _core, machine
from ring_reduce.cuda import why_unavailable
from ring_reduce.probe import WORLD, shm_problem
from ring_reduce.transport import process_group_problem

Json = str | int | float | bool | None

CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Fact:
    """One line of the report: `value` goes into the JSON file, `text` to the screen."""

    name: str
    value: Json
    text: str


@dataclass(frozen=True)
class Ability:
    """Whether something works here, and why not (or on what grounds it does)."""

    usable: bool
    reason: str


@dataclass(frozen=True)
class Report:
    """All that the doctor found."""

    facts: dict[str, list[Fact]]
    cuda: Ability
    transports: dict[str, Ability]

    def to_json(self) -> dict[str, object]:
        """The report as JSON holds it."""
        sections: dict[str, object] = {
            _key(title): {_key(fact.name): fact.value for fact in facts}
            for title, facts in self.facts.items()
        }
        sections["cuda"] = vars(self.cuda)
        sections["transports"] = {name: vars(ability) for name, ability in self.transports.items()}
        return sections

    def to_text(self) -> str:
        """The report as a person reads it: one aligned column of names, one of values."""
        sections = {title: [(fact.name, fact.text) for fact in facts] for title, facts in self.facts.items()}
        sections["cuda"] = [("usable", _yes_no(self.cuda))]
        sections["transports"] = [(name, _yes_no(ability)) for name, ability in self.transports.items()]
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        lines = []
        for title, rows in sections.items():
            lines += [title, *(f"  {name:<{width}}  {text}".rstrip() for name, text in rows), ""]
        return "\n".join(lines[:-1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ring-reduce doctor``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE as JSON too")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0 when rings over shared memory work here, else 1."""
    report = examine()
    print(report.to_text(), flush=True)
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
        except OSError as error:
            raise SystemExit(f"ring-reduce doctor: cannot write {args.json}: {error.strerror}") from error
    return 0 if report.transports["shm"].usable else 1


def examine() -> Report:
    """Looks at everything; takes seconds, since it imports torch and makes a ring."""
    return Report(
        facts={
            "versions": versions(),
            "cores": cores(),
            "memory": memory(),
            "kernel features": kernel_features(),
        },
        cuda=cuda_status(),
        transports=transports(),
    )


def versions() -> list[Fact]:
    """Of everything that a report of a fault should name."""
    found: dict[str, str | None] = {
        "ring_reduce": _package_version("ring-reduce"),
        "python": platform.python_version(),
        "torch": _package_version("torch"),
        "numpy": _package_version("numpy"),
        "triton": _package_version("triton"),
        "cupy": next(filter(None, map(_package_version, CUPY_PACKAGES)), None),
        "nvcc": nvcc_version(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    return [Fact(name, value, value or "not installed") for name, value in found.items()]


def cores() -> list[Fact]:
    """How many ranks can run at once, and how wide their passes are."""
    quota = machine.cpu_quota()
    bits, isa = _core.vector_bits(), _core.vector_isa()
    return [
        Fact("affinity", machine.usable_cores(), f"{machine.usable_cores()} cores"),
        Fact("cgroup quota", quota, "none" if quota is None else f"{quota:g} cores' time"),
        Fact("vector bits", bits, str(bits)),
        Fact("vector isa", isa, isa),
    ]


def memory() -> list[Fact]:
    """How much there is, and what limits this process."""
    total, available = machine.physical_memory()
    return [
        _size("total", total),
        _size("available", available),
        _size("cgroup limit", machine.memory_limit(), missing="none"),
        _size("RLIMIT_AS", machine.soft_limit("AS"), missing="unlimited", remark="address space"),
        _size("RLIMIT_MEMLOCK", machine.soft_limit("MEMLOCK"), missing="unlimited", remark="pinned memory"),
        _count("RLIMIT_NOFILE", machine.soft_limit("NOFILE"), "open files"),
        _size(
            "/dev/shm",
            machine.filesystem_bytes("/dev/shm"),
            missing="absent",
            remark="not used, any size will do",
        ),
    ]


def kernel_features() -> list[Fact]:
    """What the shm transport asks of the kernel, tried."""
    tried = {"memfd_create": machine.memfd_problem(), "pidfd_open": machine.pidfd_problem()}
    return [
        Fact(name, problem is None, f"no: {problem}" if problem else "yes") for name, problem in tried.items()
    ]


def cuda_status() -> Ability:
    """Whether ring_reduce can use a GPU here: the first reason against it, in the order in which one would fix them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Ability(False, f"torch cannot be imported: {error}")
    if torch.version.cuda is None:
        return Ability(False, f"no torch CUDA build: torch {torch.__version__} is for CPUs")
    if not NVIDIA_DRIVER.exists():
        return Ability(False, f"no driver: {NVIDIA_DRIVER} is absent")
    if not torch.cuda.is_available():
        return Ability(False, f"torch, built for CUDA {torch.version.cuda}, finds no device that it can use")
    names = ", ".join(torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count()))
    problem = why_unavailable()
    return Ability(problem is None, f"{problem} (torch sees {names})" if problem else names)


def transports() -> dict[str, Ability]:
    """What each transport can do here; shm is tried for real."""
    problem = shm_problem()
    return {
        "shm": Ability(problem is None, problem or f"{WORLD} processes made a ring and reduced"),
        "cuda_ipc": cuda_ipc_ability(),
        "process_group": process_group_ability(),
    }


def cuda_ipc_ability() -> Ability:
    """As far as one process can tell: whether GPUs reach each other's memory is proved when a ring is made."""
    absent = None if NVIDIA_DRIVER.exists() else f"no driver: {NVIDIA_DRIVER} is absent"
    problem = absent or why_unavailable()
    return Ability(
        problem is None, problem or "CUDA can be used; a ring proves that its GPUs reach each other"
    )


def process_group_ability() -> Ability:
    """Which backends torch has for it; not tried, since that takes the other hosts."""
    try:
        on_cpu, on_gpu = process_group_problem(on_gpu=False), process_group_problem(on_gpu=True)
    except (ImportError, OSError) as error:
        return Ability(False, f"torch cannot be imported: {error}")
    if on_cpu is not None:
        return Ability(False, on_cpu)
    return Ability(
        True, "over Gloo for CPU tensors" + (f"; not for GPUs: {on_gpu}" if on_gpu else ", NCCL for GPUs")
    )


def nvcc_version() -> str | None:
    """The release of the nvcc on the path; None without one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    try:
        said = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{nvcc} does not run: {error}"
    release = re.search(r"release [\d.]+, V([\d.]+)", said)
    return release[1] if release else f"{nvcc} does not say its version"


def _key(name: str) -> str:
    """A name of the report as a JSON key."""
    return name.strip("/").replace("/", "_").replace(" ", "_")


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _yes_no(ability: Ability) -> str:
    return f"{'yes' if ability.usable else 'no'}: {ability.reason}"


def _size(name: str, value: int | None, *, missing: str = "unknown", remark: str = "") -> Fact:
    return Fact(name, value, _remarked(missing if value is None else _bytes_text(value), remark))


def _count(name: str, value: int | None, remark: str) -> Fact:
    return Fact(name, value, _remarked("unlimited" if value is None else f"{value:,}", remark))


def _remarked(text: str, remark: str) -> str:
    return f"{text} ({remark})" if remark else text


def _bytes_text(value: int) -> str:
    units: Sequence[tuple[str, int]] = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    for unit, size in units:
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
