"""The C++ and CUDA core of the GPU ring. Takes addresses on the device, and numbers."""

MAX_VIRTUAL_RANKS: int

def why_no_cuda() -> str:
    """An empty text where a ring can run on this machine's GPU, else why it can't."""

def resident_blocks() -> int:
    """Blocks of the ring's kernels that the current device runs at the same time."""

def device(number: int) -> tuple[str, int]:
    """The UUID of a device of this process, and how many blocks it runs at the same time."""

class VirtualRing:
    def __init__(
        self,
        *,
        world: int,
        lanes: int,
        segment_bytes: int,
        depth: int,
        window: int,
        timeout_s: float,
        first_segment: int,
    ) -> None: ...
    def all_reduce(
        self,
        *,
        type: int,
        normalization: int,
        divisor: float,
        elements: int,
        inputs: list[int],
        outputs: list[int],
        counts: list[float],
        device_counts: int,
        stream: int,
        delay_seed: int,
        absent_rank: int,
    ) -> None: ...
    def check(self) -> None: ...
    def total_count(self) -> float: ...

def control_bytes(world: int) -> int:
    """Of the host memory that all ranks of an ``IpcRing`` share."""

Part = tuple[bytes, int, str]
"""A rank's staging memory: its CUDA IPC handle, the offset in what the handle names, and the GPU's UUID."""

class IpcStats:
    """``calls`` are those that have ended, replays of graphs among them; bytes are of those that the host enqueued.

    ``seconds_waiting`` is 0: nothing on the host waits.
    """

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

class IpcRing:
    """One rank. Made in three steps, each once all ranks have done the one before: this, ``open`` and ``prove``."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        device: int,
        lanes: int,
        segment_bytes: int,
        depth: int,
        window: int,
        timeout_s: float,
        first_segment: int,
    ) -> None: ...
    def part(self) -> Part: ...
    def open(self, *, control_fd: int, processes: list[int], left: Part, right: Part, token: int) -> None:
        """``control_fd`` is borrowed, ``processes`` (pidfds by rank, -1: none) become the ring's."""

    def prove(self) -> None: ...
    def run(
        self,
        *,
        operation: int,
        type: int,
        normalization: int,
        divisor: float,
        elements: int,
        input: int,
        output: int,
        count: float,
        device_count: int,
        stream: int,
    ) -> None: ...
    def abort(self, reason: str) -> None: ...
    def check(self) -> None: ...
    def total_count(self) -> float: ...
    def stats(self) -> IpcStats: ...
    def close(self) -> None: ...
