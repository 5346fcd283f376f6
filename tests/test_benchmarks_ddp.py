"""``bench ddp``: its figures on made-up times, its check with reducers that are wrong, and tiny runs of all of it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr
from conftest import Run
from ddp_helpers import group
from launch import Seat
from ring_reduce.benchmarks import ddp, ddp_check, ddp_rank, ddp_trainer
from ring_reduce.benchmarks.ddp_report import document, report
from ring_reduce.benchmarks.ddp_result import Check, Trained
from ring_reduce.benchmarks.ddp_trainer import REDUCERS, Groups, Trainer
from ring_reduce.benchmarks.ddp_workloads import BATCHES, WORKLOADS
from ring_reduce.benchmarks.rounding import rounding
from ring_reduce.demo.data import Digits

pytestmark = pytest.mark.usefixtures("forked_ranks")

HOST = {"cores": 2, "processor": "a processor", "torch": "9.9"}
RIGHT = Check(outside=0, differing=0, strayed=0.0)


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ring-reduce bench ddp")
    ddp.add_arguments(parser)
    return parser.parse_args(options)


def trained(check_of_gloo: Check = RIGHT, /, **step_us: float) -> Trained:
    times = {name: np.full((6, 2), value) for name, value in step_us.items()}
    checks = {name: check_of_gloo if name == "gloo" else RIGHT for name in times if name != "none"}
    return Trained("tiny", "a network", 167, 668, 2, 10, 1, times, checks, {})


# Figures.


def test_the_table_shows_what_was_not_hidden_and_who_is_faster() -> None:
    lines = report(HOST, "cpu", [trained(none=1000.0, ring=1250.0, gloo=1500.0)]).splitlines()
    assert lines == [
        "training steps on cpu, 2 ranks, 2 cores (a processor), torch 9.9",
        "",
        "tiny: a network, 167 parameters, 668 bytes of gradients; batch 10 and 1 torch thread a rank, 12 steps of "
        "each",
        "contender    step ms       min       p99 not hidden ms  samples/s             step / none",
        "none           1.000     1.000     1.000             -    20000.0                       -",
        "ring           1.250     1.250     1.250         0.250    16000.0       1.25 [1.25, 1.25]",
        "gloo           1.500     1.500     1.500         0.500    13333.3          1.5 [1.5, 1.5]",
        "step of gloo / step of ring: 1.2 [1.2, 1.2]",
    ]


def test_the_json_holds_the_same_and_no_nan() -> None:
    wrong = Check(outside=3, differing=0, strayed=math.inf)
    found = document(HOST, "cpu", [trained(wrong, none=1000.0, ring=1250.0, gloo=1500.0)])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    (model,) = found["models"]
    assert (found["world"], model["steps"], model["batch_a_rank"]) == (2, 12, 10)
    none, ring, gloo = model["rows"]
    assert (none["not_hidden_us"], none["over_unreduced"], none["check"]) == (None, None, None)
    assert ring == {
        "contender": "ring",
        "step_us": 1250.0,
        "step_us_min": 1250.0,
        "step_us_p99": 1250.0,
        "not_hidden_us": 250.0,
        "samples_per_s": 16000.0,
        "over_unreduced": {"value": 1.25, "low": 1.25, "high": 1.25},
        "check": {"outside": 0, "differing": 0, "strayed": 0.0},
    }
    assert gloo["check"] == {"outside": 3, "differing": 0, "strayed": None}
    assert model["over_ring"] == {"gloo": {"value": 1.2, "low": 1.2, "high": 1.2}}


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (Check(outside=3, differing=0, strayed=0.0), "3 elements are not the mean of what the ranks put in"),
        (Check(outside=0, differing=2000, strayed=0.0), "2,000 elements differ from rank 0's"),
        (Check(outside=0, differing=0, strayed=0.5), "its ranks did other work than the bare module"),
        (Check(outside=0, differing=0, strayed=math.nan), "its ranks did other work than the bare module"),
    ],
)
def test_what_is_wrong_is_said(check: Check, words: str) -> None:
    lines = report(HOST, "cpu", [trained(check, none=1.0, gloo=2.0)]).splitlines()
    assert lines[-1].startswith(f"WRONG RESULTS: tiny, gloo: {words}")


def test_a_contender_that_cannot_run_is_named() -> None:
    with rr.Ring(rank=0, world=1) as ring:
        why = ddp_trainer.why_absent("ring", Groups(ring, None), "meta")
        assert ddp_trainer.why_absent("ring", Groups(ring, None), "cpu") is None
        assert ddp_trainer.why_absent("nccl", Groups(ring, None), "cuda") is None
    assert why is not None
    assert why.startswith("the ring can't run on meta: ")
    found = trained(none=1.0)
    found.absent["ring"] = why
    assert report(HOST, "cuda", [found]).splitlines()[-1] == f"ring is left out: {why}"


# What is trained.


def test_the_networks_are_as_large_as_they_say() -> None:
    sizes = {name: sum(p.numel() for p in each.build().parameters()) for name, each in WORKLOADS.items()}
    assert sizes == {"mlp": 25_178_112, "digits": 38_282, "tiny": 167}


@pytest.mark.parametrize("name", ["tiny", "digits"])
def test_every_rank_has_batches_of_its_own_that_fit_the_network(name: str) -> None:
    images = np.arange(5 * 64, dtype=np.float32).reshape(5, 1, 8, 8)
    labels = np.arange(5)
    digits = Digits(images, labels, images[:0], labels[:0])
    workload = WORKLOADS[name]
    ours, others = (workload.batches(rank, 3, "cpu", digits) for rank in range(2))
    assert len(ours) == BATCHES
    assert len({inputs.numpy().tobytes() for inputs, _ in ours + others}) == 2 * BATCHES
    for inputs, classes in ours:
        assert workload.build()(inputs).shape == (3, workload.classes)
        assert (classes >= 0).all()
        assert (classes < workload.classes).all()
        if name == "digits":
            assert torch.equal(inputs, torch.from_numpy(images)[classes])  # each image with its own label


# The check.


def undivided(module: nn.Module, groups: Groups) -> nn.Module:
    model = DistributedDataParallel(module)
    rr.attach(model, groups.ring, rr.SUM)
    return model


def spoiled(module: nn.Module, groups: Groups, spoil: Callable[[torch.Tensor], object]) -> nn.Module:
    """The ring's hook, and then something happens to the bucket that it reduced, on all ranks."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        def then(future):  # type: ignore[no-untyped-def]
            spoil(future.value())
            return future.value()

        return rr.ring_hook(state, bucket).then(then)

    model = DistributedDataParallel(module)
    model.register_comm_hook(rr.RingHookState(groups.ring, rr.MEAN), hook)
    return model


