"""Faults planted in a copy of csrc/, as proof that the checks of the protocol can fail.

Each is a change of text, so that the core itself has no switch for them. Who catches which (as seen):

================================  ====================  =============
mutant                            schedule_exhaustive   relacy_ring
================================  ====================  =============
relaxed publish                   -                     data race
relaxed observe                   -                     data race
no credits                        overwritten slot      data race
no wait for data                  unposted slot read    uninitialized
taken before it is read           unposted slot read    uninitialized
posted before it is written       unposted slot read    data race
the window as deep as the link    deadlock              deadlock
whole tensor step by step         deadlock              deadlock
a move too few                    chunk missing         -
another chunk                     chunk missing         -
sleeps without a second look      -                     deadlock
wakes nobody                      -                     deadlock
release for the exchange          -                     deadlock
relaxed look for sleepers         -                     deadlock
looks for sleepers too early      -                     deadlock
================================  ====================  =============

"-" is not seen: the schedule has no memory orders and no sleeps, and Relacy's port does not ask whether a rank has
every chunk at the end. The two of partition.h are seen by partition_check, those of the direct schedule by
direct_exhaustive. What the sanitizers have to see is in the fields ``thread`` and ``address``; ring.pml has faults of
its own, since Spin reads no C++ (test_model_checking.py).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from programs import CSRC as CSRC


@dataclass(frozen=True)
class Mutant:
    """What is changed, and what each check that catches it says."""

    file: str
    changes: tuple[tuple[str, str], ...]  # text that stands there exactly once, and what replaces it
    schedule: str | None = None  # schedule_exhaustive.cpp
    direct: str | None = None  # direct_exhaustive.cpp
    partition: str | None = None  # partition_check.cpp
    relacy: str | None = None  # relacy_ring.cpp
    thread: str | None = None  # ring_threads.cpp under ThreadSanitizer
    address: str | None = None  # ring_threads.cpp under AddressSanitizer and UndefinedBehaviorSanitizer
    accumulate: str | None = None  # accumulate_check.cpp
    accumulate_thread: str | None = None  # accumulate_check.cpp under ThreadSanitizer


_EXCHANGE = "counter.value.exchange(value, std::memory_order_seq_cst)"
_SLEEPERS = "counter.sleepers.load(std::memory_order_seq_cst)"
_MOVE = "        port.move(segment, k, receives, sends);\n"
_TAKE = "        if (receives) port.take();\n"
_POST = "        if (sends) port.post();\n"
_RACE = "data race"

MUTANTS = {
    # Data may be read before it is written, or a slot overwritten while it is read.
    "relaxed publish": Mutant(
        "flag.h",
        ((_EXCHANGE, "counter.value.exchange(value, std::memory_order_relaxed)"),),
        relacy="DATA RACE",
        thread=_RACE,
    ),
    "relaxed observe": Mutant(
        "flag.h",
        (("value.load(std::memory_order_acquire)", "value.load(std::memory_order_relaxed)"),),
        relacy="DATA RACE",
        thread=_RACE,
    ),
    "relaxed post": Mutant(
        "ring.cpp",
        (
            (
                "publish(region(group_.right()).posted(lane_), ++state_.sent)",
                "region(group_.right()).posted(lane_).value.store(++state_.sent, std::memory_order_relaxed)",
            ),
        ),
        thread=_RACE,
    ),
    "relaxed take": Mutant(
        "ring.cpp",
        (
            (
                "publish(region(group_.left()).taken(lane_), ++state_.received)",
                "region(group_.left()).taken(lane_).value.store(++state_.received, std::memory_order_relaxed)",
            ),
        ),
        thread=_RACE,
    ),
    "relaxed failure": Mutant(
        "group.cpp",
        (
            (
                "failed_by.store(cause, std::memory_order_release)",
                "failed_by.store(cause, std::memory_order_relaxed)",
            ),
        ),
        thread=_RACE,
    ),
    # The order of waits, moves and publishes.
    "no credits": Mutant(
        "ring_schedule.h",
        (("        if (sends) port.wait_taken();\n", ""),),
        schedule="overwrote a slot that was not read",
        relacy="DATA RACE",
        thread="",
    ),
    "one credit too many": Mutant(
        "ring.cpp", (("state_.sent + 1 - depth", "state_.sent - depth"),), thread=""
    ),
    "no wait for data": Mutant(
        "ring_schedule.h",
        (("        if (receives) port.wait_posted();\n", ""),),
        schedule="read a slot that was not posted",
        relacy="UNINITIALIZED",
    ),
    "taken before it is read": Mutant(
        "ring_schedule.h",
        ((_MOVE + _TAKE, _TAKE + _MOVE),),
        schedule="read a slot that was not posted",
        relacy="UNINITIALIZED",
    ),
    "posted before it is written": Mutant(
        "ring_schedule.h",
        ((_MOVE, ""), (_POST, _POST + _MOVE)),
        schedule="read a slot that was not posted",
        relacy="DATA RACE",
    ),
    "the window as deep as the link": Mutant(
        "ring_schedule.h",
        (
            ("start += window", "start += window + 1"),
            (
                "start + window < segments ? start + window",
                "start + window + 1 < segments ? start + window + 1",
            ),
        ),
        schedule=": deadlock",
        relacy="DEADLOCK",
    ),
    "whole tensor step by step": Mutant(
        "ring_schedule.h",
        (
            ("start += window", "start += segments"),
            ("start + window < segments ? start + window : segments", "segments"),
        ),
        schedule=": deadlock",
        relacy="DEADLOCK",
    ),
    "a move too few": Mutant(
        "ring_schedule.h",
        (("{0, 2 * world - 2}", "{0, 2 * world - 3}"),),
        schedule="has a finished chunk too many or too few",
    ),
    "another chunk": Mutant(
        "ring_schedule.h",
        (("rank + 2 * world - 1 - move", "rank + 2 * world - move"),),
        schedule="has a finished chunk too many or too few",
    ),
    # The direct all-reduce.
    "a relaxed input": Mutant(
        "direct.cpp",
        (
            (
                "publish(region(rank()).inputs(lane_), ++state_.inputs)",
                "region(rank()).inputs(lane_).value.store(++state_.inputs, std::memory_order_relaxed)",
            ),
        ),
        thread=_RACE,
    ),
    "a relaxed result": Mutant(
        "direct.cpp",
        (
            (
                "publish(region(rank()).results(lane_), ++state_.results)",
                "region(rank()).results(lane_).value.store(++state_.results, std::memory_order_relaxed)",
            ),
        ),
        thread=_RACE,
    ),
    "no wait for inputs": Mutant(
        "direct_schedule.h",
        (("    port.wait_inputs(step);\n", ""),),
        direct="read an input that was not published",
        thread="",
    ),
    "no wait for results": Mutant(
        "direct_schedule.h",
        (("    port.wait_results(step);\n", ""),),
        direct="read a result that was not published",
        thread=_RACE,
    ),
    "one outbox": Mutant(
        "region.h",
        (("kOutboxes = 2", "kOutboxes = 1"),),
        direct="overwrote an input that was not read",
        thread="",
    ),
    "an input before all have left the last call": Mutant(
        "direct_schedule.h",
        (
            ("    port.wait_inputs(step);\n", ""),
            (
                "    if (step + 1 < steps) port.post_inputs(step + 1);\n",
                "    if (step + 1 < steps) port.post_inputs(step + 1);\n    port.wait_inputs(step);\n",
            ),
        ),
        direct="overwrote an input that was not read",
        thread="",
    ),
    # A wake-up is lost, and with it, but for the time limit of the sleep, the ring.
    "sleeps without a second look": Mutant(
        "flag.h", (("if (seen < target) Platform", "Platform"),), relacy="DEADLOCK"
    ),
    "wakes nobody": Mutant("flag.h", ((f"if ({_SLEEPERS} != 0)", "if (false)"),), relacy="DEADLOCK"),
    "release for the exchange": Mutant(
        "flag.h",
        ((_EXCHANGE, "counter.value.store(value, std::memory_order_release)"),),
        relacy="DEADLOCK",
    ),
    "relaxed look for sleepers": Mutant(
        "flag.h",
        ((_SLEEPERS, "counter.sleepers.load(std::memory_order_relaxed)"),),
        relacy="DEADLOCK",
    ),
    "looks for sleepers too early": Mutant(
        "flag.h",
        (
            (f"  {_EXCHANGE};\n", f"  const bool asleep = {_SLEEPERS} != 0;\n  {_EXCHANGE};\n"),
            (f"if ({_SLEEPERS} != 0)", "if (asleep)"),
        ),
        relacy="DEADLOCK",
    ),
    # Which elements are whose.
    "a chunk that begins too early": Mutant(
        "partition.h",
        (("(r < longer ? r : longer)", "(r < longer ? 0 : longer)"),),
        partition="begin of chunk",
    ),
    "a lane that ends where it begins": Mutant(
        "partition.h",
        (("static_cast<std::uint64_t>(lane + 1)", "static_cast<std::uint64_t>(lane)"),),
        partition="an element's writes",
    ),
    # Memory.
    "a segment past the end of its chunk": Mutant(
        "lane.cpp",
        (
            (
                "std::min(call_.segment_elements, whole.elements - begin)",
                "std::min(call_.segment_elements, whole.elements)",
            ),
        ),
        address="heap-buffer-overflow",
    ),
    "a region one lane too small": Mutant(
        "region.h",
        (("return lane_offset(lanes);", "return lane_offset(lanes - 1);"),),
        address="heap-buffer-overflow",
    ),
    "lanes off their lines": Mutant(
        "region.h", (("kControlBytes = 4096", "kControlBytes = 4100"),), address="misaligned"
    ),
    # An accumulator's arithmetic.
    "a fresh sum is added to": Mutant(
        "accumulate_chunk.h",
        (("if constexpr (!kFresh) v =", "v ="), ("if (!kFresh) std::memcpy", "std::memcpy")),
        accumulate="fresh sum of length 1 times",
    ),
    "a rest that forgets its sum": Mutant(
        "accumulate_chunk.h",
        (("    if (!kFresh) std::memcpy(padded_sum, sum + i, rest * sizeof(Sum<T>));\n", ""),),
        accumulate="sum of length 1 times",
    ),
    "a rest that is written as a whole vector": Mutant(
        "accumulate_chunk.h",
        (
            (
                "std::memcpy(sum + i, padded_sum, rest * sizeof(Sum<T>))",
                "std::memcpy(sum + i, padded_sum, sizeof padded_sum)",
            ),
        ),
        accumulate="sum of length 1 times",
    ),
    "no scale": Mutant(
        "accumulate_chunk.h",
        (("if constexpr (kScaled) v = v * scale;", ""),),
        accumulate="times 0.37",
    ),
    "a scale that multiplies the sum too": Mutant(
        "accumulate_chunk.h",
        (
            ("if constexpr (kScaled) v = v * scale;", ""),
            ("Lanes<Sum<T>>::store(sum, v);", "Lanes<Sum<T>>::store(sum, v * scale);"),
        ),
        accumulate="times 0.37",
    ),
    "a scale of 0 that multiplies": Mutant(
        "accumulate_chunk.h", (("if (a.scale == 0) {", "if (false) {"),), accumulate="times 0.000000"
    ),
    "a reciprocal for the division": Mutant(
        "accumulate_chunk.h", (("v = v / divisor;", "v = v * (1 / divisor);"),), accumulate="by 3.0"
    ),
    "a divisor of 0 that divides": Mutant(
        "accumulate_chunk.h", (("if (d.divisor == 0) {", "if (false) {"),), accumulate="by 0.000000"
    ),
    # Which thread visits which elements.
    "a piece left out": Mutant(
        "pieces.cpp",
        (("(end_ + kPieceElements - 1) / kPieceElements", "end_ / kPieceElements"),),
        accumulate="visits of an element",
    ),
    "a piece that misses the tensor it begins in": Mutant(
        "pieces.cpp",
        (("begins_.begin()) - 1", "begins_.begin())"),),
        accumulate="visits of an element",
    ),
    "tensors laid end to end without gaps": Mutant(
        "pieces.cpp",
        (("(size + kCutElements - 1) / kCutElements * kCutElements", "size"),),
        accumulate="begins off a cut",
    ),
    "a piece taken by two threads": Mutant(
        "pieces.cpp",
        (
            (
                "(piece = next.fetch_add(1, std::memory_order_relaxed)) < count;",
                "(piece = next.load(std::memory_order_relaxed)) < count;",
            ),
            (
                "      pieces.visit(piece, visit);\n",
                "      pieces.visit(piece, visit);\n      next.store(piece + 1, std::memory_order_relaxed);\n",
            ),
        ),
        accumulate_thread=_RACE,
    ),
    "a crew for two callers": Mutant(
        "pieces.cpp",
        (
            ("  const std::unique_lock lock(shared.in_use, std::try_to_lock);\n", ""),
            ("  if (!lock.owns_lock()) return false;\n", ""),
        ),
        accumulate_thread=_RACE,
    ),
    "a pass that ends before its threads": Mutant(
        "lane_threads.cpp",
        (("  finished_.wait(lock, [this] { return to_come_ == 0 && running_ == 0; });\n", ""),),
        accumulate_thread="",
    ),
}


def caught_by(check: str) -> list[str]:
    """The mutants that a check (a field of Mutant) has to catch."""
    return [name for name, mutant in MUTANTS.items() if getattr(mutant, check) is not None]


def plant(name: str, directory: Path) -> Path:
    """A copy of csrc/ with one fault, in ``directory``. Fails where a text is not there exactly once."""
    mutant = MUTANTS[name]
    copy = directory / "csrc"
    shutil.copytree(CSRC, copy)
    path = copy / mutant.file
    text = path.read_text()
    for old, new in mutant.changes:
        assert text.count(old) == 1, f"{mutant.file} holds {text.count(old)} times: {old}"
        text = text.replace(old, new)
    path.write_text(text)
    return copy
