"""The documents are run: every block with a prompt on a real ring, every other Python block against the API's names."""

from __future__ import annotations

import ast
import doctest
import itertools
import json
import math
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "normalization.md"
DOCUMENTS = [GUIDE, *filter(Path.is_file, [ROOT / "README.md"])]
MAX_WORLD = 4
WAIT_S = 120.0


# ---- on_ranks: one process a rank, kept from block to block


def serve_rank(directory: str, rank: int, pipe: Connection) -> None:
    """Runs the calls that come through the pipe and sends back each result. Makes a ring for each world."""
    rings: dict[int, rr.Ring] = {}
    while (message := pipe.recv()) is not None:
        world, x, normalization, count = message
        if world not in rings:
            store = dist.FileStore(f"{directory}/store{world}", world)
            rings[world] = rr.Ring(store, rank=rank, world=world, timeout=WAIT_S)
        pipe.send(rings[world].all_reduce(x, normalization, count=count))
    for ring in rings.values():
        ring.close()


class Ranks:
    """Up to MAX_WORLD processes, each a rank of every ring that is large enough."""

    def __init__(self, directory: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(MAX_WORLD):
            here, there = context.Pipe()
            process = context.Process(target=serve_rank, args=(directory, rank, there), daemon=True)
            process.start()
            there.close()  # or the death of the rank would not be seen here
            self._pipes.append(here)
            self._processes.append(process)

    def on_ranks(
        self,
        xs: Sequence[Any],
        normalization: rr.Normalization = rr.SUM,
        counts: Sequence[float] | None = None,
    ) -> Any:
        """What the documents call ``on_ranks``."""
        given = counts if counts is not None and normalization.uses_count else [None] * len(xs)
        pipes = self._pipes[: len(xs)]
        for pipe, x, count in zip(pipes, xs, given, strict=True):
            array = np.array(x) if np.ndim(x) else np.array([x], np.float64)
            pipe.send((len(xs), array, normalization, count))
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(WAIT_S), f"no result from rank {rank} in {WAIT_S:g} s"
            results.append(pipe.recv())
        assert len({result.tobytes() for result in results}) == 1, f"ranks differ: {results}"
        return results[0] if np.ndim(xs[0]) else results[0].item()

    def stop(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(WAIT_S)
            process.terminate()


OnRanks = Callable[..., Any]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRanks]:
    ranks = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield ranks.on_ranks
    ranks.stop()


# ---- the blocks of the documents


def code_blocks(text: str) -> list[tuple[int, str, str]]:
    """(line of the first line, language, code without its indent) of each fenced block."""
    fence = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    blocks = []
    for match in fence.finditer(text):
        indent, language, code = match.groups()
        line = text[: match.start(3)].count("\n") + 1
        blocks.append((line, language, re.sub(f"^{indent}", "", code, flags=re.MULTILINE)))
    return blocks


def doctest_of(path: Path, text: str, names: dict[str, Any]) -> doctest.DocTest:
    """All blocks with a prompt, as one session. Fences, which would pass for output, are left out."""
    lines = [""] * (text.count("\n") + 1)
    for first, language, code in code_blocks(text):
        if language == "pycon":
            for offset, line in enumerate(code.splitlines()):
                lines[first - 1 + offset] = line
    return doctest.DocTestParser().get_doctest("\n".join(lines), names, path.name, str(path), 0)


def failures_of(path: Path, text: str, names: dict[str, Any]) -> str:
    """What differs from the document; empty if nothing does."""
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(doctest_of(path, text, names), out=said.append)
    return "".join(said)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_numbers_are_produced(path: Path, on_ranks: OnRanks) -> None:
    failures = failures_of(path, path.read_text(encoding="utf-8"), {"on_ranks": on_ranks})
    assert not failures, failures


def test_guide_has_its_numbers_in_blocks_that_run() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    examples = doctest_of(GUIDE, text, {}).examples
    assert len(examples) >= 60
    assert sum("on_ranks(" in example.source for example in examples) >= 30
    assert ">>>" not in re.sub(r"```pycon.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("divide_by(4))\n7.5", "divide_by(4))\n7.25"), ("counts=[3, 1])\n8.5", "counts=[1, 3])\n8.5")],
    ids=["output", "input"],
)
def test_a_wrong_number_is_caught(right: str, wrong: str, on_ranks: OnRanks) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert right in text
    assert "Failed example" in failures_of(GUIDE, text.replace(right, wrong, 1), {"on_ranks": on_ranks})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_use_names_that_exist(path: Path) -> None:
    """Blocks without a prompt need a model or a cluster; they must at least parse and use the API as it is."""
    ring = rr.Ring(rank=0, world=1)
    owners: dict[str, Any] = {
        "rr": rr,
        "ring": ring,
        "state": rr.RingHookState(ring, rr.WEIGHTED_MEAN),
        "accumulator": rr.Accumulator([torch.nn.Parameter(torch.zeros(1))], rr.SUM),
    }
    for line, language, code in code_blocks(path.read_text(encoding="utf-8")):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(code, f"{path.name}:{line}")):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in owners
            ):
                where = f"{path.name}:{line + node.lineno - 1}"
                assert hasattr(owners[node.value.id], node.attr), f"{where}: no {node.value.id}.{node.attr}"
    ring.close()


