"""One collective call: its arguments checked, and its tensors as a transport takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import dlpack
from .arrays import ELEMENT_TYPES, INTEGERS, Library, extent, library_of
from .device_count import stays_on_device
from .dlpack import is_foreign, tensor_of
from .errors import CountError, RingMismatch
from .normalization import SUM, Kind, Normalization

if TYPE_CHECKING:
    from .engine import Engine

# Numbered as Operation in csrc/call.h.
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = 0, 1, 2

# All but float64 is divided in float32: below its least normal number, or above its range, a divisor is not itself.
SMALLEST_DIVISOR, LARGEST_DIVISOR = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


@dataclass(slots=True)
class Call:
    """A call that is ready to run. Keeps its tensors alive."""

    operation: int
    element_type: int
    normalization: Normalization
    count: Any  # a float, or on a ring of a device a float64 tensor there
    input: Any  # contiguous
    output: Any  # contiguous; the same object as `input` where the call is in place
    elements: int  # of the whole tensor
    arrays: Library
    result: Any  # `output`, or where it is copied to
    given: Any  # what the caller gets: `result`, or the array of another library whose memory it is
    borrows_count: bool = False  # `count` lies in memory of another library than torch
    total_count: float = 0.0  # after the call: the sum of counts over ranks, where the normalization has one

    def run(self, engine: Engine, interruptible: bool) -> Any:
        """Runs it, or enqueues it, and returns what the caller gets. Raises what the engine raises."""
        try:
            self.total_count = engine.run(self, interruptible)
        except RingMismatch:
            raise
        except BaseException:
            self.arrays.written(self.output)  # it may be half written
            raise
        if self.result is self.output:
            self.arrays.written(self.output)
        else:
            self.arrays.assign(self.result, self.output)
        return self.given


def all_reduce_call(
    x: Any, normalization: Normalization, out: Any, count: Any, *, device: Any = None
) -> Call:
    """The call of :meth:`Ring.all_reduce`. ``device``, here and below: of the ring, None for the CPU."""
    given = x if out is None else out
    x, out = _tensors_of(x, out)
    library = library_of(x, device)
    type_name = library.check(x)
    number = _check_normalization(normalization, type_name, count, device)
    result = x if out is None else out
    if out is not None:
        _check_out(library, type_name, out, x, device)
        if tuple(out.shape) != tuple(x.shape):
            raise ValueError(
                f"out has shape {tuple(out.shape)} and x {tuple(x.shape)}; they have to be equal"
            )
    library.check_writable(result, "x" if out is None else "out")
    source, target = _contiguous_ends(library, x, result, offset=0)
    return Call(
        ALL_REDUCE,
        ELEMENT_TYPES[type_name],
        normalization,
        number,
        source,
        target,
        library.elements(x),
        library,
        result,
        given,
        _borrows(count, device),
    )


def reduce_scatter_call(
    x: Any, normalization: Normalization, out: Any, count: Any, *, rank: int, world: int, device: Any = None
) -> Call:
    """The call of :meth:`Ring.reduce_scatter`."""
    array, given = x, out
    x, out = _tensors_of(x, out)
    library = library_of(x, device)
    type_name = library.check(x)
    number = _check_normalization(normalization, type_name, count, device)
    elements = library.elements(x)
    if out is None:
        if len(x.shape) == 0 or x.shape[0] % world != 0:
            flat = f", or pass out= with {elements // world} elements" if elements % world == 0 else ""
            raise ValueError(
                f"reduce_scatter splits the first dimension among {world} ranks, and x has shape {tuple(x.shape)}; "
                f"pad it{flat}"
            )
        given, out = _new_array(library, (x.shape[0] // world, *x.shape[1:]), array, x)
    _check_out(library, type_name, out, x, device)
    if elements % world != 0:
        raise ValueError(
            f"reduce_scatter splits x among {world} ranks, and it has {elements} elements; pad it to a multiple"
        )
    if library.elements(out) * world != elements:
        raise ValueError(
            f"reduce_scatter of {elements} elements over {world} ranks needs an out= of {elements // world} elements, "
            f"and it has {library.elements(out)}"
        )
    library.check_writable(out, "out")
    source, target = _contiguous_ends(library, x, out, offset=rank * library.elements(out))
    return Call(
        REDUCE_SCATTER,
        ELEMENT_TYPES[type_name],
        normalization,
        number,
        source,
        target,
        elements,
        library,
        out,
        given,
        _borrows(count, device),
    )


def all_gather_call(x: Any, out: Any, *, rank: int, world: int, device: Any = None) -> Call:
    """The call of :meth:`Ring.all_gather`."""
    array, given = x, out
    x, out = _tensors_of(x, out)
    library = library_of(x, device)
    type_name = library.check(x)
    elements = library.elements(x)
    if out is None:
        shape = (world * x.shape[0], *x.shape[1:]) if len(x.shape) else (world,)
        given, out = _new_array(library, shape, array, x)
    _check_out(library, type_name, out, x, device)
    if library.elements(out) != elements * world:
        raise ValueError(
            f"all_gather of {elements} elements over {world} ranks needs an out= of {elements * world} elements, "
            f"and it has {library.elements(out)}"
        )
    library.check_writable(out, "out")
    source, target = _contiguous_ends(library, x, out, offset=-rank * elements)
    return Call(
        ALL_GATHER, ELEMENT_TYPES[type_name], SUM, 1.0, source, target, elements * world, library, out, given
    )


def ring_count(count: Any, normalization: Normalization, device: Any) -> Any:
    """``count`` for a ring of ``device`` (None: the CPU): a number as :func:`check_count` gives it, or a tensor on that
    device as a float64 of no dimension. Its value is unknown to the host, which would have to wait for it: only the
    device can refuse one that is no count.

    ``CountError`` for what can't be a count, or lies on another device.
    """
    if device is None:
        return check_count(count, normalization)
    value = tensor_of(count)
    if not stays_on_device(value):
        return check_count(value, normalization)
    kind = str(value.dtype)
    if value.device != device or value.numel() != 1 or "bool" in kind or "complex" in kind:
        raise CountError(
            f"count is {kind} of shape {tuple(value.shape)} on {value.device}; it has to be one number, on {device} or "
            f"on the host"
        )
    return value.detach().reshape(()).double()


def _borrows(count: Any, device: Any) -> bool:
    return device is not None and is_foreign(count)


def check_count(count: Any, normalization: Normalization) -> float:
    """``count`` as float64; ``CountError`` unless it is a finite number >= 0 that float64 holds exactly."""
    if type(count) is int and 0 <= count <= 2**53:  # as nearly all are
        return float(count)
    if count is None:
        raise CountError(f"{normalization!r} divides by counts: pass count=, this rank's examples or tokens")
    kind = str(getattr(count, "dtype", type(count).__name__))
    if "bool" in kind or "complex" in kind:
        raise CountError(f"count is {count!r}; it has to be a finite number, 0 or more")
    try:
        # Not a string, which float() would read; a tensor or array of one element is a number.
        value = float(count) if hasattr(count, "__float__") else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CountError(f"count is {count!r}; it has to be one number ({error})") from None
    if not (math.isfinite(value) and value >= 0):
        raise CountError(f"count is {count!r}; it has to be a finite number, 0 or more")
    if (value >= 2**53 and value != count) or value > 2**53:
        raise CountError(f"count is {count}; counts go up to 2**53, so that float64 holds their sum exactly")
    if 0 < value < SMALLEST_DIVISOR:
        raise CountError(f"count is {count}; one that is not 0 is at least 2**-126, as float32 can divide by")
    return value


def _check_normalization(normalization: Normalization, type_name: str, count: Any, device: Any) -> Any:
    """The count that goes into the call."""
    if not isinstance(normalization, Normalization):
        raise TypeError(
            f"normalization is {normalization!r}; use SUM, MEAN, divide_by(total), DIVIDE_BY_COUNT or WEIGHTED_MEAN "
            f"of ring_reduce"
        )
    if type_name in INTEGERS and normalization.kind is not Kind.SUM:
        raise TypeError(
            f"{normalization!r} divides, and {type_name} can't hold a quotient; use SUM, or convert to a floating type"
        )
    if normalization.kind is Kind.DIVIDE_BY:
        check_total(normalization, type_name)
    if normalization.uses_count:
        return ring_count(count, normalization, device)
    if count is not None:
        raise CountError(
            f"{normalization!r} does not use count={count!r}; DIVIDE_BY_COUNT and WEIGHTED_MEAN do, or leave it out"
        )
    return 1.0


def check_total(normalization: Normalization, type_name: str) -> None:
    """``ValueError`` for a total of ``divide_by`` that can't divide elements of this type."""
    if type_name != "float64" and not SMALLEST_DIVISOR <= normalization.total <= LARGEST_DIVISOR:
        raise ValueError(
            f"{normalization!r} on {type_name}: it is divided in float32, whose divisors go from "
            f"{SMALLEST_DIVISOR:.3g} to {LARGEST_DIVISOR:.3g}; use float64, or scale the tensor"
        )


