// The passes with 32-byte vectors.
#include "passes.h"

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>

// Library headers come before: their functions must not be compiled for these vectors, see chunk.h.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#define RING_REDUCE_ISA avx2
#define RING_REDUCE_ISA_NAME "avx2"
#define RING_REDUCE_VECTOR_BYTES 32
#define RING_REDUCE_F16C
#include "passes_isa.h"

namespace ring_reduce {
const Passes& avx2_passes() { return avx2::kPasses; }
}  // namespace ring_reduce

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
