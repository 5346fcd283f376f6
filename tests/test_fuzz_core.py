"""The core against peers that write what they like into the memory that it shares: libFuzzer with sanitizers.

See tests/fuzz/hostile_peers.cpp. Besides the seeded run, every input of tests/fuzz/inputs/ is run: each finds the fault
in FAULTS that it is named after. ``RING_REDUCE_FUZZ_MINUTES`` runs for so long, and keeps what it finds in build/fuzz/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from programs import CSRC, NATIVE, ROOT, compile_objects, join, link, run
from tools import require_tool

FUZZ = ROOT / "tests" / "fuzz"
INPUTS = FUZZ / "inputs"
RUNS = 1000
MINUTES = float(os.environ.get("RING_REDUCE_FUZZ_MINUTES", "0"))

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILED = ("-fsanitize=fuzzer-no-link", *SANITIZERS, f"-I{NATIVE}")
# Peers write before every load of the core. Without optimization, since what it leaves out differs between compilers.
WATCHED = ("-O0", *COMPILED, "-fsanitize-coverage=trace-loads")
TOGETHER = ("call", "cpu_ring", "direct", "lane_threads", "process", "ring", "trace")
APART = ("group", "lane", "wait")  # where the faults are planted
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=8"}  # a run that goes on for long


@dataclass(frozen=True)
class Fault:
    """A check of what a peer wrote that is left out, and what is then seen."""

    file: str
    old: str
    new: str
    seen: str


_KIND = "const std::uint32_t kind = from.failure_kind.load(std::memory_order_relaxed);"
FAULTS = {
    "a kind of failure that is checked, then read again": Fault(
        "group.cpp",
        _KIND,
        "const auto& kind = reinterpret_cast<const std::uint32_t&>(from.failure_kind);",
        "a failure of no kind",
    ),
    "a text of any length": Fault(
        "group.cpp",
        "std::min<std::size_t>(length, from.failure_text.size())",
        "length",
        "ERROR: AddressSanitizer",
    ),
    "the length of an own text read back": Fault(
        "group.cpp",
        "std::copy_n(text.begin(), length,",
        "std::copy_n(text.begin(), own.failure_length.load(),",
        "ERROR: AddressSanitizer",
    ),
    "a payload of any size": Fault(
        "lane.cpp",
        " && header.payload_bytes == payload_bytes",
        "",
        "a damaged header was taken for a good one",
    ),
    "a count of any sign": Fault(
        "lane.cpp",
        "header.partial_count >= 0 && ",
        "",
        "a total count that no ranks have",
    ),
    "no deadline": Fault(
        "wait.cpp",
        "if (waited_s < group_.settings.timeout_s) return;",
        "if (waited_s >= 0) return;",
        "a call hangs past its deadline",
    ),
}


@pytest.fixture(scope="module")
def compiler() -> str:
    """clang++ with libFuzzer, which Debian has in a package of its own."""
    found = require_tool("clang++", "apt-get install clang")
    probe = [found, "-fsyntax-only", "-x", "c++", "-include", "fuzzer/FuzzedDataProvider.h", os.devnull]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        require_tool("libclang_rt.fuzzer", "apt-get install libclang-rt-dev")
    return found


def build(csrc: Path, directory: Path) -> Path:
    core = join("core", [f"{name}.cpp" for name in TOGETHER], directory)
    objects = compile_objects([core, *(csrc / f"{name}.cpp" for name in APART)], csrc, directory, *WATCHED)
    warnings = ("-Wall", "-Wextra", "-Werror")
    target = compile_objects([FUZZ / "hostile_peers.cpp"], csrc, directory, *WATCHED, "-O1", *warnings)
    passes = compile_objects([csrc / "passes_baseline.cpp"], csrc, directory, "-O0", *COMPILED)
    options = ("-fsanitize=fuzzer", *SANITIZERS, "-Wl,--wrap=syscall")
    return link([*objects, *target, *passes], directory / "hostile_peers", *options)


@pytest.fixture
def hostile_peers(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CXX", compiler)
    return build(CSRC, tmp_path)


def test_no_peer_breaks_more_than_its_ring(hostile_peers: Path, tmp_path: Path) -> None:
    kept = ROOT / "build" / "fuzz" if MINUTES else tmp_path / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    for_long = [f"-max_total_time={60 * MINUTES:.0f}", "-print_final_stats=1"]
    options = [
        "-max_len=400",
        "-len_control=0",  # long ones at once
        "-timeout=20",
        "-verbosity=0",
        f"-artifact_prefix={kept}/",
        *(for_long if MINUTES else ["-seed=1", f"-runs={RUNS}"]),
    ]
    command = [str(hostile_peers), *options, str(kept), str(INPUTS)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr[-8000:]
    if MINUTES:
        print("\n".join(line for line in done.stderr.splitlines() if line.startswith("stat::")))


@pytest.mark.parametrize("name", FAULTS)
def test_the_target_sees(compiler: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, csrc = FAULTS[name], tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    text = (csrc / fault.file).read_text()
    assert text.count(fault.old) == 1
    (csrc / fault.file).write_text(text.replace(fault.old, fault.new))
    monkeypatch.setenv("CXX", compiler)
    status, said = run([str(build(csrc, tmp_path)), str(INPUTS / name.replace(" ", "_"))], ENVIRONMENT)
    assert status != 0
    assert fault.seen in said