def one_off(module: nn.Module, groups: Groups) -> nn.Module:
    """The largest element is off by four units in the last place."""

    def spoil(x: torch.Tensor) -> None:
        x[x.abs().argmax()] *= 1 + 4 * torch.finfo(x.dtype).eps

    return spoiled(module, groups, spoil)


def not_finite(module: nn.Module, groups: Groups) -> nn.Module:
    return spoiled(module, groups, lambda x: x[5:8].fill_(math.nan))


def others_start(module: nn.Module, groups: Groups) -> nn.Module:
    """Works with other parameters than the contenders beside it."""
    module.load_state_dict = lambda *_: None  # type: ignore[method-assign]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    return REDUCERS["ring"](module, groups)


PLANTED: dict[str, Callable[[nn.Module, Groups], nn.Module]] = {
    "right": REDUCERS["ring"],
    "bare": REDUCERS["none"],
    "undivided": undivided,
    "one off": one_off,
    "others": others_start,
    "not finite": not_finite,
}


def checked(seat: Seat, name: str, steps: int) -> Check:
    workload = WORKLOADS["tiny"]
    with group(seat) as ring:
        groups = Groups(ring, None)
        reducers = {"none": REDUCERS["none"], name: PLANTED[name]}
        trainers = {each: Trainer(workload.build(), reducer, groups) for each, reducer in reducers.items()}
        batch, *others = workload.batches(seat.rank, 5, "cpu", None)
        for other in others[:steps]:
            trainers[name].step(other)
        return ddp_check.check(trainers, workload.build(), batch)[name]


@pytest.mark.parametrize("world", [2, 3])
def test_a_right_reducer_passes(run: Run, world: int) -> None:
    assert run(world, checked, "right", 2) == [RIGHT] * world


def test_no_reduction_is_found(run: Run) -> None:
    found, same = run(2, checked, "bare", 0)
    assert found == same
    assert found.outside > 300  # of 2 x 167, where no gradient is 0 on both
    assert 150 < found.differing <= 167  # of rank 1's
    assert found.strayed == 0


