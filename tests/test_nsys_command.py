"""``ring-reduce trace nsys``, from the command line to the table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nsys_cases import BUCKET, IPC_CALL, PROCESS_GROUP_CALL, SHM_CALL, START_END, Export, thread_of, two_ranks
from ring_reduce import cli

PROFILING = Path(__file__).resolve().parents[1] / "docs" / "profiling.md"
MAIN = thread_of(20)


def run(*arguments: str | Path) -> int:
    try:
        return cli.main(["trace", *map(str, arguments)])
    except SystemExit as end:  # argparse
        return int(end.code or 0)


def test_the_table_is_the_one_in_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nsys", two_ranks(tmp_path / "ddp.sqlite")) == 0
    printed = capsys.readouterr().out
    shown = re.findall(
        r"^    \$ ring-reduce trace nsys ddp.sqlite\n((?:    .*\n)+)",
        PROFILING.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [re.sub("^    ", "", each, flags=re.MULTILINE) for each in shown] == [printed]
    assert IPC_CALL in printed


def test_a_table_without_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = Export(tmp_path / "plain.sqlite")
    export.range(MAIN, BUCKET, 0, 10, START_END)
    export.range(MAIN, PROCESS_GROUP_CALL, 1, 9)
    export.kernel(MAIN, 5, "combine_kernel", 6, 7)
    assert run("nsys", export.write()) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_json_holds_the_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sums.json"
    assert run("nsys", two_ranks(tmp_path / "ddp.sqlite"), "--json", path) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["unfinished"] == 0
    assert len(document["calls"]) == 4
    assert document["calls"][2] == {
        "pid": 4712,
        "name": IPC_CALL,
        "calls": 1,
        "host_ns": 30_000,
        "host_ns_median": 30_000,
        "device": {
            "span_ns": 300_000,
            "ring_kernel_ns": 300_000,
            "reducing_ns": 0,
            "moving_ns": 0,
            "other_ns": 0,
            "waiting_ns": 0,
        },
    }
    assert document["calls"][3]["device"] is None


def test_a_profile_of_the_cpu_says_what_splits_its_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = Export(tmp_path / "cpu.sqlite")
    export.range(MAIN, SHM_CALL, 0, 5)
    export.range(MAIN, SHM_CALL, 10, 11)
    export.range(MAIN, SHM_CALL, 20, None)
    assert run("nsys", export.write()) == 0
    heads, row, *notes = capsys.readouterr().out.splitlines()
    assert heads.split()[:2] == ["process", "20"]
    assert row.split()[-9:] == ["2", "0.006", "3.0", *"------"]
    assert len(notes) == 2
    assert "ring-reduce trace splits those over shared memory" in notes[0]
    assert notes[1] == "Not in the sums: 1 that had not ended when the profile did."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nsys", "none.sqlite"], "there is no file 'none.sqlite'"),
        (["nsys"], "FILE.sqlite"),
        (["nsys", "empty.sqlite"], "ring-reduce trace nsys: empty.sqlite is SQLite, but no export of nsys"),
        (["nsys", "empty.sqlite", "--json", "no/such.json"], "does not exist"),
        (["nsys", "empty.sqlite", "--world", "2"], "unrecognized arguments: --world 2"),
    ],
)
def test_bad_arguments(
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.sqlite").touch()
    assert run(*options) == 2
    assert said in capsys.readouterr().err
