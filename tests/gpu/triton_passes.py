"""The Triton passes of an accumulator and of a ring's segment on a GPU: against the CPU core's, to the bit."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable

import torch
from findings import attempt, figure
from torch import nn

import accumulate_cases
import chunk_cases
import ring_reduce as rr
from accumulate_cases import TYPES, expected_quotient, expected_sum, same_bits, sum_dtype, values
from ring_reduce.chunk_passes import prepare_device
from ring_reduce.kernels import accumulate as kernels
from ring_reduce.kernels import chunk

SIZES = (0, 1, 7, 2047, 2048, 2049, 5001, 1_000_003)
SHIFTS = (0, 0, 1, 3)


def placed(x: torch.Tensor, shift: int) -> tuple[torch.Tensor, Callable[[], bool]]:
    """A copy on the GPU that starts ``shift`` elements into its memory, and a check of what is beside it."""
    room = torch.full((x.numel() + shift + 8,), 77, dtype=x.dtype, device="cuda")
    view = room[shift : shift + x.numel()]
    view.copy_(x)
    before, behind = room[:shift], room[shift + x.numel() :]
    return view, lambda: bool((before == 77).all() and (behind == 77).all())


def everything(fill: float | None = None) -> list[tuple[torch.Tensor, torch.Tensor, Callable[[], bool]]]:
    found = []
    for i, (size, dtype) in enumerate((size, dtype) for size in SIZES for dtype in TYPES):
        x = values(size, dtype, size)
        source = x if fill is None else torch.full_like(x, fill)
        found.append((x, *placed(source, SHIFTS[i % len(SHIFTS)])))
    return found


def sums() -> str:
    on_device = [
        torch.tensor(0.37, dtype=torch.float64),
        torch.tensor([3]),
        torch.tensor(-0.25),
        torch.tensor(0),
    ]
    scales: list[float | torch.Tensor] = [1.0, 0.0, 0.37, *(number.cuda() for number in on_device)]
    for scale in scales:
        inputs = everything()
        fresh = [i % 3 == 0 for i in range(len(inputs))]
        old = [values(x.numel(), sum_dtype(x.dtype), x.numel() + 1) for x, _, _ in inputs]
        old = [torch.full_like(x, torch.nan) if new else x for x, new in zip(old, fresh, strict=True)]
        totals = [placed(x, SHIFTS[(i // 2) % 4]) for i, x in enumerate(old)]
        kernels.accumulate([t for t, _ in totals], [x for _, x, _ in inputs], fresh=fresh, scale=scale)
        core = [x.clone() for x in old]
        accumulate_cases.accumulate(core, [x for x, _, _ in inputs], fresh=fresh, scale=float(scale))
        for i, (total, intact) in enumerate(totals):
            expected = expected_sum(old[i], inputs[i][0], fresh=fresh[i], scale=float(scale))
            what = f"sum {i} of {expected.numel()} {inputs[i][0].dtype} times {scale!r}"
            assert same_bits(core[i], expected), f"the core's {what}"
            assert same_bits(total.cpu(), expected), what
            assert intact(), f"{what}: written outside"
    return f"{len(inputs)} tensors"


def quotients() -> str:
    on_device = [torch.tensor(0.37, dtype=torch.float64), torch.tensor([24]), torch.tensor(0.0)]
    divisors: list[float | torch.Tensor] = [1.0, 0.0, 3.0, 4097.3, *(number.cuda() for number in on_device)]
    for divisor in divisors:
        outputs = everything(fill=99.0)
        totals = [values(x.numel(), sum_dtype(x.dtype), x.numel() + 1) for x, _, _ in outputs]
        moved = [placed(x, SHIFTS[(i // 2) % 4])[0] for i, x in enumerate(totals)]
        kernels.divide_into([out for _, out, _ in outputs], moved, divisor=divisor)
        for i, (x, out, intact) in enumerate(outputs):
            expected = expected_quotient(totals[i], x.dtype, divisor=float(divisor))
            what = f"quotient {i} of {x.numel()} {x.dtype} by {divisor!r}"
            assert same_bits(out.cpu(), expected), what
            assert intact(), f"{what}: written outside"
    return f"{len(outputs)} tensors"


def bad_divisors() -> str:
    for number in (-2.0, torch.nan):
        out = torch.ones(100, device="cuda")
        kernels.divide_into([out], [torch.ones(100, device="cuda")], divisor=torch.tensor(number).cuda())
        assert bool(out.isnan().all()), number
    return ""


def segment(case: str) -> str:
    """What the interpreter is asked in `make test`, at every alignment too."""
    wrong = list(itertools.islice(chunk_cases.CASES[case](chunk, "cuda"), 5))
    assert not wrong, wrong
    return ""


def segment_on_stream() -> str:
    """A pass waits for what was enqueued before it on the current stream, and for nothing else."""
    x, out = torch.zeros(100_000, device="cuda"), torch.zeros(100_000, device="cuda")
    chunk.combine(out, x, x)  # compiled, and everything on the default stream done
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        x.fill_(3)
        chunk.combine(out, x, x)
        asleep = not torch.cuda.current_stream().query()
        torch.cuda.current_stream().synchronize()
    assert bool((out == 6).all())
    assert asleep, "the call waited for the device"
    return ""


def segment_in_graph() -> str:
    """Replayed with other inputs."""
    x, y, out = (torch.zeros(5001, device="cuda") for _ in range(3))
    chunk.combine(out, x, y, x_scale=0.5, divisor=3)  # compiled and loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk.combine(out, x, y, x_scale=0.5, divisor=3)
    for number in range(100):
        x.fill_(number)
        y.fill_(2 * number)
        graph.replay()
        right = torch.full((5001,), float(number)) * 2.5 / 3
        assert same_bits(out.cpu(), right), number
    return "100 replays"


def prepared() -> str:
    """The kernels that are made ready with a ring, twice: what a ring on a new machine takes, and any other."""
    for what in ("first", "again"):
        torch.cuda.synchronize()
        begin = time.monotonic()
        prepare_device(torch.device("cuda"), "this process")
        torch.cuda.synchronize()
        figure(f"kernels made ready with a ring, {what}", time.monotonic() - begin, "s")
    return ""


def accumulator(normalization: rr.Normalization, counts: list[float] | None, device_counts: bool) -> str:
    """An accumulator on the GPU against one on the CPU: the same gradients, so the same bits."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(5,), (3000,), (64, 65), (1,)]
    dtypes = [torch.bfloat16, torch.float32, torch.float32, torch.float64]
    host = nn.ParameterList(
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    card = copy.deepcopy(host).cuda()
    with rr.Accumulator(host, normalization) as on_host, rr.Accumulator(card, normalization) as on_card:
        for step in range(4):
            for mine, theirs in zip(host, card, strict=True):
                mine.grad = torch.randn(mine.shape, generator=generator).to(mine.dtype)
                theirs.grad = mine.grad.cuda()
            count = None if counts is None else counts[step]
            on_host.add(count=count)
            on_card.add(
                count=torch.tensor(count, device="cuda") if device_counts and count is not None else count
            )
    for mine, theirs in zip(host, card, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert same_bits(theirs.grad.cpu(), mine.grad), (mine.dtype, mine.shape)
    return ""


def main() -> None:
    attempt("triton kernels are prepared", prepared)  # first: nothing of them is compiled yet
    attempt("triton sums", sums)
    attempt("triton quotients", quotients)
    attempt("triton bad divisors", bad_divisors)
    for case in chunk_cases.CASES:
        attempt(f"triton segments: {case}", lambda c=case: segment(c))  # type: ignore[misc]
    attempt("triton segments on a side stream", segment_on_stream)
    attempt("triton segments in a CUDA graph", segment_in_graph)
    whole = [3.0, 0.0, 5.0, 2.0]
    for normalization, counts in (
        (rr.SUM, None),
        (rr.MEAN, None),
        (rr.divide_by(7), None),
        (rr.DIVIDE_BY_COUNT, whole),
        (rr.WEIGHTED_MEAN, whole),
    ):
        for device_counts in (False, True) if counts else (False,):
            where = ", counts on the device" if device_counts else ""
            attempt(
                f"accumulator {normalization!r}{where}",
                lambda n=normalization, c=counts, d=device_counts: accumulator(n, c, d),  # type: ignore[misc]
            )


if __name__ == "__main__":
    main()
