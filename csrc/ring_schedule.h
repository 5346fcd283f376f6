// The order of waits, moves and publishes of the ring: its only step loop.
// The CPU ring, the CUDA kernel, the ThreadSanitizer build and the Relacy model all instantiate these lines.
#pragma once

#include "portable.h"

namespace ring_reduce {

// A range of moves. Move k of rank r works on chunk (r - 1 - k) mod world; see docs/architecture.md.
struct MoveRange {
  int first;  // does not receive
  int last;   // does not send
};

RING_REDUCE_PORTABLE constexpr MoveRange all_reduce_moves(int world) { return {0, 2 * world - 2}; }
RING_REDUCE_PORTABLE constexpr MoveRange reduce_scatter_moves(int world) { return {0, world - 1}; }
RING_REDUCE_PORTABLE constexpr MoveRange all_gather_moves(int world) { return {world - 1, 2 * world - 2}; }

RING_REDUCE_PORTABLE constexpr int chunk_of_move(int move, int rank, int world) {
  return (rank + 2 * world - 1 - move) % world;
}

// Runs `segments` segments through the moves of `range`, `window` segments a step.
//
// A port provides
//   wait_posted()                      until left has posted the next segment
//   wait_taken()                       until right has freed the next slot
//   move(segment, k, receives, sends)  reads the slot from left, writes the slot to right and the output
//   take(), post()                     publish that the slot is free / filled
//
// The caller guarantees 1 <= window < depth: with window == depth every rank could hold all its slots while
// it waits for a credit.
template <class Port>
RING_REDUCE_PORTABLE void run_ring(Port& port, MoveRange range, std::uint64_t segments, std::uint64_t window) {
  for (std::uint64_t start = 0; start < segments; start += window) {
    const std::uint64_t end = start + window < segments ? start + window : segments;
    for (int k = range.first; k <= range.last; ++k) {
      for (std::uint64_t segment = start; segment < end; ++segment) {
        const bool receives = k != range.first;
        const bool sends = k != range.last;
        if (receives) port.wait_posted();
        if (sends) port.wait_taken();
        port.move(segment, k, receives, sends);
        if (receives) port.take();
        if (sends) port.post();
      }
    }
  }
}

}  // namespace ring_reduce
