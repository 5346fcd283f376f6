"""Time waiting, moving and reducing by call, from nsys exports that the tests make; sums are worked out by hand."""

from __future__ import annotations

import ast
import re
import sqlite3
from pathlib import Path

import pytest

from nsys_cases import (
    BUCKET,
    IPC_CALL,
    PROCESS_GROUP_CALL,
    SHM_CALL,
    START_END,
    US,
    Export,
    thread_of,
    two_ranks,
)
from ring_reduce.tracing.nsys import CallSummary, DeviceTime, summarize_ranges
from ring_reduce.tracing.nsys_export import ExportError, category_of, read_ranges

ROOT = Path(__file__).resolve().parents[1]
CALL = "ring_reduce all_gather 64 B SUM process_group"
MAIN = thread_of(20)
CUDA_TABLES = [f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("RUNTIME", "KERNEL", "MEMCPY", "MEMSET")]


def summaries(path: Path) -> list[CallSummary]:
    return summarize_ranges(read_ranges(path))


def device_time(
    span: int, *, ring_kernel: int = 0, reducing: int = 0, moving: int = 0, other: int = 0, waiting: int = 0
) -> DeviceTime:
    """From microseconds."""
    return DeviceTime(*(each * US for each in (span, ring_kernel, reducing, moving, other, waiting)))


@pytest.mark.parametrize("registered", [False, True], ids=["text", "textId"])
def test_two_processes(tmp_path: Path, registered: bool) -> None:
    assert summaries(two_ranks(tmp_path / "two.sqlite", registered=registered)) == [
        CallSummary(4711, BUCKET, 1, 120 * US, 120 * US, None),
        CallSummary(
            4711,
            PROCESS_GROUP_CALL,
            2,
            140 * US,
            70 * US,
            # 1050-1270 with a gap of 20, and 1900-2100 with one of 60.
            device_time(220 + 200, reducing=40 + 100, moving=100 + 60 + 40, other=10, waiting=20 + 60),
        ),
        CallSummary(4712, IPC_CALL, 1, 30 * US, 30 * US, device_time(300, ring_kernel=300)),
        CallSummary(4712, SHM_CALL, 1, 250 * US, 250 * US, None),
    ]


def test_overlapping_kernels_count_once(tmp_path: Path) -> None:
    export = Export(tmp_path / "overlap.sqlite")
    export.range(MAIN, CALL, 0, 10)
    # 20-50 and 60-75; two within another, one that touches, two beyond a gap. Not in the order of their starts.
    for start, end in ((65, 75), (60, 70), (20, 40), (25, 30), (32, 38), (40, 50)):
        export.kernel(MAIN, 5, "ncclDevKernel_SendRecv", start, end)
    (summary,) = summaries(export.write())
    assert summary.device == device_time(55, moving=45, waiting=10)


def test_a_call_has_what_its_thread_launched_in_it(tmp_path: Path) -> None:
    export = Export(tmp_path / "edges.sqlite")
    export.range(MAIN, CALL, 100, 200)
    export.range(thread_of(20, 21), CALL, 110, 120)
    export.range(thread_of(20, host=1), CALL, 110, 120)  # a process of the same ID on another host
    export.kernel(MAIN, 99, "combine_kernel", 300, 301)  # before the call
    export.kernel(MAIN, 100, "combine_kernel", 310, 312)
    export.kernel(MAIN, 200, "combine_kernel", 320, 324)
    export.kernel(MAIN, 201, "combine_kernel", 330, 338)  # after it
    export.kernel(thread_of(20, 21), 115, "combine_kernel", 400, 416)
    export.kernel(thread_of(20, host=1), 115, "combine_kernel", 500, 532)
    found = [(each.pid, each.calls, each.device) for each in summaries(export.write())]
    assert found == [
        (20, 2, device_time(14 + 16, reducing=2 + 4 + 16, waiting=8)),
        (20, 1, device_time(32, reducing=32)),
    ]


def test_ranges_that_are_no_calls_of_a_ring(tmp_path: Path) -> None:
    export = Export(tmp_path / "others.sqlite")
    for name in ("ring_reduce", "ncclSend", "x ring_reduce all_reduce 4 B SUM shm"):
        export.range(MAIN, name, 0, 1)
    export.range(MAIN, CALL, 2, 3, kind=34)  # a mark
    export.range(MAIN, BUCKET, 5, 6, START_END)
    export.range(MAIN, CALL, 4, 5)
    assert [each.name for each in read_ranges(export.write())] == [CALL, BUCKET]  # by their start