def test_steps_that_were_not_reduced_are_found_afterwards(run: Run) -> None:
    without, with_steps = (run(2, checked, "bare", steps)[0].differing for steps in (0, 1))
    assert with_steps > without + 100


def test_a_sum_is_no_mean(run: Run) -> None:
    found = run(2, checked, "undivided", 0)[0]
    assert found.outside > 300
    assert (found.differing, found.strayed) == (0, 0)


def test_one_element_that_rounding_does_not_explain_is_found(run: Run) -> None:
    assert run(2, checked, "one off", 0)[0] == Check(outside=2, differing=0, strayed=0)


def test_other_work_is_found(run: Run) -> None:
    found = run(2, checked, "others", 0)[0]
    assert (found.outside, found.differing) == (0, 0)
    assert found.strayed > 0.1


def test_nan_is_found(run: Run) -> None:
    assert run(2, checked, "not finite", 0)[0].outside == 2 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_is_of_rounding(dtype: torch.dtype) -> None:
    world, n = 3, 20_000
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(world, n, generator=generator, dtype=torch.float64).to(dtype)
    got = parts[0]
    for part in parts[1:]:
        got = got + part
    exact = parts.double().sum(dim=0) / world
    bound = rounding(parts.double().abs().mean(dim=0), world, dtype)
    error = ((got / world).double() - exact).abs()
    assert (error <= bound).all()
    assert (error / bound).max() > 0.35  # and no wider than it has to be
    assert rounding(torch.zeros(1), world, torch.float32) > 0  # the smallest numbers are rounded too


# The command.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "0"], "0 is not between 1 and 64"),
        (["--batch", "0"], "0 is not between 1 and"),
        (["--steps", "many"], "'many' is not a whole number"),
        (["--model", "huge"], "invalid choice: 'huge'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--json", "missing/folder/file.json"], "does not exist"),
    ],
)
def test_bad_options_get_a_clear_error(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*options)
    assert message in capsys.readouterr().err


def test_too_few_gpus_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ddp.run(parsed("--device", "cuda", "--model", "tiny")) == 2
    assert "2 ranks need a GPU each, and torch sees 1 here" in capsys.readouterr().err


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert ddp.run(parsed("--model", "tiny", "digits")) == 2
    assert (
        "missing: pip install '.[demo]' in ring_reduce's source, or give --model mlp"
        in capsys.readouterr().err
    )


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    assert ddp.run(parsed("--model", "tiny", "--steps", "11", "--batch", "3", "--json", str(file))) == 0
    (model,) = json.loads(file.read_text())["models"]
    assert [row["contender"] for row in model["rows"]] == ["none", "ring", "gloo"]
    assert (model["steps"], model["batch_a_rank"], model["parameters"]) == (12, 3, 167)
    for row in model["rows"]:
        assert 0 < row["step_us_min"] <= row["step_us"] <= row["step_us_p99"]
        assert row["samples_per_s"] == pytest.approx(2 * 3 / row["step_us"] * 1e6)
        assert row["contender"] == "none" or row["check"] == {"outside": 0, "differing": 0, "strayed": 0}
    shown = capsys.readouterr()
    assert "WRONG" not in shown.out
    assert shown.err == ""  # no progress where stderr is no terminal


def planted_rank(rank: int, job: ddp_rank.Job, say: Callable[[str], None]) -> list[Trained]:
    """A rank whose ring forgets to divide."""
    return ddp_rank.run_rank_with({**REDUCERS, "ring": undivided}, rank, job, say)


def failing_rank(rank: int, job: ddp_rank.Job, say: Callable[[str], None]) -> list[Trained]:
    raise OSError("no such luck")


def test_a_wrong_reducer_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ddp, "RANK_MAIN", f"{__name__}:planted_rank")
    assert ddp.run(parsed("--model", "tiny", "--steps", "2")) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG RESULTS")]
    assert len(wrong) == 1
    assert wrong[0].startswith("WRONG RESULTS: tiny, ring: 3")


def test_a_rank_that_fails_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ddp, "RANK_MAIN", f"{__name__}:failing_rank")
    assert ddp.run(parsed("--model", "tiny")) == 2
    assert "no such luck" in capsys.readouterr().err
