// The passes with 16-byte vectors: SSE2 on x86-64, NEON on aarch64, whatever the compiler makes of them elsewhere.
#define RING_REDUCE_ISA baseline
#define RING_REDUCE_ISA_NAME "baseline"
#define RING_REDUCE_VECTOR_BYTES 16
#include "passes_isa.h"

namespace ring_reduce {
const Passes& baseline_passes() { return baseline::kPasses; }
}  // namespace ring_reduce
