"""The sums of an accumulator: float32 for 16-bit gradients, flat, and the passes over all of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .normalization import Normalization
from .passes import Sum, passes_for
from .ring import Ring

FLOATS = ("float64", "float32", "float16", "bfloat16")
_ALIGN = 32  # elements: parameters start on lines of 128 bytes, so that passes read whole vectors


@dataclass
class _Parameter:
    """A parameter and its part of the sums."""

    tensor: Any
    sum: Sum  # of the parameter's shape
    given: Any = None  # the gradient that reduce() gave it


class Sums:
    """The sums of all parameters that are summed in one type, in one flat tensor.

    Behind them one number a parameter says whether it got a gradient: it rides through the same all-reduce.
    """

    def __init__(self, tensors: list[Any], dtype: Any, device: Any) -> None:
        self.type_name = str(dtype).removeprefix("torch.")
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._used: list[bool] = []  # which parameters have a gradient of the last group, on any rank
        self.filled: set[int] = set()  # parameters whose sum is of this group
        self._passes = passes_for(device)
        self._lent: list[weakref.ref[Any]] = []  # gradients of the last group that lie in the sums
        self._allocate()

    def _allocate(self) -> None:
        import torch

        begins, end = [], 0
        for tensor in self._tensors:
            begins.append(end)
            end += -(-tensor.numel() // _ALIGN) * _ALIGN
        self.flat = torch.zeros(end + len(self._tensors), dtype=self._dtype, device=self._device)
        self._has_gradient = self.flat[end:]
        parts = [
            self.flat.as_strided(tensor.shape, _strides(tensor), begin)
            for tensor, begin in zip(self._tensors, begins, strict=True)
        ]
        self.parameters = [
            _Parameter(tensor, Sum(part, part.data_ptr(), part.numel()))
            for tensor, part in zip(self._tensors, parts, strict=True)
        ]

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("an accumulator can't be copied or pickled: make a new one for the copy of the model")

    def __reduce__(self) -> Any:
        return self.__deepcopy__(None)

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.tensor.grad = parameter.given = None

    def begin(self) -> None:
        """Before the first micro-batch: the sums are free, or made anew if somebody keeps a gradient in them."""
        import torch

        for parameter in self.parameters:
            parameter.given = None
        if any(gradient() is not None for gradient in self._lent):
            self._allocate()
        elif not self.flat.is_inference():
            torch.autograd.graph.increment_version(self.flat)  # for a graph that has saved one
        self._lent = []

    def any_gradient(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(p.tensor.grad is not None for p in self.parameters)

    def not_taken(self) -> bool:
        """Whether a parameter has a gradient of a backward since the last :meth:`take` or :meth:`reduce`."""
        return any(p.tensor.grad is not None and p.tensor.grad is not p.given for p in self.parameters)

    def still_given(self) -> bool:
        """Whether a gradient is still the one that reduce() gave."""
        return any(p.given is not None and p.tensor.grad is p.given for p in self.parameters)

    def gradient_sum(self) -> float:
        """The sum of all elements of all gradients."""
        gradients = [p.tensor.grad for p in self.parameters if p.tensor.grad is not None]
        return float(sum(float(gradient.double().sum()) for gradient in gradients if not gradient.is_sparse))

    def take(self, scale: Any, skip: bool) -> None:
        """Adds all gradients times ``scale``, unless this micro-batch is skipped, and drops them."""
        taken = [index for index, p in enumerate(self.parameters) if p.tensor.grad is not None]
        if taken and not skip:
            gradients = [_checked(self.parameters[index]) for index in taken]
            self._passes.accumulate(
                [self.parameters[index].sum for index in taken],
                gradients,
                [index not in self.filled for index in taken],
                scale,
            )
            self.filled.update(taken)
        for index in taken:
            self.parameters[index].tensor.grad = None

    def reduce(self, ring: Ring | None, normalization: Normalization, count: Any) -> Any:
        """Divides the sums, over the ranks if there is a ring. Returns the total count, 0 if there is none."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.filled:
                parameter.sum.tensor.zero_()
        self._used = [index in self.filled for index in range(len(self.parameters))]
        if ring is None:
            total = 0.0 if count is None else count
            self._divide(normalization.divisor(1, total))
            return total
        self._has_gradient.copy_(self._has_gradient.new_tensor(self._used))
        work = ring.all_reduce(self.flat, normalization, count=count, async_op=True)
        work.wait()
        self._used = [value != 0 for value in self._has_gradient.tolist()]
        self._divide(1.0)
        return float(work.total_count)

    def _divide(self, divisor: Any) -> None:
        """The last pass: into the sums themselves, or into gradients of the parameters' own type."""
        import torch

        narrow = [p for p in self.parameters if p.tensor.dtype != self.flat.dtype]
        wide = [p for p in self.parameters if p.tensor.dtype == self.flat.dtype]
        for parameter in narrow:
            parameter.given = torch.empty_like(parameter.sum.tensor, dtype=parameter.tensor.dtype)
        for parameter in wide:
            parameter.given = parameter.sum.tensor.detach()  # a tensor of its own, whose end can be seen
            self._lent.append(weakref.ref(parameter.given))
        if not isinstance(divisor, float) or divisor != 1.0:
            self._passes.divide([p.given for p in self.parameters], [p.sum for p in self.parameters], divisor)
        elif narrow:
            self._passes.divide([p.given for p in narrow], [p.sum for p in narrow], divisor)

    def give(self, all_of_them: bool) -> None:
        """Puts the results into ``p.grad``: of those that got a gradient on any rank, or of all."""
        for parameter, used in zip(self.parameters, self._used, strict=True):
            given = parameter.given if all_of_them or used else None
            parameter.tensor.grad = parameter.given = given