LINKED = [
    *DOCUMENTS,
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "gpu.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "profiling.md",
    ROOT / "docs" / "reliability.md",
    ROOT / "examples" / "README.md",
    ROOT / "examples" / "verify" / "README.md",
]


@pytest.mark.parametrize("path", LINKED, ids=lambda p: p.parent.name + p.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, f"{path.name}: no title for {target}"
        elif "://" not in target:
            assert (path.parent / target.split("#")[0]).exists(), f"{path.name}: no file {target}"


# ---- what the guide states in tables and prose


def factor_table(text: str) -> dict[tuple[str, str], str]:
    """(local loss, normalization) -> the symbol in the guide's table."""
    rows = [
        [cell.strip(" `*") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(("| local loss |", "| sum / global batch |", "| local mean |", "| local sum |"))
    ]
    head, *body = rows
    return {(row[0], name): cell for row in body for name, cell in zip(head[1:], row[1:], strict=True)}


def test_factor_table() -> None:
    """Each symbol against the formula, for sizes whose products all differ."""
    n, batch = 4, 20
    sums = [Fraction(s) for s in (8, 16, 24, 48)]
    counts = [Fraction(batch, n)] * n
    loss_divisor = {"sum / global batch": Fraction(batch), "local mean": counts[0], "local sum": Fraction(1)}
    table = factor_table(GUIDE.read_text(encoding="utf-8"))
    assert len(table) == 15
    for (loss, normalization), symbol in table.items():
        local = [s / loss_divisor[loss] for s in sums]
        weighted = sum(c * x for c, x in zip(counts, local, strict=True))
        reduced = {
            "SUM": sum(local),
            "MEAN": sum(local) / n,
            "divide_by(B)": sum(local) / batch,
            "DIVIDE_BY_COUNT": sum(local) / sum(counts),
            "WEIGHTED_MEAN": weighted / sum(counts),
        }[normalization]
        numerator, _, denominator = symbol.partition("/")
        sizes = {"n": n, "B": batch, "1": 1, "": 1}
        assert reduced / (sum(sums) / batch) == Fraction(sizes[numerator], sizes[denominator]), (
            loss,
            normalization,
        )


def test_sizes_that_the_guide_recommends_tell_factors_apart() -> None:
    sizes = [Fraction(4), Fraction(5), Fraction(3)]
    powers = list(itertools.product(range(-2, 3), repeat=3))
    factors = {math.prod(size**power for size, power in zip(sizes, each, strict=True)) for each in powers}
    assert len(factors) == len(powers)


def accumulate(rank: int, directory: str) -> None:
    """Two micro-batches with DDP, no_sync around both passes or around the backward alone, for SUM and MEAN."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=2)
    values = [(1.0, 2.0), (3.0, 4.0)][rank]
    found = {}
    with rr.Ring.from_group() as ring:
        for normalization in (rr.SUM, rr.MEAN):
            for wraps_forward in (True, False):
                model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
                model.register_comm_hook(rr.RingHookState(ring, normalization), rr.ring_hook)
                first, second = (
                    torch.tensor([[x]]) for x in values
                )  # the gradient of the output is the input
                if wraps_forward:
                    with model.no_sync():
                        model(first).sum().backward()
                else:
                    output = model(first).sum()
                    with model.no_sync():
                        output.backward()
                model(second).sum().backward()
                found[f"{normalization} {wraps_forward}"] = model.module.weight.grad.item()
    dist.destroy_process_group()
    Path(directory, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def test_no_sync_has_to_wrap_the_forward(tmp_path: Path) -> None:
    """The guide's numbers for sums that are reduced twice, with DDP itself."""
    torch.multiprocessing.spawn(accumulate, args=(str(tmp_path),), nprocs=2)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert found == {"SUM True": 10.0, "SUM False": 14.0, "MEAN True": 5.0, "MEAN False": 5.0}


def test_the_readme_shows_what_verify_prints() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^    \$ ring-reduce (verify .*)\n((?:(?:    .*)?\n)+)", readme, re.MULTILINE)
    command, lines = shown[0].split(), [line[4:] for line in shown[1].splitlines() if line.strip()]
    done = subprocess.run(
        [sys.executable, "-m", "ring_reduce", *command], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stderr
    assert len(lines) > 8
    for line in lines:
        assert line in done.stdout.splitlines(), f"{line!r} is not in\n{done.stdout}"
