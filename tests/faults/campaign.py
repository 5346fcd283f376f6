"""Faults by the hundred: ``python tests/faults/campaign.py NAME... -n N`` adds their figures to results.json beside it.

Names are the faults of ``ring-reduce soak``, N of each; ``flip``: each bit of a segment's header but those of the
count, for each algorithm; and ``steps``: N ranks that are late for each algorithm, and at which of its steps.
``--soak FILE`` adds the figures of a longer soak, those that ``ring-reduce soak --json FILE`` wrote.
docs/reliability.md shows all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ring_reduce.machine import usable_cores

RESULTS = Path(__file__).with_name("results.json")
TESTS = Path(__file__).parents[1]
FLIP, STEPS = "flip", "steps"

Json = dict[str, Any]


def soak(fault: str, injections: int, world: int, seed: int) -> Json:
    """The figures of so many faults of a kind."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "ring_reduce", "soak", "--minutes", "600", "--world", str(world)]
        command += ["--seed", str(seed), "--faults", fault, "--injections", str(injections)]
        subprocess.run([*command, "--json", file.name], check=True)
        figures: Json = json.load(file)["faults"][fault]
    return {**figures, "world": world, "seed": seed}


def flip_all() -> Json:
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
    return {"tried": tried, "survived": tried, "slowest_s": round(slowest, 4), "world": 3}


def run(name: str, tries: int, world: int, seed: int) -> Json:
    """The figures of one campaign, and where and when it was."""
    if name == FLIP:
        figures = flip_all()
    elif name == STEPS:
        from steps import stop_at_every_step

        figures = {"algorithms": stop_at_every_step(tries, seed), "seed": seed}
    else:
        figures = soak(name, tries, world, seed)
    # The load of the last minute, the campaign's own included.
    return {**figures, "cores": usable_cores(), "load": round(os.getloadavg()[0], 1), "date": today()}


def today() -> str:
    """By UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def read() -> Json:
    """All figures: of each fault, of a soak, and of steps."""
    results: Json = json.loads(RESULTS.read_text())
    return results


def fault_table() -> list[str]:
    """A line for each fault, with how it went in the soak."""
    results = read()
    soaked = results["soak"]["faults"]
    lines = []
    for name, figures in results["faults"].items():
        cells = [name, *(str(figures[key]) for key in ("tried", "survived"))]
        cells.append("-" if figures["slowest_s"] is None else f"{figures['slowest_s']:.3f} s")
        cells += [str(figures["world"]), str(figures["load"])]
        in_soak = soaked.get(name)
        cells.append("-" if in_soak is None else f"{in_soak['survived']} of {in_soak['tried']}")
        lines.append(_line(cells))
    return lines


def soak_table() -> list[str]:
    """One line."""
    results = read()["soak"]
    faults = results["faults"].values()
    slowest_s, kind = max((figures["slowest_s"] or 0.0, name) for name, figures in results["faults"].items())
    cells = [f"{results['seconds'] / 60:.0f}", *(str(results[key]) for key in ("world", "seed", "load"))]
    cells += [f"{results['calls']:,}", f"{results['bytes'] / 1e9:.1f}"]
    cells += [str(sum(each[key] for each in faults)) for key in ("tried", "survived")]
    return [_line([*cells, str(len(results["problems"])), f"{slowest_s:.3f} s ({kind})"])]


def step_table() -> list[str]:
    """A line for each algorithm."""
    return [
        _line([name, str(each["tried"]), ", ".join(f"{place}: {count}" for place, count in each["at"])])
        for name, each in read()["steps"]["algorithms"].items()
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


# What docs/reliability.md shows, by the beginning of the table's head.
TABLES = {"| fault |": fault_table, "| minutes |": soak_table, "| algorithm |": step_table}


def main() -> None:
    """Runs the campaigns that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "-n", type=int, default=100, metavar="N", help="injections of each (default: %(default)s)"
    )
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--soak", type=Path, metavar="FILE")
    args = parser.parse_args()
    for name in args.names:
        figures = run(name, args.n, args.world, args.seed)
        keep({STEPS: figures} if name == STEPS else {"faults": {**read()["faults"], name: figures}})
    if args.soak is not None:
        keep({"soak": {**json.loads(args.soak.read_text()), "date": today()}})
    print("\n\n".join("\n".join(table()) for table in TABLES.values()))


def keep(found: Json) -> None:
    """Replaces what there was."""
    RESULTS.write_text(json.dumps({**read(), **found}, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main()
