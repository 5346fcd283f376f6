"""The committed figures of benchmarks/results/ as the tables that the documents show: `python tests/figures.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ring_reduce.benchmarks.summary import Ratio
from ring_reduce.benchmarks.table import ratio_text, size_text

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    """A file of ``ring-reduce bench --json``."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def size_cell(nbytes: int) -> str:
    """``16 KB``, where the benchmark's own tables say ``16K``."""
    text = size_text(nbytes)
    return f"{text} B" if text.isdecimal() else f"{text[:-1]} {text[-1]}B"


def ratios(document: dict[str, Any], *, in_place: bool = True) -> dict[int, dict[str, Any]]:
    """By size, those of sums; a mean's against its sum too."""
    by_size: dict[int, dict[str, Any]] = {}
    for comparison in document["comparisons"]:
        if comparison["in_place"] is in_place and comparison["dtype"] == "float32":
            found = by_size.setdefault(comparison["bytes"], {})
            found.update({name: ratio for name, ratio in comparison["ratios"].items() if name not in found})
    return by_size


def table(name: str, *columns: str, in_place: bool = True) -> list[str]:
    """A line for each size: its ratios of these names."""
    return [
        f"| {size_cell(nbytes)} | "
        + " | ".join(ratio_text(Ratio(**found[column])) for column in columns)
        + " |"
        for nbytes, found in ratios(read(name), in_place=in_place).items()
    ]


PEERS = ("gloo_over_ring", "mpi_over_ring", "deepspeed_over_ring")
# By document, what it shows: a file, whether in place, and the columns.
TABLES: dict[str, list[tuple[str, bool, tuple[str, ...]]]] = {
    "README.md": [("cpu-2-ranks", True, (*PEERS, "ring_over_copy", "mean_over_sum"))],
    "docs/benchmarks.md": [
        ("cpu-2-ranks", False, (*PEERS, "ring_over_copy")),
        ("cpu-4-ranks", True, (*PEERS, "ring_over_copy")),
    ],
}


def tables(document: str) -> list[list[str]]:
    """The lines of each table that the document shows."""
    return [table(name, *columns, in_place=in_place) for name, in_place, columns in TABLES[document]]


if __name__ == "__main__":
    for document in TABLES:
        print(document, *("\n".join(lines) for lines in tables(document)), sep="\n\n")
