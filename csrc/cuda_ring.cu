#include "cuda_error.h"
#include "cuda_port.h"
#include "cuda_ring.h"

#include <algorithm>
#include <array>
#include <cuda_runtime.h>

namespace ring_reduce {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 3;

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    ring_kernel(const __grid_constant__ Launch launch) {
  __shared__ BlockShared shared;
  const CudaBlock block(shared);
  run_lane<T>(launch, blockIdx.x, block);
}

using Kernel = void (*)(Launch);

// By ElementType.
constexpr std::array<Kernel, kElementTypes> kKernels = {
    ring_kernel<double>,   ring_kernel<float>,         ring_kernel<Half>,
    ring_kernel<BFloat16>, ring_kernel<std::uint32_t>, ring_kernel<std::uint64_t>,
};

}  // namespace

int resident_blocks() {
  int device = 0, multiprocessors = 0, fewest = 1 << 20;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "asking for the number of multiprocessors");
  for (const Kernel kernel : kKernels) {
    int blocks = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0),
               "asking how many blocks of the ring's kernel fit a multiprocessor");
    fewest = std::min(fewest, blocks);
  }
  return fewest * multiprocessors;
}

void launch_ring(const Launch& launch, void* stream) {
  const Kernel kernel = kKernels[static_cast<std::size_t>(launch.fingerprint.type)];
  Launch copy = launch;
  void* arguments[] = {&copy};
  const dim3 grid(static_cast<unsigned>(launch.ranks * launch.lanes));
  check_cuda(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), grid, dim3(kThreads), arguments, 0,
                                         static_cast<cudaStream_t>(stream)),
             "launching " + std::to_string(grid.x) + " blocks of the ring that have to run at the same time");
}

}  // namespace ring_reduce
