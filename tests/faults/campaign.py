"""Faults by the hundred: ``python tests/faults/campaign.py NAME... -n N`` adds their figures to results.json beside it.

Names are the faults of ``ring-reduce soak``, and ``flip``: each bit of a segment's header but those of the count, for
each algorithm. docs/reliability.md shows the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
TESTS = Path(__file__).parents[1]
FLIP = "flip"


def soak(faults: list[str], injections: int, world: int, seed: int) -> dict[str, Any]:
    """The figures of each of the faults, of together so many."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "ring_reduce", "soak", "--minutes", "600", "--world", str(world)]
        command += ["--seed", str(seed), "--faults", ",".join(faults), "--injections", str(injections)]
        subprocess.run([*command, "--json", file.name], check=True)
        found: dict[str, dict[str, Any]] = json.load(file)["faults"]
    return {name: {**figures, "world": world, "seed": seed} for name, figures in found.items()}


def flip_all() -> dict[str, Any]:
    """Of every bit in turn. Raises where one is not survived."""
    from launch import Team
    from test_damage import ALGORITHMS, BITS, check_flip, flip_bits

    slowest = 0.0
    with Team(3) as team:
        for name in ALGORITHMS:
            by_rank = team.run(flip_bits, name, BITS, timeout=1000)
            for bit, flips in zip(BITS, zip(*by_rank, strict=True), strict=True):
                slowest = max(slowest, check_flip(bit, flips))
    tried = len(ALGORITHMS) * len(BITS)
    return {FLIP: {"tried": tried, "survived": tried, "slowest_s": round(slowest, 4), "world": 3}}


def table() -> list[str]:
    """The figures as docs/reliability.md shows them, a line a fault."""
    lines = []
    for name, figures in json.loads(RESULTS.read_text()).items():
        slowest = "-" if figures["slowest_s"] is None else f"{figures['slowest_s']:.3f} s"
        lines.append(
            f"| {name} | {figures['tried']} | {figures['survived']} | {slowest} | {figures['world']} |"
        )
    return lines


def main() -> None:
    """Runs the campaigns that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument(
        "-n", type=int, default=100, metavar="N", help="injections in all (default: %(default)s)"
    )
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if faults := [name for name in args.names if name != FLIP]:
        found |= soak(faults, args.n, args.world, args.seed)
    if FLIP in args.names:
        found |= flip_all()
    results = {**(json.loads(RESULTS.read_text()) if RESULTS.exists() else {}), **found}
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print("\n".join(table()))


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main()
