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
        _line(size_cell(nbytes), [Ratio(**found[column]) for column in columns])
        for nbytes, found in ratios(read(name), in_place=in_place).items()
    ]


def scale_table(name: str, *contenders: str) -> list[str]:
    """A line for each size of ``ring-reduce bench scale --json``, in place: each contender's time over the sum's."""
    by_size: dict[int, dict[str, Any]] = {}
    for row in read(name)["rows"]:
        if row["in_place"]:
            by_size.setdefault(row["bytes"], {})[row["contender"]] = row["over_sum"]
    return [
        _line(size_cell(size), [Ratio(**over[each]) for each in contenders]) for size, over in by_size.items()
    ]


def types_table(name: str, *dtypes: str) -> list[str]:
    """A line for each size of ``ring-reduce bench --together --json``: the ring's time a byte over float32's, each type
    in place and out of it."""
    by_size: dict[int, dict[tuple[str, bool], Any]] = {}
    for cost in _time_a_byte(name, "ring"):
        by_size.setdefault(cost["bytes"], {})[cost["dtype"], cost["in_place"]] = cost["over_first_type"]
    return [
        _line(size_cell(size), [Ratio(**over[each, place]) for each in dtypes for place in (True, False)])
        for size, over in by_size.items()
    ]


def sizes_table(name: str) -> list[str]:
    """A line for each size but the least, over whose time a byte it is: the ring's in place and out of it, a copy's."""
    by_size: dict[int, list[Ratio]] = {}
    costs = sorted(_time_a_byte(name, "ring"), key=lambda cost: not cost["in_place"])
    for cost in [*costs, *_time_a_byte(name, "copy")]:
        if cost["over_least_size"] is not None:
            by_size.setdefault(cost["bytes"], []).append(Ratio(**cost["over_least_size"]))
    return [_line(size_cell(size), over) for size, over in by_size.items()]


def _time_a_byte(name: str, backend: str) -> list[dict[str, Any]]:
    return [cost for cost in read(name)["time_a_byte"] if cost["backend"] == backend]


def ddp_table(name: str) -> list[str]:
    """A line for each network of ``ring-reduce bench ddp --json``."""
    lines = []
    for model in read(name)["models"]:
        steps = {
            row["contender"]: Ratio(**row["over_unreduced"]) for row in model["rows"] if row["over_unreduced"]
        }
        lines.append(
            _line(model["model"], [Ratio(**model["over_ring"]["gloo"]), steps["ring"], steps["gloo"]])
        )
    return lines


def _line(first: str, found: list[Ratio]) -> str:
    return f"| {first} | {' | '.join(ratio_text(ratio) for ratio in found)} |"


PEERS = ("gloo_over_ring", "mpi_over_ring", "deepspeed_over_ring")
DIVIDED = tuple(
    f"ring {name}" for name in ("MEAN", "divide_by", "DIVIDE_BY_COUNT", "WEIGHTED_MEAN", "SUM, then div_")
)


def tables(document: str) -> list[list[str]]:
    """The lines of each table that the document shows."""
    if document == "README.md":
        return [table("cpu-2-ranks", *PEERS, "ring_over_copy", "mean_over_sum")]
    return [
        table("cpu-2-ranks", *PEERS, "ring_over_copy", in_place=False),
        table("cpu-4-ranks", *PEERS, "ring_over_copy"),
        scale_table("cpu-2-ranks-scale", *DIVIDED),
        types_table("cpu-2-ranks-types", "float16", "bfloat16"),
        sizes_table("cpu-2-ranks-sizes"),
        ddp_table("cpu-2-ranks-ddp"),
    ]


DOCUMENTS = ("README.md", "docs/benchmarks.md")

if __name__ == "__main__":
    for name in DOCUMENTS:
        print(name, *("\n".join(lines) for lines in tables(name)), sep="\n\n")
