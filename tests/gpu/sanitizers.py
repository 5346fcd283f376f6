"""compute-sanitizer on tiny calls. racecheck sees a block's shared memory only; it proves nothing of the links."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from findings import failed, passed, skipped

TOOLS = ("memcheck", "racecheck", "synccheck")
EACH_S = 150


def tiny() -> None:
    """Without torch's allocator, whose pools would hide an access past the end of a tensor."""
    import torch

    import ring_reduce as rr
    from ring_reduce.cuda import VirtualRing

    for world in (2, 3):
        ring = VirtualRing(world, lanes=2, segment_bytes=128, depth=3, window=2, timeout=20)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32):
            for size in (0, 1, 301, 20_001):
                xs = [torch.ones(size, device="cuda").to(dtype) for _ in range(world)]
                ring.all_reduce(xs, rr.SUM if dtype is torch.int32 else rr.divide_by(world))
                torch.cuda.synchronize()
                ring.check()
                assert all(
                    float(x.double().sum()) == size * (world if dtype is torch.int32 else 1) for x in xs
                )
    print("tiny calls are right")


def check(sanitizer: str, tool: str) -> None:
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--kernel-name-exclude",
        "kernel_substring=at::",
        sys.executable,
    ]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*command, str(Path(__file__).resolve()), "tiny"],
            capture_output=True,
            text=True,
            check=False,
            timeout=EACH_S,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
    except subprocess.TimeoutExpired:
        failed(tool, f"no end after {EACH_S} s")
        return
    text = done.stdout + done.stderr
    print(text[-3000:])
    summary = "; ".join(re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text))
    if "Device not supported" in text or "not supported" in summary:
        skipped(tool, text[-300:])
    elif done.returncode == 0 and "tiny calls are right" in text:
        passed(tool, f"{summary} ({time.monotonic() - begin:.0f} s)")
    else:
        failed(tool, text[-1800:])


def main() -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).is_file():
        for tool in TOOLS:
            skipped(tool, "there is no compute-sanitizer")
        return
    with ThreadPoolExecutor() as pool:  # most of their time is torch's start
        list(pool.map(lambda tool: check(sanitizer, tool), TOOLS))


if __name__ == "__main__":
    tiny() if sys.argv[1:] == ["tiny"] else main()
