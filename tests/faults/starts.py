"""Faults of the start and of memory: ``python tests/faults/starts.py [NAME...] -n N`` writes results-start.json.

Each is made to happen N times to new processes. Names are those of tests/start_faults.py, or none for all.
docs/reliability.md shows the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results-start.json")
TESTS = Path(__file__).parents[1]


def repeat(name: str, times: int) -> dict[str, Any]:
    """The figures of one fault; what was not survived is printed."""
    from start_faults import FAULTS

    fault, survived, slowest = FAULTS[name], 0, None
    for number in range(times):
        try:
            seconds = fault.once()
        except AssertionError as error:
            print(f"{name}, number {number}: {error}", flush=True)
            continue
        survived += 1
        if seconds is not None:
            slowest = max(slowest or 0.0, round(seconds, 4))
    return {"tried": times, "survived": survived, "slowest_s": slowest, "world": fault.world}


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
    """Runs the faults that are named."""
    from start_faults import FAULTS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("-n", type=int, default=20, metavar="N", help="times each (default: %(default)s)")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in args.names or FAULTS:
        results[name] = repeat(name, args.n)
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
        print(name, results[name], flush=True)
    print("\n".join(table()))


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main()
