"""The trainable parameters of a model, and which of their elements are compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ring_reduce.errors import VerifyError

from .measured import Vector


@dataclass(frozen=True)
class Fingerprint:
    """A parameter as another rank can compare it."""

    name: str
    description: str  # shape and type
    digest: bytes
    norm: float = field(compare=False)  # for people; the digest says whether values are equal, NaN too


class Layout:
    """Parameters in order, and for each the elements that are compared: all, or the same sample on every rank."""

    def __init__(self, model: nn.Module, sample: int | None) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise VerifyError(f"the model, a {type(model).__name__}, has no parameter with requires_grad")
        for name, parameter in named.items():
            if not parameter.is_floating_point():
                raise VerifyError(
                    f"parameter {name} is {parameter.dtype}; verify compares gradients of real numbers"
                )
        self.names = tuple(named)
        self.parameters = tuple(named.values())
        self.elements = tuple(parameter.numel() for parameter in self.parameters)
        self._chosen = tuple(_choose(count, sample, index) for index, count in enumerate(self.elements))
        sizes = [
            count if chosen is None else len(chosen)
            for count, chosen in zip(self.elements, self._chosen, strict=True)
        ]
        self.ends = tuple(int(end) for end in np.cumsum(sizes))

    @property
    def length(self) -> int:
        """P: how many elements are compared."""
        return self.ends[-1]

    @property
    def tolerance(self) -> float:
        """The square root of the coarsest parameter type's epsilon: half of the digits have to agree."""
        return math.sqrt(self.epsilon)

    @property
    def epsilon(self) -> float:
        """Of the coarsest parameter type."""
        return max(torch.finfo(parameter.dtype).eps for parameter in self.parameters)

    @property
    def smallest(self) -> float:
        """Normal number of the parameter type that has the smallest."""
        return min(torch.finfo(parameter.dtype).tiny for parameter in self.parameters)

    def vector(self, gradients: Sequence[Tensor | None]) -> Vector:
        """The compared elements of all gradients, one per parameter; 0 where there is none."""
        result = np.zeros(self.length)
        begin = 0
        for gradient, chosen, end in zip(gradients, self._chosen, self.ends, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                flat = dense.detach().reshape(-1)
                picked = flat if chosen is None else flat[torch.from_numpy(chosen).to(flat.device)]
                result[begin:end] = picked.double().cpu().numpy()
            begin = end
        return result

    def fingerprints(self) -> list[Fingerprint]:
        """Of every parameter."""
        return [
            _fingerprint(name, parameter.detach())
            for name, parameter in zip(self.names, self.parameters, strict=True)
        ]


def _choose(count: int, sample: int | None, index: int) -> np.ndarray | None:
    """Which elements of parameter ``index``; None for all. Every rank chooses the same."""
    if sample is None or sample >= count:
        return None
    chosen = np.random.default_rng((0, index)).choice(count, size=sample, replace=False, shuffle=False)
    return np.sort(chosen)


def _fingerprint(name: str, value: Tensor) -> Fingerprint:
    content = value.contiguous().reshape(-1).cpu().view(torch.uint8).numpy()
    digest = hashlib.blake2b(content.tobytes(), digest_size=16).digest()
    description = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return Fingerprint(name, description, digest, float(value.double().norm()))


def compare_fingerprints(by_rank: Sequence[Sequence[Fingerprint]]) -> None:
    """Raises VerifyError naming the first parameter that is not the same on all ranks."""
    first = by_rank[0]
    for rank, prints in enumerate(by_rank[1:], 1):
        if [each.name for each in prints] != [each.name for each in first]:
            odd = sorted({each.name for each in first} ^ {each.name for each in prints})
            raise VerifyError(
                f"the model of rank {rank} has other trainable parameters than that of rank 0: "
                f"{', '.join(odd[:3]) or 'the same names in another order'}; build the same model on every rank"
            )
        for one, other in zip(first, prints, strict=True):
            if one != other:
                raise VerifyError(
                    f"parameter {one.name} differs: {one.description}, norm {one.norm:.9g} on rank 0 and "
                    f"{other.description}, norm {other.norm:.9g} on rank {rank}; start every rank from the same "
                    f"weights (the same torch.manual_seed before the model is made, or one checkpoint)"
                )
