"""The C++ core of ring_reduce: a rank of a ring over shared memory."""

from typing import Any

WIRE_VERSION: int
PACK_BYTES: int

def create_shared_memory(bytes: int) -> int: ...
def use_torch(capsule: Any, increment_versions: Any) -> None: ...
def allow_tensor_type(type: type) -> None: ...
def vector_isa() -> str: ...
def vector_bits() -> int: ...
def region_bytes(*, lanes: int, depth: int, segment_bytes: int, world: int, part_bytes: int) -> int: ...
def partition(elements: int, element_bytes: int, world: int) -> list[tuple[int, int]]:
    """The chunks of an all_reduce, one a rank, as (first element, elements)."""

def accumulate(
    sums: list[int],
    inputs: list[int],
    elements: list[int],
    types: list[int],
    fresh: list[bool],
    scale: float,
    threads: int,
) -> None:
    """sums = sums + scale * inputs, over tensors at these addresses, one entry each; fresh sums are overwritten.

    ``types`` are those of the inputs; a sum is float64 for float64, else float32, and so is the arithmetic. A scale of
    0 adds nothing, whatever the inputs hold. The bits depend on nothing else: not on threads, addresses or vectors.
    Raises ``ValueError`` for lists of different lengths, unknown types and numbers out of range.
    """

def divide_into(
    outputs: list[int],
    sums: list[int],
    elements: list[int],
    types: list[int],
    divisor: float,
    threads: int,
) -> None:
    """outputs = sums / divisor, divided in the sums' type and rounded once to ``types``; a divisor of 0 gives zeros.

    An output may be its sum where their types agree. Raises as ``accumulate`` does.
    """

class Mix:
    """What a move adds up: received * received_scale + own * own_scale; that times 2**exponent is the sum so far."""

    @property
    def with_received(self) -> bool: ...
    @property
    def with_own(self) -> bool: ...
    @property
    def received_scale(self) -> float: ...
    @property
    def own_scale(self) -> float: ...
    @property
    def exponent(self) -> int: ...

FINGERPRINT_BYTES: int

class Fingerprint:
    """What all ranks must agree on in a call of ``algorithm="ring"``. ``ValueError`` for numbers out of range."""

    def __init__(
        self, *, call: int, operation: int, elements: int, type: int, normalization: int, divisor: float
    ) -> None: ...
    @staticmethod
    def from_bytes(bytes: bytes) -> Fingerprint: ...
    def to_bytes(self) -> bytes: ...
    def describe(self) -> str:
        """As in: all_reduce of 1000 float32, MEAN."""

    def mismatch_text(self, rank: int, theirs: Fingerprint, their_rank: int) -> str:
        """Names the first difference between this one, of ``rank``, and another's."""

    def moves(self, world: int) -> tuple[int, int]:
        """The first and the last move of the operation."""

    def chunk(self, rank: int, world: int) -> tuple[int, int]:
        """The chunk of a rank as (first element, elements)."""

    def mix(self, k: int, receives: bool, received_count: float, own_count: float) -> Mix: ...
    def divisor(self, world: int, total_count: float, exponent: int) -> float:
        """What the finishing move divides its mix of this exponent by."""

def chunk_of_move(k: int, rank: int, world: int) -> int: ...
def run_ring(port: Any, first_move: int, last_move: int, segments: int, window: int) -> None:
    """The step loop of csrc/ring_schedule.h over ``port``, an object with the methods that are named there."""

def combine(
    type: int, out: int, x: int, y: int, elements: int, x_scale: float, y_scale: float, divisor: float
) -> None:
    """``Combine`` of csrc/passes.h over tensors at these addresses; ``y`` may be 0."""

class Stats:
    def __init__(
        self,
        *,
        calls: int,
        bytes_sent: int,
        bytes_received: int,
        header_bytes_sent: int,
        seconds_waiting: float,
    ) -> None: ...
    @property
    def calls(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def header_bytes_sent(self) -> int: ...
    @property
    def seconds_waiting(self) -> float: ...

class TraceEvent:
    @property
    def name(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def call(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def segment(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...

class LaneTrace:
    @property
    def dropped(self) -> int: ...
    def events(self) -> list[TraceEvent]: ...

class CpuRing:
    def __init__(
        self,
        *,
        rank: int,
        world: int,
        memory_fds: list[int],
        process_fds: list[int],
        lanes: int,
        depth: int,
        segment_bytes: int,
        part_bytes: int,
        window: int,
        timeout_s: float,
        spins: int,
        yields: int,
        stream_bytes: int,
        one_shot_bytes: int,
        direct: bool,
    ) -> None: ...
    def run(
        self,
        operation: int,
        type: int,
        normalization: int,
        divisor: float,
        count: float,
        input: int,
        output: int,
        elements: int,
        interruptible: bool,
    ) -> float: ...
    def reduce_tensors(
        self, x: Any, out: Any, normalization: int, divisor: float, count: Any, interruptible: bool
    ) -> float: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def busy(self) -> bool: ...
    def check(self) -> None: ...
    def stats(self) -> Stats: ...
    def start_trace(self, limit: int) -> bool: ...
    def take_trace(self) -> list[LaneTrace]: ...