def _tensors_of(x: Any, out: Any) -> tuple[Any, Any]:
    """Both as arrays of torch or NumPy; one object stays one."""
    if (is_foreign(x) or is_foreign(out)) and out is not None and type(x) is not type(out):
        raise _two_libraries(x, out)
    tensor = tensor_of(x)
    return tensor, tensor if out is x else tensor_of(out)


def _new_array(library: Library, shape: tuple[int, ...], array: Any, tensor: Any) -> tuple[Any, Any]:
    """A new array of the library of ``array``, whose tensor is given; and the tensor of the new one."""
    new = dlpack.empty(shape, array) if array is not tensor else library.empty(shape, tensor)
    return new, tensor_of(new)


def _two_libraries(x: Any, out: Any) -> TypeError:
    return TypeError(
        f"out is a {type(out).__name__} and x a {type(x).__name__}; use the same library for both"
    )


def _check_out(library: Library, type_name: str, out: Any, x: Any, device: Any) -> None:
    if library_of(out, device, "out") is not library:
        raise _two_libraries(x, out)
    out_type = library.check(out, "out")
    if out_type != type_name:
        raise TypeError(f"out is {out_type} and x {type_name}; they have to be equal")


def _contiguous_ends(library: Library, x: Any, result: Any, offset: int) -> tuple[Any, Any]:
    """Contiguous input and output. ``ValueError`` where they overlap other than in place: result at x + offset."""
    source = library.contiguous(x)
    if result is x:
        return source, source
    target = result if library.is_contiguous(result) else library.empty(result.shape, result)
    if target is not result or not library.is_contiguous(x):
        _refuse_overlap(library, x, result)
        return source, target
    shift = library.address(target) - library.address(source)
    if shift != offset * library.item_bytes(x):
        _refuse_overlap(library, x, result)
    return source, target


def _refuse_overlap(library: Library, x: Any, result: Any) -> None:
    (x_begin, x_end), (begin, end) = extent(library, x), extent(library, result)
    if max(x_begin, begin) < min(x_end, end):
        raise ValueError(
            "out overlaps x, and not at the place where in-place operation puts it; pass another out="
        )
