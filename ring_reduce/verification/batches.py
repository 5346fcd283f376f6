"""Micro-batches as nests of tensors: how many samples they hold, all of them as one, and their way to a process."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_reduce.errors import VerifyError


def tensors_of(nest: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nest of tuples, lists and dicts, each with its place: ``[1]['labels']``."""
    if isinstance(nest, Tensor):
        yield path, nest
    elif isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from tensors_of(value, f"{path}[{key!r}]")
    elif isinstance(nest, (tuple, list)):
        for index, value in enumerate(nest):
            yield from tensors_of(value, f"{path}[{index}]")


def map_tensors(nest: Any, function: Callable[[Tensor], Any]) -> Any:
    """The nest with ``function(tensor)`` in place of each tensor, in the order of :func:`tensors_of`."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return _with_items(nest, {key: map_tensors(value, function) for key, value in nest.items()})
    if isinstance(nest, (tuple, list)):
        return _with_values(nest, [map_tensors(value, function) for value in nest])
    return nest


def _with_items(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind: a copy, since not every kind is made from a dict."""
    made: Any = copy.copy(like)
    for key, value in items.items():
        made[key] = value
    return made


def _with_values(like: Sequence[Any], values: list[Any]) -> Any:
    kind: Any = type(like)
    return kind(*values) if hasattr(like, "_fields") else kind(values)  # a named tuple takes them one by one


def count_samples(batch: Any, where: str) -> int:
    """Size of dim 0 of the tensors of ``batch``. Raises VerifyError if there is none, or if they differ."""
    sizes = [(path, len(tensor)) for path, tensor in tensors_of(batch) if tensor.ndim > 0]
    if not sizes:
        raise VerifyError(
            f"{where} is a {type(batch).__name__} without a tensor that has a dim 0, the samples; a micro-batch is a "
            f"nest of tensors, tuples, lists and dicts"
        )
    first_path, samples = sizes[0]
    for path, size in sizes:
        if size != samples:
            raise VerifyError(
                f"{where}: batch{first_path} has {samples} samples in dim 0 and batch{path} has {size}; give every "
                f"tensor of a micro-batch the samples as its dim 0, and leave what has none to the model or to losses()"
            )
    return samples


def concatenate(batches: Sequence[Any], labels: Sequence[str], path: str = "") -> Any:
    """All micro-batches as one, joined along dim 0; what is no tensor has to be the same in all.

    ``labels`` says for errors whose each is. Raises VerifyError where they don't fit together.
    """
    first = batches[0]
    for other, label in zip(batches, labels, strict=True):
        reason = _misfit(first, other)
        if reason:
            raise VerifyError(
                f"the micro-batches can't be concatenated for the reference: batch{path} {reason[0]} in {labels[0]} "
                f"and {reason[1]} in {label}; {reason[2]}"
            )
    if isinstance(first, Tensor):
        return first if first.ndim == 0 else torch.cat(list(batches))
    if isinstance(first, Mapping):
        joined = {
            key: concatenate([batch[key] for batch in batches], labels, f"{path}[{key!r}]") for key in first
        }
        return _with_items(first, joined)
    if isinstance(first, (tuple, list)):
        values = [
            concatenate([batch[index] for batch in batches], labels, f"{path}[{index}]")
            for index in range(len(first))
        ]
        return _with_values(first, values)
    return first


def _misfit(first: Any, other: Any) -> tuple[str, str, str] | None:
    """What the first is, what the other is, and what to do; None if they fit."""
    if type(first) is not type(other):
        advice = "give every micro-batch the same structure"
        return f"is a {type(first).__name__}", f"a {type(other).__name__}", advice
    if isinstance(first, Tensor):
        return _tensor_misfit(first, other)
    if isinstance(first, Mapping):
        if first.keys() != other.keys():
            return (
                f"has {sorted(map(str, first))}",
                f"{sorted(map(str, other))}",
                "give every one the same keys",
            )
    elif isinstance(first, (tuple, list)):
        if len(first) != len(other):
            return f"has {len(first)} entries", f"{len(other)}", "give every micro-batch the same structure"
    elif first is not other and first != other:
        return f"is {first!r}", f"{other!r}", "what is no tensor has to be the same everywhere"
    return None


def _tensor_misfit(first: Tensor, other: Tensor) -> tuple[str, str, str] | None:
    if first.dtype != other.dtype:
        return f"is {first.dtype}", f"{other.dtype}", "give every micro-batch the same type"
    if first.shape[1:] != other.shape[1:] or first.ndim != other.ndim:
        advice = (
            "only dim 0, the samples, may differ: pad sequences to one length, and let losses() leave the padding out "
            "(labels of -100)"
        )
        return f"has shape {tuple(first.shape)}", f"{tuple(other.shape)}", advice
    if first.ndim == 0 and not torch.equal(first, other.to(first.device)):
        return f"is {first.item()}", f"{other.item()}", "a tensor without dim 0 has to be the same everywhere"
    return None


def copied(batch: Any) -> Any:
    """With tensors of its own: a function of the user may work in place."""
    return map_tensors(batch, lambda tensor: tensor.detach().clone())


def digest(batches: Sequence[Any]) -> bytes:
    """The same for two lists of micro-batches whose tensors have the same bytes."""
    content = hashlib.blake2b(digest_size=16)
    for index, batch in enumerate(batches):
        for path, tensor in tensors_of(batch):
            content.update(f"{index}{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            content.update(flat.view(torch.uint8).numpy().tobytes())
    return content.digest()


def constant_tensors(batches: Sequence[Any]) -> tuple[str, ...]:
    """Places of tensors that are equal in all micro-batches although others are not and their rows differ.

    Joined along dim 0 like samples, though they may be none: class weights, as many as a micro-batch has samples.
    """
    if len(batches) < 2:
        return ()
    columns = list(zip(*(list(tensors_of(batch)) for batch in batches), strict=True))
    same = [
        column[0] for column in columns if all(torch.equal(tensor, column[0][1]) for _, tensor in column[1:])
    ]
    if len(same) == len(columns):
        return ()
    return tuple(
        path for path, tensor in same if tensor.ndim and len(tensor) and bool((tensor != tensor[:1]).any())
    )


def pack(batches: Sequence[Any]) -> bytes:
    """For another process. Views are copied, or the whole of what they look at would travel."""
    buffer = io.BytesIO()
    torch.save([copied(batch) for batch in batches], buffer)
    return buffer.getvalue()


def unpack(data: bytes, device: torch.device) -> list[Any]:
    """What :func:`pack` packed; tensors that were not on a CPU come to ``device``."""

    def place(storage: Any, location: str) -> Any:
        chosen = "cpu" if location == "cpu" else str(device)
        return torch.serialization.default_restore_location(storage, chosen)

    loaded: list[Any] = torch.load(io.BytesIO(data), map_location=place, weights_only=False)
    return loaded