@pytest.mark.parametrize("end", [None, 0])  # in older exports no column may be NULL
def test_a_range_that_did_not_end_is_left_out(tmp_path: Path, end: float | None) -> None:
    export = Export(tmp_path / "open.sqlite")
    export.range(MAIN, CALL, 0, 10)
    export.range(MAIN, CALL, 20, end)
    export.kernel(MAIN, 30, "combine_kernel", 40, 50)
    path = export.write()
    assert [each.end_ns for each in read_ranges(path)] == [10 * US, None]
    assert summaries(path) == [CallSummary(20, CALL, 1, 10 * US, 10 * US, None)]


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        (CUDA_TABLES, None),
        (["CUPTI_ACTIVITY_KIND_RUNTIME"], None),
        (["CUPTI_ACTIVITY_KIND_KERNEL"], device_time(70, moving=60, other=10)),
        (["CUPTI_ACTIVITY_KIND_MEMCPY"], device_time(420, reducing=140, moving=140, other=10, waiting=140)),
        (["CUPTI_ACTIVITY_KIND_MEMSET"], device_time(410, reducing=140, moving=200, waiting=80)),
    ],
    ids=["no CUDA", "launches", "kernels", "copies", "fills"],
)
def test_tables_of_what_did_not_happen(
    tmp_path: Path, without: list[str], expected: DeviceTime | None
) -> None:
    found = summaries(two_ranks(tmp_path / "few.sqlite", without=without))
    assert [each.device for each in found if each.name == PROCESS_GROUP_CALL] == [expected]
    assert [each.calls for each in found] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    "column",
    ["NVTX_EVENTS.globalTid", "CUPTI_ACTIVITY_KIND_KERNEL.shortName", "CUPTI_ACTIVITY_KIND_MEMCPY.globalPid"],
)
def test_a_column_that_is_missing_is_named(tmp_path: Path, column: str) -> None:
    table, name = column.split(".")
    with pytest.raises(ExportError, match=f"old.sqlite: table {table} has no column {name}, only start, end"):
        read_ranges(two_ranks(tmp_path / "old.sqlite", without=[column]))


def test_kernels_without_their_names_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"nameless\.sqlite has no table StringIds; export"):
        read_ranges(two_ranks(tmp_path / "nameless.sqlite", without=["StringIds"]))


def test_a_file_without_ranges_says_how_to_get_them(tmp_path: Path) -> None:
    export = Export(tmp_path / "none.sqlite")
    export.kernel(MAIN, 30, "combine_kernel", 40, 50)
    said = "none.sqlite has no NVTX range of a ring; set RING_REDUCE_NVTX=1 .*nsys profile --trace=cuda,nvtx,osrt"
    with pytest.raises(ExportError, match=said):
        read_ranges(export.write())
    export.path = tmp_path / "others" / "none.sqlite"
    export.path.parent.mkdir()
    export.range(MAIN, "forward", 0, 1)
    with pytest.raises(ExportError, match=said):
        read_ranges(export.write())


def test_files_that_are_no_exports(tmp_path: Path) -> None:
    report = tmp_path / "ddp.nsys-rep"
    report.write_bytes(b"no SQLite at all, but long enough for its header" * 100)
    with pytest.raises(
        ExportError, match="nsys-rep can't be read as SQLite: file is not a database; make it by"
    ):
        read_ranges(report)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    connection.close()
    with pytest.raises(
        ExportError, match=r"other\.sqlite is SQLite, but no export of nsys.*nsys export --type sqlite"
    ):
        read_ranges(other)
    cut = two_ranks(tmp_path / "cut.sqlite")
    cut.write_bytes(cut.read_bytes()[:8192])
    with pytest.raises(
        ExportError, match=r"cut\.sqlite can't be read as SQLite: database disk image is malformed"
    ):
        read_ranges(cut)
    gone = tmp_path / "gone.sqlite"
    with pytest.raises(ExportError, match=r"gone\.sqlite can't be read as SQLite: unable to open"):
        read_ranges(gone)
    assert not gone.exists()


def test_reading_leaves_the_file_alone(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "a file?#.sqlite")
    before = path.read_bytes()
    assert len(read_ranges(path)) == 5
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def kernels_of_the_package() -> list[str]:
    """Those that are launched: of Triton without an underscore, of CUDA all."""
    names = []
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(each) for each in node.decorator_list
            ):
                names.append(node.name)
    for path in (ROOT / "csrc").glob("*.cu"):
        text = re.sub(r"__launch_bounds__\([^)]*\)", "", path.read_text(encoding="utf-8"))
        names += re.findall(r"__global__\s+void\s+(\w+)\(", text)
    return [name for name in names if not name.startswith("_")]


def test_every_kernel_of_the_package_has_a_category() -> None:
    names = kernels_of_the_package()
    assert {"ring_kernel", "accumulate_kernel", "divide_kernel"} <= set(names)
    assert [name for name in names if category_of(name) == "other"] == []


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        ("ncclDevKernel_SendRecv", "moving"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "moving"),
        ("ring_kernel", "ring_kernel"),
        ("vectorized_elementwise_kernel", "other"),
        ("", "other"),
    ],
)
def test_categories(kernel: str, category: str) -> None:
    assert category_of(kernel) == category
