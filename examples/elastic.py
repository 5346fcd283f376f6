"""DDP that survives the death of a rank: torchrun starts all ranks again, and they go on from the last checkpoint.

On its own it kills a rank on the way, to show that nothing is lost. Both need torchrun's elastic launch:

    python examples/elastic.py
    torchrun --standalone --nproc-per-node 3 --max-restarts 3 examples/elastic.py EMPTY_FOLDER_FOR_CHECKPOINTS
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ring_reduce as rr

STEPS = 20
SAVE_EVERY = 5
KILLED_IN = 12
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def join_group() -> None:
    """``init_process_group("gloo")`` under a prefix of this attempt.

    torchrun keeps its store when it starts the ranks again, and Gloo would find the addresses of dead processes there.
    Where several hosts have a torchrun each, their counts differ: there set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    store, rank, world = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"attempt {ATTEMPT}", store), rank=rank, world_size=world
    )


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """It follows from the step alone, so that a step that is done again sees the same data."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(4 * rank + 3, 6, generator=generator)
    return inputs, inputs.square().sum(1, keepdim=True) + rank


def train(folder: Path) -> nn.Module:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with rr.Ring.from_group() as ring:
        state = rr.attach(model, ring, rr.WEIGHTED_MEAN)

        def backward(step: int) -> None:
            inputs, targets = make_batch(step, rank)
            optimizer.zero_grad()
            state.add_count(len(inputs))  # before the backward that it counts
            mse_loss(model(inputs), targets).backward()

        # DDP orders its buckets after the first backward, and the order of a sum follows from that. With one that is
        # thrown away every attempt gets the same bits.
        backward(0)
        first = load(folder / "checkpoint.pt", model, optimizer)
        for step in range(first, STEPS):
            backward(step)
            kill_one(step)
            optimizer.step()
            if rank == 0 and (step + 1) % SAVE_EVERY == 0:
                save(folder / "checkpoint.pt", model, optimizer, step + 1)
    say(f"attempt {ATTEMPT}: went from step {first} to {STEPS}" + ", after the checkpoint" * (first > 0))
    trained: nn.Module = model.module
    return trained


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A rank that is killed here leaves the checkpoint before."""
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{path}.new"
    )
    os.replace(f"{path}.new", path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on with. All ranks read the same file: it is written before any of them is started again."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step: int = saved["step"]
    return step


def kill_one(step: int) -> None:
    """What this example is about; leave it out. Rank 1 dies while the others wait for it in the next step."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts > 0 and ATTEMPT == "0" and step == KILLED_IN and dist.get_rank() == 1:
        print(f"attempt 0: rank 1 kills itself in step {step}, to show what follows", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def train_alone() -> nn.Module:
    """One process with all batches, to check against."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        parts = [make_batch(step, rank) for rank in range(dist.get_world_size())]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    join_group()
    try:
        weights, alone = (
            nn.utils.parameters_to_vector(model.parameters()).detach()
            for model in (train(folder), train_alone())
        )
        difference = float((weights - alone).norm() / alone.norm())
        assert difference < 1e-5, f"the weights differ from those of one process by {difference:.1e}"
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        say(
            f"relative difference from one process with all batches {difference:.1e}; sha256 of the weights {digest}"
        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "4",
            ]
            subprocess.run([*torchrun, "--max-restarts", "3", __file__, folder], check=True)
