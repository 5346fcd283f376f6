"""`ring-reduce bench` where there are several GPUs: the ring beside NCCL and torch's symmetric memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from findings import failed, figure, passed, skipped

BACKENDS = ("ring", "nccl", "symm_mem")
COMMAND_S = 100.0  # below the step's own, so that what it said is shown
MOST_RANKS = 8


def command(gpus: int, rows: Path) -> list[str]:
    """All of the backends that are there, which is the command's default on GPUs."""
    sizes = ["--minbytes", "1M", "--maxbytes", "256M", "--stepfactor", "16"]
    what = [
        "--device",
        "cuda",
        "--world",
        str(min(gpus, MOST_RANKS)),
        "--datatype",
        "bfloat16",
        "--op",
        "all",
    ]
    return [sys.executable, "-m", "ring_reduce", "bench", *what, *sizes, "--iters", "40", "--json", str(rows)]


def tell(rows: list[dict[str, Any]]) -> None:
    """A figure for each row, and which backend was wrong or is missing."""
    for row in rows:
        where = "in place" if row["in_place"] else "out of place"
        name = f"{row['backend']}, {row['world']} GPUs, {row['bytes'] >> 20} MB {row['dtype']}, {row['op']}, {where}"
        figure(name, row["busbw_GBps"], "GB/s")
    for backend in BACKENDS:
        wrong = [row["wrong"] for row in rows if row["backend"] == backend]
        if not wrong:
            skipped(f"bench of {backend}", "it is not there; the step's log says why")
        elif any(wrong):
            failed(f"bench of {backend}", f"{sum(wrong)} wrong elements")
        else:
            passed(f"bench of {backend}", f"{len(wrong)} rows")


def measure(gpus: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.json"
        done = subprocess.run(
            command(gpus, rows),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        print(done.stdout, flush=True)
        if rows.exists():
            tell(json.loads(rows.read_text())["rows"])
        else:
            failed("bench", f"exit status {done.returncode}: {done.stdout[-1500:]}")


def main() -> None:
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1:
        measure(gpus)
    else:
        skipped("bench", f"this machine has {gpus} GPU")


if __name__ == "__main__":
    main()
