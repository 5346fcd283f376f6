"""The command line: help without optional packages, errors in one line, Ctrl-C without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from importlib.metadata import version
from typing import Any

import pytest

from ring_reduce import cli
from ring_reduce.errors import PeerLost


def add_command(monkeypatch: pytest.MonkeyPatch, run: object, extra: str | None = None) -> None:
    """Puts a sub-command ``fake`` in place of all."""
    module = types.ModuleType("fake_command")
    module.add_arguments = lambda parser: parser.add_argument("--n", type=int, default=1)  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setattr(cli, "COMMANDS", {"fake": cli.Command("fake_command", "a fake", extra)})


def test_a_command_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, lambda args: args.n)
    assert cli.main(["fake", "--n", "7"]) == 7


def test_a_ring_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: object) -> int:
        raise PeerLost("rank 1's process ended\nin call 3")

    add_command(monkeypatch, fail)
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == "ring-reduce: rank 1's process ended in call 3\n"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_args: object) -> int:
        raise KeyboardInterrupt

    add_command(monkeypatch, interrupt)
    assert cli.main(["fake"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def need(_args: object) -> int:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    add_command(monkeypatch, need, extra="demo")
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == (
        "ring-reduce fake: the module sklearn is missing: pip install '.[demo]' in ring_reduce's source\n"
    )
    add_command(monkeypatch, need, extra=None)
    assert cli.main(["fake"]) == 2
    assert "pip install" not in capsys.readouterr().err


def test_a_broken_package_of_our_own_is_not_blamed_on_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def need(_args: object) -> int:
        raise ModuleNotFoundError("No module named 'ring_reduce.gone'", name="ring_reduce.gone")

    add_command(monkeypatch, need, extra="demo")
    assert cli.main(["fake"]) == 2
    shown = capsys.readouterr().err
    assert "pip install" not in shown
    assert shown.endswith("ModuleNotFoundError: No module named 'ring_reduce.gone'\n")


def test_an_unexpected_error_is_2_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(monkeypatch, lambda args: args.no_such_option)
    assert cli.main(["fake"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "AttributeError: 'Namespace' object has no attribute 'no_such_option'" in shown


def run_fake(body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process of its own whose command is ``body``."""
    code = (
        "import os, sys, types; from ring_reduce import cli\n"
        "module = types.ModuleType('fake'); module.add_arguments = lambda parser: None\n"
        f"module.run = lambda args: {body}\n"
        "sys.modules['fake'] = module; cli.COMMANDS = {'fake': cli.Command('fake', '', None)}\n"
        "sys.exit(cli.main(['fake']))"
    )
    return subprocess.run([sys.executable, "-c", code], text=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("flush", [True, False])
def test_a_full_stdout_is_2_and_one_line(flush: bool) -> None:
    with open("/dev/full", "w") as full:
        done = run_fake(f"print('word', flush={flush}) or 1", stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, "ring-reduce: [Errno 28] No space left on device\n")


def test_a_reader_that_is_gone_is_2_and_one_line() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_fake("print('word') or 0", stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (2, "ring-reduce: [Errno 32] Broken pipe\n")


def test_a_full_stderr_is_2() -> None:
    with open("/dev/full", "w") as full:
        done = run_fake("print('word', file=sys.stderr, flush=True) or 1", stdout=full, stderr=full)
    assert done.returncode == 2


@pytest.mark.parametrize("argv", [["--help"], ["doctor", "--help"], ["demo", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 0
    assert "usage: ring-reduce" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ring-reduce {version('ring-reduce')}\n"


@pytest.mark.parametrize(
    "argv", [[], ["no-such-command"], ["doctor", "--no-such-option"], ["--json", "doctor"]]
)
def test_bad_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "ring-reduce" in capsys.readouterr().err


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from ring_reduce.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m.startswith(('ring_reduce.demo', 'ring_reduce.doctor', 'torch'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_real_ctrl_c() -> None:
    """SIGINT to a process that is in a command; it says when it is there."""
    code = (
        "import sys, time, types; from ring_reduce import cli\n"
        "module = types.ModuleType('slow'); module.add_arguments = lambda parser: None\n"
        "module.run = lambda args: (print('in', flush=True), time.sleep(100))\n"
        "sys.modules['slow'] = module; cli.COMMANDS = {'slow': cli.Command('slow', '', None)}\n"
        "sys.exit(cli.main(['slow']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "ring-reduce: interrupted\n"
