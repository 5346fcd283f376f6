"""The core's scaled accumulation beside torch's foreach functions, in one interleaved run.

    python -m ring_reduce.benchmarks.accumulate --rounds 15

Each contender adds ``scale`` times the gradients of a micro-batch to float32 sums, as one call of a user's. In every
round all contenders run, in an order drawn anew; every call gets other tensors with new content, from sets that
together exceed the caches. Ratios are ratios of medians with their bootstrap 95 % interval: below 1 the core is faster.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ring_reduce import _core

from .host import last_level_cache_bytes, machine
from .summary import Times, ratio_of_medians

SCALE = 0.37
SHIFTS = 4093  # a prime, see buffers.py
TYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
CASES = {
    # 60 tensors of 25 million elements together, as a transformer's: large matrices, and two vectors each.
    "60 large": [size for _ in range(20) for size in (1_248_000, 1_024, 1_037)],
    "200 small": [256 + 17 * (index % 100) for index in range(200)],
}

Tensors = list[torch.Tensor]


class TensorSets:
    """Sums and gradients of one case, several times over, handed out in turn."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        bytes_of_set = sum(sizes) * (4 + dtype.itemsize)
        sets = max(2, -(-2 * last_level_cache_bytes() // bytes_of_set))
        generator = torch.Generator().manual_seed(0)
        self._bank = torch.randn(max(sizes) + SHIFTS, generator=generator).to(dtype)
        self._sets = [self._new_set(sizes, dtype) for _ in range(sets)]
        self._fills = 0
        self._turn = -1
        for turn in range(sets):
            self._fill(turn)

    @staticmethod
    def _new_set(sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        return [torch.zeros(size) for size in sizes], [torch.zeros(size, dtype=dtype) for size in sizes]

    def take(self) -> tuple[Tensors, Tensors]:
        """The sums and gradients of the next set."""
        self._turn = (self._turn + 1) % len(self._sets)
        return self._sets[self._turn]

    def refill(self) -> None:
        """Gives the set taken last its next gradients; small sums stay small."""
        self._fill(self._turn)

    def _fill(self, turn: int) -> None:
        sums, gradients = self._sets[turn]
        for total, gradient in zip(sums, gradients, strict=True):
            self._fills += 1
            shift = self._fills % SHIFTS
            gradient.copy_(self._bank[shift : shift + gradient.numel()])
            total.copy_(gradient)


Contender = Callable[[Tensors, Tensors], None]


def core(sums: Tensors, gradients: Tensors) -> None:
    """This package's pass, with all that its Accumulator does around it."""
    _core.accumulate(
        [total.data_ptr() for total in sums],
        [gradient.data_ptr() for gradient in gradients],
        [total.numel() for total in sums],
        [TYPES[gradient.dtype] for gradient in gradients],
        [False] * len(sums),
        SCALE,
        torch.get_num_threads(),
    )


def mul_add(sums: Tensors, gradients: Tensors) -> None:
    torch._foreach_mul_(gradients, SCALE)
    torch._foreach_add_(sums, gradients)


def add_alpha(sums: Tensors, gradients: Tensors) -> None:
    torch._foreach_add_(sums, gradients, alpha=SCALE)


def float_mul_add(sums: Tensors, gradients: Tensors) -> None:
    wide = [gradient.float() for gradient in gradients]
    torch._foreach_mul_(wide, SCALE)
    torch._foreach_add_(sums, wide)


class CopyMulAdd:
    """As ``float_mul_add``, with float32 copies that stay allocated."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._wide = [torch.empty(size) for size in sizes]

    def __call__(self, sums: Tensors, gradients: Tensors) -> None:
        torch._foreach_copy_(self._wide, gradients)
        torch._foreach_mul_(self._wide, SCALE)
        torch._foreach_add_(sums, self._wide)


def contenders(sizes: Sequence[int], dtype: torch.dtype) -> dict[str, Contender]:
    """The core, then what users write. ``add(alpha)`` fuses and so rounds otherwise; the others give the same bits."""
    if dtype is torch.float32:
        return {"core": core, "mul+add": mul_add, "add(alpha)": add_alpha}
    kept = CopyMulAdd(sizes)
    return {"core": core, "float+mul+add": float_mul_add, "copy+mul+add": kept, "add(alpha)": add_alpha}


def wrong_bits(found: dict[str, Contender], sets: TensorSets) -> list[str]:
    """Of which contenders the sums differ from the core's, ``add(alpha)`` left out."""
    wrong = []
    sums, gradients = sets.take()
    expected = [total.clone() for total in sums]
    core(expected, gradients)
    for name, contender in found.items():
        got = [total.clone() for total in sums]
        contender(got, [gradient.clone() for gradient in gradients])
        if name != "add(alpha)" and not all(map(torch.equal, got, expected)):
            wrong.append(name)
    sets.refill()
    return wrong


def measure(found: dict[str, Contender], sets: TensorSets, rounds: int, burst: int) -> dict[str, Times]:
    """Microseconds of each contender, by (round, call)."""
    times = {name: np.zeros((rounds, burst)) for name in found}
    gc.collect()
    gc.disable()
    try:
        for turn in range(-1, rounds):  # -1: the warm-up
            order = list(found)
            random.Random(turn).shuffle(order)
            for name in order:
                for call in range(burst):
                    sums, gradients = sets.take()
                    start_ns = time.perf_counter_ns()
                    found[name](sums, gradients)
                    times[name][max(turn, 0), call] = (time.perf_counter_ns() - start_ns) / 1e3
                    sets.refill()
    finally:
        gc.enable()
    return times


def lines_of(case: str, dtype: torch.dtype, threads: int, times: dict[str, Times]) -> list[str]:
    """A line for each contender."""
    lines = []
    for name, values in times.items():
        text = (
            f"{case:10} {str(dtype).removeprefix('torch.'):9} {threads:7} {name:14} {np.median(values):10.1f}"
        )
        if name != "core":
            ratio = ratio_of_medians(times["core"], values)
            text += f"  {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        lines.append(text)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; exit status 1 if a contender's sums differ from the core's."""
    prog = "python -m ring_reduce.benchmarks.accumulate"
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="of one burst of calls of each (default 15)")
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least one is needed")
    host = machine()
    print(
        f"{host['cores']} cores ({host['processor']}), torch {host['torch']}, vectors: {_core.vector_isa()}"
    )
    print(f"{'case':10} {'gradients':9} {'threads':7} {'contender':14} {'median us':>10}  core/contender")
    wrong: list[str] = []
    default_threads = torch.get_num_threads()
    for case in options.cases:
        for dtype in (torch.float32, torch.bfloat16):
            found, sets = contenders(CASES[case], dtype), TensorSets(CASES[case], dtype)
            wrong += wrong_bits(found, sets)
            for threads in sorted({default_threads, 1}, reverse=True):
                torch.set_num_threads(threads)
                times = measure(found, sets, options.rounds, burst=1 if max(CASES[case]) > 1 << 20 else 8)
                print("\n".join(lines_of(case, dtype, threads, times)), flush=True)
            torch.set_num_threads(default_threads)
    if wrong:
        print(f"WRONG: the sums of {', '.join(wrong)} differ from the core's", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
