// Launching the ring's kernel. `stream` is a cudaStream_t.
#pragma once

#include "cuda_link.h"

namespace ring_reduce {

// Blocks of the ring's kernels that are resident on the current device at the same time.
int resident_blocks();

// One cooperative launch of launch.ranks * launch.lanes blocks, which therefore all run at the same time. Throws
// CudaError where it can't be started.
void launch_ring(const Launch& launch, void* stream);

}  // namespace ring_reduce
