"""The ring's NVTX ranges in a SQLite export of nsys, and what each of them launched on the device.

The schema is that of "SQLite Export Schema Reference" in the documentation of Nsight Systems. nsys writes a table only
if something of its kind happened, and adds columns from version to version: only those that are needed are asked for.
"""

from __future__ import annotations

import bisect
import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Of ENUM_NSYS_EVENT_TYPE. A call is pushed and popped by its thread; a bucket may end on another than it began on.
PUSH_POP_RANGE, START_END_RANGE = 59, 60
NVTX, STRINGS, LAUNCHES = "NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNELS, COPIES, FILLS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
# Any export has one of them.
MARKS = {NVTX, STRINGS, LAUNCHES, "META_DATA_EXPORT", "ENUM_NSYS_EVENT_TYPE"}
RING_KERNEL, REDUCING, MOVING, OTHER = "ring_kernel", "reducing", "moving", "other"
# How the names of kernels begin: those of csrc/ and kernels/, and NCCL's before and since 2.19.
KERNEL_NAMES = {
    "ring_kernel": RING_KERNEL,
    "accumulate": REDUCING,
    "combine": REDUCING,
    "divide": REDUCING,
    "copy": MOVING,
    "ncclDevKernel": MOVING,
    "ncclKernel": MOVING,
}
HOW_TO_EXPORT = "make it by: nsys export --type sqlite REPORT.nsys-rep"
HOW_TO_PROFILE = (
    "set RING_REDUCE_NVTX=1 before the ring is made, and profile with: nsys profile --trace=cuda,nvtx,osrt"
)


class ExportError(Exception):
    """The file is not what it should be; says why, and what to do."""


@dataclass(frozen=True)
class DeviceWork:
    """A kernel, copy or fill of device memory."""

    category: str  # RING_KERNEL, REDUCING, MOVING or OTHER
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class RingRange:
    """A call of the ring, or a bucket of DDP. Nanoseconds on nsys's clock, which host and device share."""

    thread: int  # that it began on: nsys's globalTid, of host, process ID (24 bits) and thread ID (24 bits)
    name: str
    is_call: bool  # else a bucket
    start_ns: int
    end_ns: int | None  # None if the profile stopped before
    work: list[DeviceWork] = field(default_factory=list)  # launched in a call; in no order

    @property
    def process(self) -> int:
        """Of the export, which may be of several hosts."""
        return _process_of(self.thread)

    @property
    def pid(self) -> int:
        """The process ID on its host."""
        return self.process & 0xFFFFFF


def read_ranges(path: Path) -> list[RingRange]:
    """The ring's ranges in the order of their starts. Raises ``ExportError`` if there are none, or it is no export."""
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            export = _Export(path, connection)
            ranges = _read_ranges(export)
            _add_work(export, ranges)
    except sqlite3.DatabaseError as error:
        raise ExportError(f"{path} can't be read as SQLite: {error}; {HOW_TO_EXPORT}") from error
    if not ranges:
        raise ExportError(f"{path} has no NVTX range of a ring; {HOW_TO_PROFILE}")
    return ranges


