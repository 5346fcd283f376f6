// Counters and words that blocks, GPUs and the host share: the only file of the GPU ring that touches an atomic.
//
//   publish(counter, v)   all stores of the team before its barrier are visible to whoever observes v (one writer)
//   observed(counter)     one acquire load; pairs with publish()
//
// Of system scope, since a neighbour may be another GPU. The host versions let the tests run a kernel's code as threads.
#pragma once

#include "portable.h"

#if !defined(__CUDACC__)
#include <atomic>
#include <chrono>
#include <thread>
#endif

namespace ring_reduce {

// Pairs with observed(). The team's barrier stands between its stores and this one.
RING_REDUCE_PORTABLE inline void publish(std::uint64_t* counter, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
#elif !defined(__CUDACC__)
  std::atomic_ref(*counter).store(value, std::memory_order_release);
#endif
}

// Pairs with publish().
RING_REDUCE_PORTABLE inline std::uint64_t observed(const std::uint64_t* counter) {
  std::uint64_t value = 0;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
#elif !defined(__CUDACC__)
  value = std::atomic_ref(*const_cast<std::uint64_t*>(counter)).load(std::memory_order_acquire);
#endif
  return value;
}

// Adds one and returns what stood there before. Acquire and release: whoever comes last sees what the others did.
RING_REDUCE_PORTABLE inline std::uint64_t count_up(std::uint64_t* counter) {
#if defined(__CUDA_ARCH__)
  std::uint64_t before = 0;
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
  return before;
#elif !defined(__CUDACC__)
  return std::atomic_ref(*counter).fetch_add(1, std::memory_order_acq_rel);
#else
  return 0;
#endif
}

RING_REDUCE_PORTABLE inline std::uint64_t nanoseconds() {
#if defined(__CUDA_ARCH__)
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#elif !defined(__CUDACC__)
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
#else
  return 0;
#endif
}

// Between two polls. The host's threads may share a core; a block's waiting thread costs the others nothing.
RING_REDUCE_PORTABLE inline void relax() {
#if !defined(__CUDACC__)
  std::this_thread::yield();
#endif
}

RING_REDUCE_PORTABLE inline void pause_for(unsigned ns) {
#if defined(__CUDA_ARCH__)
  __nanosleep(ns);
#elif !defined(__CUDACC__)
  std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
#else
  static_cast<void>(ns);
#endif
}

}  // namespace ring_reduce
