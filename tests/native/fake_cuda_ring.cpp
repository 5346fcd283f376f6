// The ring's kernel for the fake CUDA runtime: the port's own lines, blocks as threads. Stands for csrc/cuda_ring.cu.
#include "cuda_error.h"
#include "cuda_host_launch.h"
#include "cuda_ring.h"
#include "fake_cuda.h"

#include <mutex>
#include <set>

namespace ring_reduce {

namespace {

constexpr int kResidentBlocks = 12;

std::mutex mutex;
std::set<const void*>& running() {
  static auto* states = new std::set<const void*>;
  return *states;
}

}  // namespace

int resident_blocks() {
  check_cuda(fake_cuda::fault("cudaOccupancyMaxActiveBlocksPerMultiprocessor"),
             "asking how many blocks of the ring's kernel fit a multiprocessor");
  return kResidentBlocks;
}

void launch_ring(const Launch& launch, void* stream) {
  check_cuda(fake_cuda::fault("cudaLaunchCooperativeKernel"), "launching blocks of the ring");
  fake_cuda::enqueue(static_cast<cudaStream_t>(stream), [launch] {
    const void* rank = launch.arguments[0].state;
    {
      const std::scoped_lock lock(mutex);
      if (!running().insert(rank).second) fake_cuda::tell("violation: two calls of a rank at the same time");
    }
    run_launch(launch, 1);
    const std::scoped_lock lock(mutex);
    running().erase(rank);
  });
}

}  // namespace ring_reduce
