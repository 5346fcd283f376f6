// What g++, clang and nvcc need to compile the same lines for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define RING_REDUCE_PORTABLE __host__ __device__
#else
#define RING_REDUCE_PORTABLE
#endif

namespace ring_reduce {

// Chunks, segments and lanes are cut at multiples of this, so that 16-byte accesses stay possible.
inline constexpr std::size_t kPackBytes = 16;

// Counters and slots that different ranks write lie this far apart: two 64-byte lines, since x86 prefetches pairs.
inline constexpr std::size_t kLineBytes = 128;

}  // namespace ring_reduce
