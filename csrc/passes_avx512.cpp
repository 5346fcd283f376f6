// The passes with 64-byte vectors.
#include "passes.h"

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>

// Library headers come before: their functions must not be compiled for these vectors, see chunk.h.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")
#endif
#define RING_REDUCE_ISA avx512
#define RING_REDUCE_ISA_NAME "avx512"
#define RING_REDUCE_VECTOR_BYTES 64
#define RING_REDUCE_F16C
#include "passes_isa.h"

namespace ring_reduce {
const Passes& avx512_passes() { return avx512::kPasses; }
}  // namespace ring_reduce

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