class _Export:
    """The tables of an export. ``ExportError`` if it is another kind of SQLite file."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._connection = path, connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.tables = {str(name) for (name,) in names}
        if not self.tables & MARKS:
            raise ExportError(f"{path} is SQLite, but no export of nsys: none of its tables; {HOW_TO_EXPORT}")

    def rows(self, table: str, columns: str, rest: str = "") -> Iterator[tuple[Any, ...]]:
        """The rows of ``table``, whose ``columns`` are separated by blanks; ``rest`` comes after FROM."""
        self.check(table, columns)
        chosen = ", ".join(f'{table}."{column}"' for column in columns.split())
        return self._connection.execute(f"SELECT {chosen} FROM {table} {rest}")

    def names(self, table: str, column: str) -> dict[int, str]:
        """The strings that ``column`` of ``table`` refers to."""
        self.check(STRINGS, "id value")
        self.check(table, column)
        wanted = f'WHERE id IN (SELECT "{column}" FROM {table})'
        return dict(self._connection.execute(f"SELECT id, value FROM {STRINGS} {wanted}"))

    def check(self, table: str, columns: str) -> None:
        """``ExportError`` if there is no such table, or it lacks any of the columns."""
        advice = "export the report again with a current nsys"
        if table not in self.tables:
            raise ExportError(f"{self._path} has no table {table}; {advice}")
        has = [row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")]
        missing = [column for column in columns.split() if column not in has]
        if missing:
            raise ExportError(
                f"{self._path}: table {table} has no column {', '.join(missing)}, only {', '.join(has)}; {advice}"
            )


def _read_ranges(export: _Export) -> list[RingRange]:
    if NVTX not in export.tables:
        return []
    # Most texts are in the table itself; registered ones, in newer versions all, in that of strings.
    texts = export.names(NVTX, "textId") if STRINGS in export.tables else {}
    found = []
    for start, end, kind, text, text_id, thread in export.rows(
        NVTX,
        "start end eventType text textId globalTid",
        f"WHERE eventType IN ({PUSH_POP_RANGE}, {START_END_RANGE}) AND globalTid IS NOT NULL ORDER BY start",
    ):
        name = text or texts.get(text_id, "")
        if name.startswith("ring_reduce "):
            ended = end is not None and end >= start
            found.append(RingRange(thread, name, kind == PUSH_POP_RANGE, start, end if ended else None))
    return found


def _add_work(export: _Export, ranges: list[RingRange]) -> None:
    """Gives each call what was launched in it, by its thread."""
    if LAUNCHES not in export.tables:
        return
    by_thread: dict[int, list[RingRange]] = defaultdict(list)
    for each in ranges:
        if each.is_call and each.end_ns is not None:
            by_thread[each.thread].append(each)
    launched_in: dict[tuple[int, int], RingRange] = {}
    for start, thread, correlation in export.rows(LAUNCHES, "start globalTid correlationId"):
        call = _call_at(by_thread.get(thread, []), start)
        if call is not None:
            launched_in[call.process, correlation] = call
    for process, correlation, work in _device_work(export):
        call = launched_in.get((process, correlation))
        if call is not None:
            call.work.append(work)


def _call_at(calls: list[RingRange], time_ns: int) -> RingRange | None:
    """The one that runs then. Calls of a thread follow one another."""
    index = bisect.bisect_right(calls, time_ns, key=lambda call: call.start_ns) - 1
    if index < 0:
        return None
    end_ns = calls[index].end_ns
    return calls[index] if end_ns is not None and time_ns <= end_ns else None


def _device_work(export: _Export) -> Iterator[tuple[int, int, DeviceWork]]:
    """All that ran on devices, after its process and its correlation ID, which is unique within the process."""
    where, columns = "WHERE globalPid IS NOT NULL", "start end globalPid correlationId"
    if KERNELS in export.tables:
        names = export.names(KERNELS, "shortName")
        for start, end, process, correlation, name in export.rows(KERNELS, f"{columns} shortName", where):
            yield _process_of(process), correlation, DeviceWork(category_of(names.get(name, "")), start, end)
    for table, category in ((COPIES, MOVING), (FILLS, OTHER)):
        if table in export.tables:
            for start, end, process, correlation in export.rows(table, columns, where):
                yield _process_of(process), correlation, DeviceWork(category, start, end)


def _process_of(global_id: int) -> int:
    """What a globalTid and the globalPid of its process have in common."""
    return global_id >> 24


def category_of(kernel: str) -> str:
    """What a kernel does that was launched in a call, by its name without namespaces and parameters."""
    return next((category for begin, category in KERNEL_NAMES.items() if kernel.startswith(begin)), OTHER)
