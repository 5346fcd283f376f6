// The order of waits, moves and publishes of the direct all-reduce: every rank reads its own chunk from all others.
#pragma once

#include "portable.h"

namespace ring_reduce {

// Steps of the direct all-reduce, of which each takes the next part of every chunk through two exchanges.
//
// A port provides, for a step,
//   post_inputs()    copies own input for the others into an outbox, and publishes it
//   wait_inputs()    until all others have published theirs
//   reduce()         own chunk, from all inputs, into the output; where `gathers`, publishes it as well
//   wait_results()   until all others have published theirs
//   gather()         the others' chunks into the output
//
// Without `gathers` there is one step and one exchange: every rank reduces the whole tensor.
//
// Two outboxes of either kind are enough, and no rank says what it has read:
// - The inputs of step s replace those of s - 2. They are written after wait_results(s - 2), when all had reduced
//   those, and after wait_inputs(s - 1), when all had left the call before, which may have been one without results.
// - The results of step s replace those of s - 2. Whoever has published inputs of s had gathered s - 2 before.
template <class Port>
RING_REDUCE_PORTABLE void run_direct(Port& port, std::uint64_t steps, bool gathers) {
  port.post_inputs(0);
  for (std::uint64_t step = 0; step < steps; ++step) {
    port.wait_inputs(step);
    // A step ahead, so that others seldom wait for it.
    if (step + 1 < steps) port.post_inputs(step + 1);
    port.reduce(step);
    if (!gathers) continue;
    port.wait_results(step);
    port.gather(step);
  }
}

}  // namespace ring_reduce
