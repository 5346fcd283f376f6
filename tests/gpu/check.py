"""`make gpu-check`: all that only a GPU can show, in one command.

Each step is a program of its own with a time-out, so that one that hangs or crashes costs itself alone. Ends in
`N passed, N failed, N skipped`, and writes gpu-check.json with the card's name into $OUT, else build/.

    python tests/gpu/check.py [step ...]        all steps, or those named
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUTPUT = Path(os.environ.get("OUT") or ROOT / "build")
LOGS = ROOT / "build" / "gpu-check"
BUDGET_S = 560.0  # of all steps together


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]
    timeout_s: float


def program(name: str, timeout_s: float, *arguments: str, file: str | None = None) -> Step:
    return Step(name, [sys.executable, str(HERE / f"{file or name}.py"), *arguments], timeout_s)


STEPS = [
    program("probe", 60),
    program("build", 240),
    program("lint", 120),
    program("exact", 120, "2", file="exact"),
    program("exact_4", 90, "4", file="exact"),
    program("exact_8", 90, "8", file="exact"),
    program("protocol", 90),
    program("deadline", 45),
    program("triton_passes", 120),
    # Before the steps that a hang is likelier to cost much of the time.
    program("speed", 150),
    program("ipc", 240),
    program("device_calls", 160),
    program("ddp", 160),
    program("bench", 120),
    program("sanitizers", 170),
]


@dataclass
class Result:
    step: str
    seconds: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""

    def count(self, outcome: str) -> int:
        return sum(finding["outcome"] == outcome for finding in self.findings)


def run(step: Step, deadline: float) -> Result:
    """Runs a step; one that ends badly has a failed finding more."""
    left = deadline - time.monotonic()
    if left < 5:
        return Result(step.name, findings=[_finding("skipped", step.name, "no time is left")])
    timeout = min(step.timeout_s, left)
    begin = time.monotonic()
    log = LOGS / f"{step.name}.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path()}
    with log.open("w") as output:
        process = subprocess.Popen(
            step.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = f"no end after {timeout:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    findings = [json.loads(line[2:]) for line in text.splitlines() if line.startswith("@@")]
    rest = "\n".join(line for line in text.splitlines() if not line.startswith("@@"))
    if status != 0 or not findings:
        findings.append(_finding("failed", f"{step.name} ended", f"{status}\n{rest[-1500:]}"))
    return Result(step.name, time.monotonic() - begin, findings, rest[-4000:])


def python_path() -> str:
    """With tests/ and, where pip could not install the package, the tree that the build step made."""
    paths = [str(ROOT / "build" / "gpu-path"), str(HERE), str(ROOT / "tests")]
    return os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def _finding(outcome: str, name: str, detail: str) -> dict[str, Any]:
    return {"outcome": outcome, "name": name, "detail": detail}


def show(result: Result) -> None:
    """One line a step, and what failed."""
    counts = ", ".join(f"{result.count(what)} {what}" for what in ("passed", "failed", "skipped"))
    print(f"{result.step:<16} {result.seconds:6.1f} s   {counts}", flush=True)
    for finding in result.findings:
        if finding["outcome"] in ("failed", "skipped"):
            print(f"    {finding['outcome']}: {finding['name']}: {finding['detail'][-1200:]}", flush=True)


def table(results: list[Result]) -> str:
    figures = [f for result in results for f in result.findings if f["outcome"] == "figure"]
    return "\n".join(f"  {f['name']:<64} {f['value']:10.4g} {f['unit']:<6} {f['target']}" for f in figures)


def main(names: list[str]) -> int:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + BUDGET_S
    results: list[Result] = []
    for step in STEPS:
        if not names or step.name in names:
            results.append(run(step, deadline))
            show(results[-1])
            write(results)
    print(table(results))
    total = [sum(result.count(what) for result in results) for what in ("passed", "failed", "skipped")]
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if total[1] else 0


def write(results: list[Result]) -> None:
    """After each step, so that a run that is cut off leaves what it found."""
    card = next((f["detail"] for r in results for f in r.findings if f["name"] == "card"), "unknown")
    whole = {"card": card, "steps": [vars(result) for result in results]}
    (OUTPUT / "gpu-check.json").write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
