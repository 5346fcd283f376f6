"""Whether shared memory rings work here, found by making one: two processes and a small all_reduce."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORLD = 2
ELEMENTS = 1000
TIMEOUT_S = 20.0


class DirectoryStore:
    """A store for a ring's start, one file a key. Needs no torch, so that torch's faults don't look like the ring's."""

    def __init__(self, directory: Path, timeout: float = TIMEOUT_S) -> None:
        self._directory = directory
        self._timeout = timeout

    def set(self, key: str, value: bytes | str) -> None:
        """Stores `value`; a reader sees all of it or nothing."""
        path = self._path(key)
        draft = path.with_suffix(f".{time.monotonic_ns()}")
        draft.write_bytes(value.encode() if isinstance(value, str) else value)
        draft.rename(path)

    def get(self, key: str) -> bytes:
        """The value; waits for it, as torch's stores do."""
        deadline = time.monotonic() + self._timeout
        while not self._path(key).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no key {key} in {self._timeout:g} s")
            time.sleep(0.001)
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key.encode().hex()}.value"


def shm_problem() -> str | None:
    """Why a ring over shared memory does not work here, in one line; None when it does."""
    with tempfile.TemporaryDirectory(prefix="ring_reduce_doctor_") as directory:
        command = [sys.executable, "-m", "ring_reduce.probe", directory]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for rank in range(WORLD)
        ]
        try:
            problems = [_problem_of(rank, process) for rank, process in enumerate(ranks)]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return next(filter(None, problems), None)


def _problem_of(rank: int, process: subprocess.Popen[str]) -> str | None:
    try:
        # Start-up of Python and the ring's own timeout both end earlier.
        _, errors = process.communicate(timeout=3 * TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"rank {rank} of a test ring did not finish in {3 * TIMEOUT_S:g} s"
    if process.returncode == 0:
        return None
    last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return f"rank {rank} of a test ring: {last}"


def run_rank(directory: Path, rank: int) -> None:
    """One rank of the test ring; raises when the sum is wrong or the ring fails."""
    import numpy as np

    from ring_reduce.ring import Ring

    x = np.arange(ELEMENTS, dtype=np.float32) + rank
    expected = sum(np.arange(ELEMENTS, dtype=np.float32) + peer for peer in range(WORLD))
    with Ring(DirectoryStore(directory), rank=rank, world=WORLD, name="doctor", timeout=TIMEOUT_S) as ring:
        ring.all_reduce(x)
    if not np.array_equal(x, expected):
        wrong = int(np.count_nonzero(x != expected))
        raise RuntimeError(f"{wrong} of {ELEMENTS} elements of a sum over {WORLD} ranks are wrong")


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