def sums_of(parameters: Iterable[Any]) -> list[Sums]:
    """The sums of the parameters that require a gradient, one for each device and type that is summed in."""
    import torch

    by_type: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"an accumulator takes a module or its parameters, not a {type(parameter).__name__}"
            )
        if not parameter.requires_grad:
            continue
        if str(parameter.dtype).removeprefix("torch.") not in FLOATS:
            raise TypeError(f"a parameter is {parameter.dtype}; an accumulator takes {', '.join(FLOATS)}")
        if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(
                f"a parameter is a {type(parameter).__name__}, which stands for other tensors; accumulate what it wraps"
            )
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        by_type.setdefault((dtype, parameter.device), []).append(parameter)
    if not by_type:
        raise ValueError("an accumulator needs at least one parameter that requires a gradient")
    return [Sums(tensors, dtype, device) for (dtype, device), tensors in by_type.items()]


def _checked(parameter: _Parameter) -> Any:
    """A parameter's gradient, in the order of its sum. The passes trust its type, size and strides."""
    import torch

    gradient, part = parameter.tensor.grad, parameter.sum.tensor
    if gradient.layout is not torch.strided:
        raise TypeError(f"a gradient is {gradient.layout}; an accumulator adds dense ones: use sparse=False")
    wide = gradient.dtype == torch.float64, part.dtype == torch.float64
    if gradient.shape != part.shape or gradient.device != part.device or wide[0] != wide[1]:
        raise RuntimeError(
            f"a gradient is {gradient.dtype} of shape {tuple(gradient.shape)} on {gradient.device}, and its sum "
            f"{part.dtype} of shape {tuple(part.shape)} on {part.device}: the parameter has changed since the "
            f"accumulator was made; make a new one"
        )
    gradient = gradient.detach().resolve_neg()
    if gradient.stride() == part.stride():
        return gradient
    return torch.empty_strided(part.shape, part.stride(), dtype=gradient.dtype).copy_(gradient)


def _strides(tensor: Any) -> Sequence[int]:
    """Those of the parameter, as autograd gives them to gradients and fused optimizers want them, if it has no gaps."""
    import torch

    strides: Sequence[int] = torch.empty_like(tensor, device="meta").stride()
    return strides
