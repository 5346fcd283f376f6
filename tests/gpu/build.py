"""Builds and installs the package here; where pip can't, makes a tree that can be imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from findings import failed, figure, passed, skipped

ROOT = Path(__file__).resolve().parent.parent.parent
TREE = ROOT / "build" / "gpu-path"
ENVIRONMENT = {
    **os.environ,
    "RING_REDUCE_CUDA": "1",
    "RING_REDUCE_CUDA_ARCH": os.environ.get("RING_REDUCE_CUDA_ARCH", "native"),
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}


def run(*command: str, timeout: float) -> tuple[bool, str]:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {timeout:.0f} s"
    print(done.stdout[-3000:], done.stderr[-3000:])
    return done.returncode == 0, (done.stdout + done.stderr)[-1500:]


def build_a_tree() -> None:
    """What an editable install would show, as links."""
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "ring_reduce"
    package.mkdir(parents=True)
    for part in [*(ROOT / "ring_reduce").iterdir(), ROOT / "kernels", ROOT / "benchmarks"]:
        if part.name != "__pycache__" and part.suffix != ".so":
            (package / part.name).symlink_to(part)
    built, text = run(sys.executable, "setup.py", "build_ext", "--build-lib", str(TREE), timeout=200)
    if built:
        passed("build without pip")
    else:
        failed("build without pip", text)


def main() -> None:
    begin = time.monotonic()
    install = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-e", "."]
    installed, text = run(sys.executable, *install, timeout=200)
    if installed:
        shutil.rmtree(TREE, ignore_errors=True)
        passed("pip install -e .")
    else:
        skipped("pip install -e .", text)
        build_a_tree()
    figure("time to build", time.monotonic() - begin, "s")
    path = os.pathsep.join([str(TREE), os.environ.get("PYTHONPATH", "")])
    ask = "import ring_reduce.cuda as c; print(c.why_unavailable())"
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    answer = done.stdout.strip()
    if answer == "None":
        passed("the GPU can be used")
    else:
        failed("the GPU can be used", answer + done.stderr)


if __name__ == "__main__":
    main()
