"""The C++ and CUDA core of the GPU ring. Takes addresses on the device, and numbers."""

MAX_VIRTUAL_RANKS: int

def why_no_cuda() -> str:
    """An empty text where a ring can run on this machine's GPU, else why it can't."""

def resident_blocks() -> int:
    """Blocks of the ring's kernels that the current device runs at the same time."""

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
