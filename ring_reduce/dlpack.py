"""Arrays of other libraries, CuPy's above all, through DLPack: torch tensors over their memory, on their stream."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h
_CPU, _CUDA = 1, 2
_LEGACY_STREAM = 1  # as the array API standard names CUDA's default stream, whose address is 0
# Their arrays have an assignment, which raises.
_IMMUTABLE = ("jax", "jaxlib")


class _Tensor(ctypes.Structure):
    """The beginning of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def is_foreign(x: Any) -> bool:
    """Whether ``x`` is an array of neither torch nor NumPy that speaks DLPack; imports nothing."""
    if isinstance(x, np.ndarray):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return False
    return hasattr(type(x), "__dlpack__") and hasattr(type(x), "__dlpack_device__")


def tensor_of(x: Any) -> Any:
    """``x`` itself, or of a foreign array :func:`as_tensor`."""
    return as_tensor(x) if is_foreign(x) else x


def is_cupy(x: Any) -> bool:
    """Whether ``x`` is an array of CuPy; imports nothing."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def as_tensor(x: Any) -> torch.Tensor:
    """A torch tensor over the memory of ``x``, which holds it; what wrote ``x`` comes before torch's current stream.

    ``TypeError`` or ``ValueError`` where there can be none, or none that may be written to.
    """
    import torch

    name = _name(x)
    # A Python type without assignment holds what others rely on: Arrow's arrays, TensorFlow's tensors.
    if name.startswith(tuple(f"{library}." for library in _IMMUTABLE)) or not hasattr(type(x), "__setitem__"):
        raise TypeError(
            f"a ring writes into the arrays that it takes, and a {name} can't be changed; copy it"
        )
    kind, index = (int(number) for number in x.__dlpack_device__())
    if kind not in (_CPU, _CUDA):
        raise TypeError(
            f"this {name} is on a device of DLPack's kind {kind}; a ring takes memory of CPU or CUDA"
        )
    options: dict[str, Any] = {}
    if kind == _CUDA and not torch.cuda.is_available():
        raise TypeError(
            f"this {name} is on a GPU, and torch {torch.__version__} can use none; install a CUDA build"
        )
    if kind == _CUDA:
        stream = torch.cuda.current_stream(torch.device("cuda", index)).cuda_stream
        options["stream"] = stream or _LEGACY_STREAM
    try:
        # Not of the versioned kind, so that its library refuses for a read-only array, which torch would not.
        capsule = x.__dlpack__(**options)
        _check_strides(capsule, name)
        return torch.from_dlpack(capsule)
    except (BufferError, NotImplementedError, RuntimeError) as error:
        raise TypeError(f"this {name} can't be shared through DLPack: {error}") from error


def empty(shape: Sequence[int], like: Any) -> Any:
    """A new array of the library, dtype and device of ``like``; ``TypeError`` where that library has no such call."""
    if is_cupy(like):
        with like.device:
            return sys.modules["cupy"].empty(tuple(shape), like.dtype)
    if not hasattr(like, "__array_namespace__"):
        raise TypeError(f"a ring can't make a new {_name(like)}; pass out=")
    return like.__array_namespace__().empty(tuple(shape), dtype=like.dtype, device=like.device)


def stream_of(x: Any, device: torch.device) -> torch.cuda.Stream:
    """The stream of ``device`` that work on ``x`` is enqueued on: CuPy's current one for its arrays, else torch's."""
    import torch

    if not is_cupy(x):
        return torch.cuda.current_stream(device)
    address = sys.modules["cupy"].cuda.get_current_stream(device.index).ptr
    if address == 0:  # of which ExternalStream would make a new stream
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(address, device=device)


def on_stream_of(x: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Makes that stream torch's current one."""
    import torch

    return torch.cuda.stream(stream_of(x, device)) if is_cupy(x) else contextlib.nullcontext()


def _check_strides(capsule: Any, name: str) -> None:
    """``ValueError`` for an array that is reversed: torch would end the process."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _Tensor.from_address(get_pointer(capsule, b"dltensor"))
    if tensor.strides and any(stride < 0 for stride in tensor.strides[: tensor.ndim]):
        raise ValueError(
            f"this {name} has negative strides, which torch does not know; pass a contiguous copy"
        )


def _name(x: Any) -> str:
    return f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}"
