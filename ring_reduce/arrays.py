"""torch tensors and NumPy arrays as a ring sees them: an address, a number of elements and a type."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from . import _core

# Numbered as ElementType in csrc/element.h.
ELEMENT_TYPES = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5}
INTEGERS = frozenset({"int32", "int64"})


class Library(Protocol):
    """What the ring needs of an array library. Arrays are dense, on its device, of a type that the core knows."""

    def check(self, x: Any, what: str = "x") -> str:
        """The name of its element type; ``TypeError`` or ``ValueError`` if the ring can't take ``x``, the argument
        ``what``."""

    def check_writable(self, x: Any, what: str) -> None: ...
    def is_contiguous(self, x: Any) -> bool: ...
    def contiguous(self, x: Any) -> Any:
        """``x``, or a contiguous copy."""

    def empty(self, shape: Sequence[int], like: Any) -> Any: ...
    def assign(self, target: Any, source: Any) -> None: ...
    def address(self, x: Any) -> int: ...
    def item_bytes(self, x: Any) -> int: ...
    def byte_strides(self, x: Any) -> Sequence[int]: ...
    def elements(self, x: Any) -> int: ...
    def written(self, x: Any) -> None:
        """Tell the library that the memory of ``x`` was changed behind its back."""


def library_of(x: Any, device: Any = None, what: str = "x") -> Library:
    """The library of ``x`` for a ring of the torch device ``device`` (None: the CPU).

    ``TypeError`` if ``x`` is neither a torch tensor nor, on the CPU, a NumPy array.
    """
    if isinstance(x, np.ndarray):
        if device is not None:
            raise TypeError(
                f"this ring runs on {device}, and {what} is a NumPy array; {_other_ring('cpu', device)}"
            )
        return _NUMPY
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        _TORCH.torch = torch
        return _TORCH if device is None else _on_device(torch, device)
    raise TypeError(f"a ring takes a torch tensor or a NumPy array, not {type(x).__name__}; convert it first")


def _other_ring(where: Any, here: Any) -> str:
    """What to do about an array on ``where``, of a ring that runs on ``here``."""
    has_rings = str(where).startswith(("cpu", "cuda"))
    ring = f", or make a ring of its device: Ring.from_group(device='{where}')" if has_rings else ""
    return f"move it to {here}{ring}"


def _check_type(name: str) -> str:
    if name not in ELEMENT_TYPES:
        raise TypeError(f"a ring takes {', '.join(ELEMENT_TYPES)}, not {name}; convert it first")
    return name


def _may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one address: expanded or oddly strided views. Strides in any unit."""
    if 0 in shape:
        return False
    extent = 0
    for stride, size in sorted(
        (abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def extent(library: Library, x: Any) -> tuple[int, int]:
    """First address and end of the memory that the elements of ``x`` span."""
    if library.elements(x) == 0:
        return 0, 0
    reaches = [stride * (size - 1) for stride, size in zip(library.byte_strides(x), x.shape, strict=True)]
    low = sum(reach for reach in reaches if reach < 0)
    high = sum(reach for reach in reaches if reach > 0) + library.item_bytes(x)
    return library.address(x) + low, library.address(x) + high


class _Numpy:
    def __init__(self) -> None:
        self._names: dict[np.dtype, str] = {}  # checked before; dtype.name is slow

    def check(self, x: np.ndarray, what: str = "x") -> str:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                "a ring takes plain arrays, and what is masked would be added too; use x.filled(0), or x.data"
            )
        name = self._names.get(x.dtype)
        if name is None:
            if not x.dtype.isnative:
                raise TypeError(
                    f"a ring takes arrays of native byte order, not {x.dtype.str}; "
                    f"use x.astype(x.dtype.newbyteorder('='))"
                )
            name = self._names[x.dtype] = _check_type(x.dtype.name)
        return name

    def check_writable(self, x: np.ndarray, what: str) -> None:
        if not x.flags.writeable:
            raise ValueError(f"{what} is a read-only NumPy array; pass out= or a copy")
        if _may_overlap(x.shape, x.strides):
            raise ValueError(
                f"{what} has elements that share memory (strides {x.strides}); pass out= or a copy"
            )

    def is_contiguous(self, x: np.ndarray) -> bool:
        return bool(x.flags.c_contiguous)

    def contiguous(self, x: np.ndarray) -> np.ndarray:
        return x if x.flags.c_contiguous else np.ascontiguousarray(x)

    def empty(self, shape: Sequence[int], like: np.ndarray) -> np.ndarray:
        return np.empty(shape, like.dtype)

    def assign(self, target: np.ndarray, source: np.ndarray) -> None:
        target[...] = source.reshape(target.shape)

    def address(self, x: np.ndarray) -> int:
        return int(x.__array_interface__["data"][0])  # x.ctypes makes an object each time

    def item_bytes(self, x: np.ndarray) -> int:
        return x.itemsize

    def byte_strides(self, x: np.ndarray) -> Sequence[int]:
        return x.strides

    def elements(self, x: np.ndarray) -> int:
        return x.size

    def written(self, x: np.ndarray) -> None:
        pass


class _Torch:
    torch: Any  # the module, loaded once there is a tensor; to import it in each call costs a tenth of a small one
    _where: Any = "cpu"  # the device of its tensors

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._kinds: set[type] = set()  # checked before
        self._core_sees: bool | None = (
            None  # whether the core can look at tensors itself; None: not asked yet
        )

    def check(self, x: Any, what: str = "x") -> str:
        if type(x) not in self._kinds:
            self._check_kind(type(x), self.torch.Tensor)
        if x.layout is not self.torch.strided:
            raise TypeError(
                f"a ring takes dense tensors, not {x.layout}; use x.to_dense(), or a dense gradient"
            )
        if x.is_nested or self.torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise TypeError(
                "a ring takes tensors that hold their elements, not nested ones, nor what torch.func's transforms "
                "pass; reduce the parts of the one, and outside of the other"
            )
        if not self._is_here(x):
            raise TypeError(
                f"this ring runs on {self._where}, and {what} is on {x.device}; {_other_ring(x.device, self._where)}"
            )
        if type(x) not in self._kinds:
            self._know(type(x))
        name = self._names.get(x.dtype)
        if name is None:
            name = self._names[x.dtype] = _check_type(str(x.dtype).removeprefix("torch."))
        self._check_memory(x)
        return name

    def _is_here(self, x: Any) -> bool:
        return bool(x.is_cpu)

    def _check_kind(self, kind: type, tensor: Any) -> None:
        """``TypeError`` for a subclass whose elements lie elsewhere: in a wrapped tensor, on other ranks, nowhere."""
        if getattr(kind, "__torch_dispatch__", None) is not tensor.__torch_dispatch__:
            raise TypeError(
                f"a ring takes tensors that hold their elements, and a {kind.__name__} stands for others; pass what it "
                f"wraps (x.to_local() of a DTensor)"
            )

    def _know(self, kind: type) -> None:
        """Once one of this kind was seen to lie here, the core may look at others itself."""
        self._kinds.add(kind)
        if self._core_sees is None:
            self._core_sees = self._show_core(self.torch.Tensor)
        if self._core_sees:
            _core.allow_tensor_type(kind)

    def _show_core(self, tensor: Any) -> bool:
        """Gives the core what it needs to take tensors itself (csrc/torch_view.h); False where torch has it not."""
        capsule = getattr(tensor, "__dlpack_c_exchange_api__", None)
        increment = self._quick_increment()
        if capsule is None or increment is None:
            return False
        try:
            _core.use_torch(capsule, increment)
        except ValueError:  # an API of another version
            return False
        return True

    def _check_memory(self, x: Any) -> None:
        """``ValueError`` unless the memory of ``x`` reaches to its last element: the core trusts the address."""
        elements = x.numel()
        if elements == 0:
            return
        if not x.is_contiguous():
            elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        needed = (x.storage_offset() + elements) * x.element_size()
        held = 0 if x._is_zerotensor() or x.data_ptr() == 0 else x.untyped_storage().nbytes()
        if needed > held:
            raise ValueError(
                f"the storage of this tensor of shape {tuple(x.shape)} holds {held} bytes, and its elements need "
                f"{needed}: it was freed or resized, or has no memory of its own; pass x.clone(), or resize it back"
            )

    def check_writable(self, x: Any, what: str) -> None:
        if not x.is_contiguous() and _may_overlap(x.shape, x.stride()):
            raise ValueError(
                f"{what} has elements that share memory (strides {x.stride()}); pass out= or x.clone()"
            )

    def is_contiguous(self, x: Any) -> bool:
        return (
            bool(x.is_contiguous()) and not x.is_neg()
        )  # the memory of a lazily negated one holds the other sign

    def contiguous(self, x: Any) -> Any:
        return x if self.is_contiguous(x) else x.detach().resolve_neg().contiguous()

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        return self.torch.empty(tuple(shape), dtype=like.dtype, device="cpu")

    def assign(self, target: Any, source: Any) -> None:
        target.detach().copy_(source.view(target.shape))

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def item_bytes(self, x: Any) -> int:
        return int(x.element_size())

    def byte_strides(self, x: Any) -> Sequence[int]:
        return [stride * x.element_size() for stride in x.stride()]

    def elements(self, x: Any) -> int:
        return int(x.numel())

    def written(self, x: Any) -> None:
        # A store through a raw pointer is unknown to autograd, which must refuse a backward that saved the old values.
        if not x.is_inference():
            self.torch.autograd.graph.increment_version(x)

    def _quick_increment(self) -> Any:
        """What ``increment_version`` calls in newer versions of torch: it takes a tuple of tensors, and looks itself
        whether they have a version. None where it is something else."""
        try:
            with self.torch.inference_mode():
                inference = self.torch.empty(1, device="cpu")
            with self.torch.inference_mode(False):
                plain = self.torch.empty(1, device="cpu")
            version = plain._version
            self.torch._C._increment_version((plain, inference))
        except (AttributeError, TypeError, RuntimeError):
            return None
        return self.torch._C._increment_version if plain._version == version + 1 else None


class _TorchOnDevice(_Torch):
    """Tensors on one CUDA device. Copies are enqueued on torch's current stream."""

    def __init__(self, torch: Any, device: Any) -> None:
        super().__init__()
        self.torch = torch
        self._where = device
        self._core_sees = False

    def _is_here(self, x: Any) -> bool:
        return bool(x.device == self._where)

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        return like.detach().new_empty(tuple(shape))


_NUMPY = _Numpy()
_TORCH = _Torch()
_DEVICES: dict[Any, _TorchOnDevice] = {}


def _on_device(torch: Any, device: Any) -> _TorchOnDevice:
    if device not in _DEVICES:
        _DEVICES[device] = _TorchOnDevice(torch, device)
    return _DEVICES[device]
