"""What ``verify`` returns: the diagnosis with the sizes of the step, as a text for a person and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .diagnosis import Diagnosis, ParameterLine
from .measured import Measured, Sizes
from .verdict import Verdict

RIGHT, WRONG, COULD_NOT_TELL = 0, 1, 2  # exit statuses
WIDTH = 100
MOST_LINES = 40  # parameters in the table; all are in to_dict()


@dataclass(frozen=True, kw_only=True)
class Report(Diagnosis):
    """The check of one step, the same on every rank. ``print(report)`` shows all of it."""

    elements: tuple[int, ...]  # of each parameter
    compared: int  # elements of all parameters that were compared
    norm: float  # of the compared elements of rank 0's gradient
    right_norm: float  # of the right one's
    tolerance: float
    sizes: Sizes

    @property
    def exit_status(self) -> int:
        """0: right, 1: wrong, 2: could not tell."""
        return {True: RIGHT, False: WRONG, None: COULD_NOT_TELL}[self.right]

    def __str__(self) -> str:
        """The verdict, the sizes, a table of the parameters, and what follows."""
        head = {RIGHT: "RIGHT", WRONG: "WRONG", COULD_NOT_TELL: "COULD NOT TELL"}[self.exit_status]
        paragraphs = [_wrap(f"{head}: {self.text.replace('gradient is right: ', 'the gradient is ', 1)}")]
        paragraphs += [_wrap(note) for note in self.notes]
        paragraphs += ["", *_sizes_lines(self.sizes), *self._compared_lines(), "", *self._table()]
        closing = [each for each in (self.logged, *self.effects) if each]
        paragraphs += ["", *map(_wrap, closing)] if closing else []
        return "\n".join(paragraphs)

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON. Numbers that are not finite are None."""
        content = {
            "verdict": self.verdict.value,
            "right": self.right,
            "exit_status": self.exit_status,
            "factor": self.factor,
            "names": self.names,
            "weights": self.weights,
            "text": self.text,
            "remedy": self.remedy,
            "notes": self.notes,
            "world": self.sizes.world,
            "micro_batches_planned": self.sizes.micro_batches,
            "samples": self.sizes.samples,
            "counts": self.sizes.counts,
            "total_count": self.sizes.total_count,
            "compared_elements": self.compared,
            "norm": self.norm,
            "right_norm": self.right_norm,
            "largest_difference": self.difference,
            "tolerance": self.tolerance,
            "parameters": [
                {
                    "name": line.name,
                    "elements": elements,
                    "verdict": line.verdict.value,
                    "factor": line.factor,
                    "names": line.names,
                    "largest_difference": line.difference,
                }
                for line, elements in zip(self.parameters, self.elements, strict=True)
            ],
            "logged": self.logged,
            "effects": self.effects,
        }
        return {key: _plain(value) for key, value in content.items()}

    def _compared_lines(self) -> list[str]:
        total = sum(self.elements)
        what = f"all {total:,}" if self.compared == total else f"{self.compared:,} of {total:,} (a sample)"
        return [
            f"Elements compared: {what}; relative differences up to {self.tolerance:.1e} count as rounding.",
            f"Norm of the gradient: {self.norm:.6g}, where {self.right_norm:.6g} is right.",
        ]

    def _table(self) -> list[str]:
        rows = list(zip(self.parameters, self.elements, strict=True))
        wrong = [row for row in rows if row[0].verdict is not Verdict.RIGHT]
        chosen = rows if len(rows) <= MOST_LINES else (wrong or rows)[:MOST_LINES]
        cells: list[tuple[str, ...]] = [
            ("parameter", "elements", "max|g - right| / max|right|", "factor", "verdict")
        ]
        cells += [_cells(line, elements, self.tolerance) for line, elements in chosen]
        lines = _align(cells)
        if len(chosen) < len(rows):
            rest = len(wrong) - sum(line.verdict is not Verdict.RIGHT for line, _ in chosen)
            lines.append(f"  and {len(rows) - len(chosen)} more, {rest} of them not right")
        return lines


def make_report(measured: Measured, diagnosis: Diagnosis, elements: Sequence[int]) -> Report:
    """``elements`` are those of each parameter, of which ``measured`` may have a sample."""
    return Report(
        **vars(diagnosis),
        elements=tuple(elements),
        compared=measured.ends[-1],
        norm=float(np.linalg.norm(measured.stepped[0])),
        right_norm=float(np.linalg.norm(measured.whole)),
        tolerance=measured.tolerance,
        sizes=measured.sizes,
    )


def _cells(line: ParameterLine, elements: int, tolerance: float) -> tuple[str, ...]:
    factor = "" if line.factor is None else f"{line.factor:.4g}"
    verdict = line.verdict.value + "".join(f" = {name}" for name in line.names if name != "1")
    if line.verdict is Verdict.RIGHT and line.difference > tolerance:
        verdict += ": rounding, all of it cancels"
    return line.name, f"{elements:,}", f"{line.difference:.2g}", factor, verdict


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns; numbers to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < index < 4 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _sizes_lines(sizes: Sizes) -> list[str]:
    lengths = {len(counts) for counts in sizes.counts}
    ran = " or ".join(map(str, sorted(lengths)))
    planned = "" if lengths == {sizes.micro_batches} else f" of N = {sizes.micro_batches} planned"
    ranks = f"n = {sizes.world} rank{'s' * (sizes.world > 1)}"
    each = f"{ran}{planned} micro-batch{'es' * (f'{ran}{planned}' != '1')} each"
    lines = [f"{ranks}, {each}, B = {sizes.total_samples} samples: {_listed(sizes.samples)}"]
    if sizes.counts != sizes.samples:
        lines.append(
            f"What counts, the number of losses: {sizes.total_count} in all: {_listed(sizes.counts)}"
        )
    return lines


def _listed(by_rank: Sequence[Sequence[int]]) -> str:
    """``5 5 5 | 5 5 5``, shortened where it is long."""
    if sum(map(len, by_rank)) > 24:
        numbers = [number for of_rank in by_rank for number in of_rank]
        return f"{min(numbers)} to {max(numbers)} in a micro-batch"
    return " | ".join(" ".join(map(str, of_rank)) or "none" for of_rank in by_rank)


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _plain(value: Any) -> Any:
    """JSON has no NaN, no infinity and no tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
