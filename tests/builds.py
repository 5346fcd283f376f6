"""What tests build: each once a session, and most of it before its test comes, on a core that would be idle.

Ranks spin, so two tests at the same time would disturb each other; a compiler of the lowest priority hardly does (but
where a cgroup's quota limits the processor's time, its time is missing elsewhere). The tests of ``COMPILING`` are
therefore the last of a session (conftest.py), and a second pytest, the one *ahead*, runs the same tests meanwhile.
There a test ends where it has built all that it runs: ``stop_ahead``. The two share what they build in one directory,
and whoever needs something first builds it. What fails to build ahead is built again by its test, which then says why.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

TESTS = Path(__file__).resolve().parent
# Files whose time is a compiler's, in the order in which they are run ahead. The first has what test_cuda_ipc* need.
COMPILING = (
    "test_cuda_ipc_mutants",
    "test_accumulate_native",
    "test_cuda_build",
    "test_cuda_host",
    "test_fuzz_core",
    "test_model_checking",
    "test_packaging",
    "test_passes",
    "test_sanitizers",
    "test_schedule",
)
PATIENCE_S = 20.0  # before a test builds for itself what is being built ahead
WORTH_A_PROCESS = 5  # tests; fewer have ended when it has started
_AHEAD = "RING_REDUCE_TESTS_AHEAD"  # of the pytest that is ahead: the directory, and who started it
Make = Callable[[Path], None]
_shared: Path | None = None


def compiles(item: pytest.Item) -> bool:
    return item.path.stem in COMPILING


def once(key: str, name: str, directory: Path, make: Make) -> Path:
    """What ``make(path)`` writes, a file or a folder called ``name``: made once for all that is the same by ``key``.

    It lies in ``directory`` where no directory of the session is shared.
    """
    place = (_shared or directory) / key
    place.mkdir(exist_ok=True)
    made = place / name
    with (place / "lock").open("w") as lock:
        _wait_for(lock)
        if not made.exists():
            part = Path(tempfile.mkdtemp(dir=place)) / name
            make(part)
            # Two may have made it, if one lost patience: a file is replaced, a folder is not.
            with contextlib.suppress(OSError):
                part.rename(made)
    assert made.exists(), f"{key}: nothing was built"
    return made


def _wait_for(lock: IO[str]) -> None:
    """Until nobody else builds it; who dies while building gives the lock up.

    The pytest that is ahead does not wait, since the test has come: it goes on with another. A test does not wait for
    long: where other programs take all cores, a compiler of the lowest priority comes to no end.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            stop_ahead()
            time.sleep(0.02)


def stop_ahead() -> None:
    """Ends the test if it is run ahead."""
    if _AHEAD in os.environ:
        pytest.skip("all is built")


@contextlib.contextmanager
def session(directory: Path, items: Sequence[pytest.Item], root: Path) -> Iterator[None]:
    """Shares what is built, and has ``items`` built ahead."""
    global _shared
    if _AHEAD in os.environ:
        _shared = Path(os.environ[_AHEAD].rpartition(":")[0])
        yield
        return
    _shared = directory
    ahead = sorted(filter(compiles, items), key=lambda item: COMPILING.index(item.path.stem))
    process = (
        _start(directory, [item.nodeid for item in ahead], root) if len(ahead) >= WORTH_A_PROCESS else None
    )
    try:
        yield
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _start(directory: Path, ids: Sequence[str], root: Path) -> subprocess.Popen[bytes]:
    """The pytest that is ahead; what it says is in ``directory``."""
    command = ["nice", "-n", "19", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=900"]
    command += ["--rootdir", str(root), "--basetemp", str(directory / "ahead"), *ids]
    environment = {**os.environ, _AHEAD: f"{directory}:{os.getpid()}"}
    with (directory / "log").open("w") as log:
        return subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def end_if_alone() -> None:
    """Ends the pytest that is ahead once the other is no more."""
    parent = os.environ.get(_AHEAD, "").rpartition(":")[2]
    if parent and int(parent) != os.getppid():
        pytest.exit("whoever started this pytest has ended", returncode=1)
