// The GPU ring's kernel as the CPU runs it: a block is a handful of std::threads that meet at a std::barrier.
#pragma once

#include "cuda_plan.h"
#include "cuda_port.h"

#include <barrier>
#include <memory>
#include <thread>
#include <vector>

class HostBlock {
 public:
  HostBlock(unsigned thread, unsigned threads, std::barrier<>& barrier, ring_reduce::BlockShared& shared)
      : thread_(thread), threads_(threads), barrier_(barrier), shared_(shared) {}
  unsigned thread() const { return thread_; }
  unsigned threads() const { return threads_; }
  void barrier() const { barrier_.arrive_and_wait(); }
  ring_reduce::BlockShared& shared() const { return shared_; }

 private:
  unsigned thread_;
  unsigned threads_;
  std::barrier<>& barrier_;
  ring_reduce::BlockShared& shared_;
};

inline void run_block(const ring_reduce::Launch& launch, unsigned index, const HostBlock& block) {
  using ring_reduce::ElementType;
  switch (launch.fingerprint.type) {
    case ElementType::float64: return ring_reduce::run_lane<double>(launch, index, block);
    case ElementType::float32: return ring_reduce::run_lane<float>(launch, index, block);
    case ElementType::float16: return ring_reduce::run_lane<ring_reduce::Half>(launch, index, block);
    case ElementType::bfloat16: return ring_reduce::run_lane<ring_reduce::BFloat16>(launch, index, block);
    case ElementType::int32: return ring_reduce::run_lane<std::uint32_t>(launch, index, block);
    case ElementType::int64: return ring_reduce::run_lane<std::uint64_t>(launch, index, block);
  }
}

// `threads` of each block. Returns when all have ended.
inline void run_launch(const ring_reduce::Launch& launch, unsigned threads) {
  const auto blocks = static_cast<std::size_t>(launch.ranks * launch.lanes);
  std::vector<ring_reduce::BlockShared> shared(blocks);
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::vector<std::thread> all;
  for (std::size_t block = 0; block < blocks; ++block) {
    barriers.push_back(std::make_unique<std::barrier<>>(threads));
    for (unsigned thread = 0; thread < threads; ++thread) {
      all.emplace_back([&, block, thread, barrier = barriers.back().get()] {
        run_block(launch, static_cast<unsigned>(block), HostBlock(thread, threads, *barrier, shared[block]));
      });
    }
  }
  for (std::thread& thread : all) thread.join();
}
