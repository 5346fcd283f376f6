"""SQLite files as ``nsys export`` writes them: of its documented schema the tables and columns that matter here."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

US = 1000  # nanoseconds
# start and end in nanoseconds. A table is only there if something of its kind happened.
SCHEMA = {
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, "
        "color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
        "shortName INTEGER NOT NULL, mangledName INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, "
        "copyKind INTEGER NOT NULL"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, "
        "bytes INTEGER NOT NULL"
    ),
}
PUSH_POP, START_END = 59, 60


def thread_of(pid: int, tid: int | None = None, *, host: int = 0) -> int:
    """A globalTid: 8 bits for the host and 8 for its virtual machine, 24 for the process, 24 for the thread."""
    return host << 56 | pid << 24 | (pid if tid is None else tid)


class Export:
    """A file that grows. Times are microseconds, from any start.

    With ``registered``, the texts of ranges are in StringIds, not in NVTX_EVENTS.
    """

    def __init__(self, path: Path, *, registered: bool = False) -> None:
        self.path, self.registered = path, registered
        self._rows: dict[str, list[dict[str, object]]] = {}
        self._strings: dict[str, int] = {}
        self._correlations: dict[int, int] = {}  # by process: each counts from 1, so that they collide
        self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.15.1")

    def add(self, table: str, **columns: object) -> None:
        """A row."""
        self._rows.setdefault(table, []).append(columns)

    def string(self, value: str) -> int:
        """Its StringId."""
        if value not in self._strings:
            self._strings[value] = 7 + len(self._strings)
            self.add("StringIds", id=self._strings[value], value=value)
        return self._strings[value]

    def range(self, thread: int, name: str, start: float, end: float | None, kind: int = PUSH_POP) -> None:
        """An NVTX range; without an end the profile stopped within it."""
        text = {"textId": self.string(name)} if self.registered else {"text": name}
        times = {"start": round(start * US), "end": None if end is None else round(end * US)}
        self.add("NVTX_EVENTS", eventType=kind, globalTid=thread, domainId=0, **times, **text)

    def kernel(self, thread: int, launched: float, name: str, start: float, end: float) -> None:
        """A kernel, by its name without parameters, and the call of CUDA that launched it."""
        names = {"shortName": self.string(name), "demangledName": self.string(f"void {name}<float>(float*)")}
        self._work("KERNEL", thread, launched, (start, end), names)

    def copy(self, thread: int, launched: float, start: float, end: float) -> None:
        """A copy within the device."""
        self._work("MEMCPY", thread, launched, (start, end), {"bytes": 4096, "copyKind": 8})

    def fill(self, thread: int, launched: float, start: float, end: float) -> None:
        """A memset."""
        self._work("MEMSET", thread, launched, (start, end), {"bytes": 4096, "value": 0})

    def write(self, *, without: Sequence[str] = ()) -> Path:
        """Writes the file, without the tables, or TABLE.COLUMN, that are named."""
        connection = sqlite3.connect(self.path)
        for table, rows in self._rows.items():
            columns = [
                each for each in SCHEMA[table].split(", ") if f"{table}.{each.split()[0]}" not in without
            ]
            if table in without:
                continue
            connection.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            for row in rows:
                kept = {key: value for key, value in row.items() if f"{table}.{key}" not in without}
                marks = ", ".join("?" * len(kept))
                connection.execute(
                    f"INSERT INTO {table} ({', '.join(kept)}) VALUES ({marks})", [*kept.values()]
                )
        connection.commit()
        connection.close()
        return self.path

    def _work(
        self, kind: str, thread: int, launched: float, times: tuple[float, float], more: dict[str, int]
    ) -> None:
        process = thread >> 24 << 24
        correlation = self._correlations[process] = self._correlations.get(process, 0) + 1
        start, end = (round(time * US) for time in times)
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=round(launched * US),
            end=round(launched * US) + 1,
            eventClass=0,
            globalTid=thread,
            correlationId=correlation,
            nameId=self.string("cudaLaunchKernel"),
            returnValue=0,
        )
        self.add(
            f"CUPTI_ACTIVITY_KIND_{kind}",
            start=start,
            end=end,
            deviceId=0,
            contextId=1,
            streamId=7,
            correlationId=correlation,
            globalPid=process,
            **more,
        )


PROCESS_GROUP_CALL = "ring_reduce all_reduce 4194304 B MEAN process_group"
IPC_CALL = "ring_reduce all_reduce 4194304 B MEAN cuda_ipc"
SHM_CALL = "ring_reduce all_reduce 4096 B SUM shm"
BUCKET = "ring_reduce bucket 0 4194304 B MEAN"


def two_ranks(path: Path, *, registered: bool = False, without: Sequence[str] = ()) -> Path:
    """The example of docs/profiling.md: two calls over NCCL in process 4711, one of IPC and one of shm in 4712.

    The correlation IDs of both processes are the same.
    """
    export = Export(path, registered=registered)
    first, second = thread_of(4711), thread_of(4712)
    export.range(first, BUCKET, 990, 1110, START_END)
    # Runs 1050-1180 and 1200-1270: 10 us of moving lie under reducing, and 20 us in which nothing runs.
    export.range(first, PROCESS_GROUP_CALL, 1000, 1100)
    export.kernel(first, 1010, "ncclDevKernel_SendRecv", 1050, 1150)
    export.kernel(first, 1020, "combine_kernel", 1140, 1180)
    export.copy(first, 1030, 1200, 1260)
    export.fill(first, 1100, 1260, 1270)
    # Backward's own, launched by the same thread in the bucket but not in its call, and in it by another thread.
    export.kernel(first, 995, "ampere_sgemm_128x64", 1185, 1190)
    export.kernel(first, 1105, "ampere_sgemm_128x64", 1190, 1200)
    export.kernel(thread_of(4711, 4799), 1050, "ampere_sgemm_128x64", 1195, 1197)
    # Over at 2100: 40 + 100 us, and 60 between them.
    export.range(first, PROCESS_GROUP_CALL, 2000, 2040)
    export.kernel(first, 2001, "ncclDevKernel_SendRecv", 1900, 1940)
    export.kernel(first, 2002, "combine_kernel", 2000, 2100)
    export.range(second, IPC_CALL, 1000, 1030)
    export.kernel(second, 1010, "ring_kernel", 1500, 1800)
    export.range(second, SHM_CALL, 3000, 3250)
    return export.write(without=without)
