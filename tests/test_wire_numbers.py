"""The numbers of element types, operations and normalizations are the same in C++ and in Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ring_reduce import call
from ring_reduce.arrays import ELEMENT_TYPES
from ring_reduce.normalization import Kind

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def numbers_of(enum: str, source: str) -> dict[str, int]:
    """The enumerators of ``enum class`` in C++ ``source``, by name: one without a number follows the one before."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    bodies = re.findall(rf"\benum class {enum}\b[^{{;]*{{([^}}]*)}}", code)
    assert len(bodies) == 1, f"{len(bodies)} declarations of {enum}"
    numbers: dict[str, int] = {}
    following = 0
    for enumerator in filter(None, map(str.strip, bodies[0].split(","))):
        name, _, number = (part.strip() for part in enumerator.partition("="))
        numbers[name] = int(number, 0) if number else following
        following = numbers[name] + 1
    return numbers


@pytest.mark.parametrize(
    ("enum", "header", "python"),
    [
        ("ElementType", "element.h", ELEMENT_TYPES),
        (
            "Operation",
            "call.h",
            {
                "all_reduce": call.ALL_REDUCE,
                "reduce_scatter": call.REDUCE_SCATTER,
                "all_gather": call.ALL_GATHER,
            },
        ),
        ("Normalization", "call.h", {kind.name.lower(): kind.value for kind in Kind}),
    ],
    ids=["ElementType", "Operation", "Normalization"],
)
def test_python_numbers_an_enum_as_its_header(enum: str, header: str, python: dict[str, int]) -> None:
    assert numbers_of(enum, (CSRC / header).read_text()) == python


def test_the_core_counts_all_element_types() -> None:
    assert f"kElementTypes = {len(ELEMENT_TYPES)};" in (CSRC / "element.h").read_text()


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ("a, b,\n  // c,\n  d", {"a": 0, "b": 1, "d": 2}),
        ("a = 3, /* b, */ c, d = 0x10,", {"a": 3, "c": 4, "d": 16}),
    ],
)
def test_an_enum_is_read_as_a_compiler_reads_it(body: str, numbers: dict[str, int]) -> None:
    source = f"enum class Other {{ z }};\nenum class Kind : std::uint8_t {{ {body} }};"
    assert numbers_of("Kind", source) == numbers
    with pytest.raises(AssertionError, match="0 declarations of Missing"):
        numbers_of("Missing", source)
