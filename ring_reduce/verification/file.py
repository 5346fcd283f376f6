"""The file that ``ring-reduce verify`` checks: four functions, found and called as the protocol says."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_reduce.errors import VerifyError

OTHER_NAME = "ring_reduce_verified_file"  # of a file whose own is taken


@dataclass(frozen=True)
class Orders:
    """What every rank is given."""

    file: str
    world: int
    micro_batches: int  # planned
    lengths: tuple[int, ...]  # how many micro-batches each check has
    sample: int | None
    tolerance: float | None
    timeout: float
    store_path: str  # of an open file that the ranks inherit: nothing is left or missing


@dataclass(frozen=True)
class _Function:
    parameters: str
    returns: str


PROTOCOL = {
    "model": _Function("", "the torch.nn.Module, the same on every rank"),
    "batches": _Function(
        "rank, world, micro_batches", "the list of this rank's micro-batches, samples in dim 0"
    ),
    "losses": _Function("model, batch", "a 1-D tensor, one loss for each counted sample or token"),
    "step": _Function(
        "model, batches, job", "leaves the gradients it would step with; the loss it logs, or None"
    ),
}


@dataclass(frozen=True)
class UserFile:
    """The functions of a file that follows the protocol."""

    path: Path
    model: Callable[[], Any]
    losses: Callable[[Any, Any], Any]
    step: Callable[[Any, Any, Any], Any]
    _batches: Callable[[int, int, int], Any]

    def batches(self, rank: int, world: int, micro_batches: int) -> list[Any]:
        """Raises VerifyError unless there are as many as were asked for."""
        found = self._batches(rank, world, micro_batches)
        if not isinstance(found, (list, tuple)):
            raise VerifyError(
                f"{self.path}: batches() returned a {type(found).__name__} on rank {rank}; it has to return a list of "
                f"micro-batches"
            )
        if len(found) != micro_batches:
            raise VerifyError(
                f"{self.path}: batches() returned {len(found)} micro-batches on rank {rank}, and --micro-batches is "
                f"{micro_batches}; one without samples, of tensors with a dim 0 of 0, counts as one"
            )
        return list(found)


def load_file(path: Path) -> UserFile:
    """Imports the file; it finds its neighbours as under ``python FILE``. Raises VerifyError if it does not fit."""
    # Under the name that a process of multiprocessing's finds it by; that inherits the path.
    name = OTHER_NAME if path.stem in sys.modules or path.stem in sys.stdlib_module_names else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise VerifyError(f"{path} is not a Python file; its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    missing = [name for name in PROTOCOL if not callable(getattr(module, name, None))]
    if missing:
        lines = [f"  {name}({PROTOCOL[name].parameters}) -> {PROTOCOL[name].returns}" for name in missing]
        raise VerifyError(
            "\n".join([f"{path} lacks {' and '.join(f'{name}()' for name in missing)}:", *lines])
        )
    for name, expected in PROTOCOL.items():
        _check_signature(path, name, getattr(module, name), expected)
    return UserFile(path, module.model, module.losses, module.step, module.batches)


def _check_signature(path: Path, name: str, function: Callable[..., Any], expected: _Function) -> None:
    arguments = [word for word in expected.parameters.split(", ") if word]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise VerifyError(
            f"{path}: {name}{signature} can't be called as {name}({expected.parameters}): {error}"
        ) from None
