// The ring's one schedule, compiled for the device: run_ring with the least port that a kernel could give it. One thread
// a rank, one pack a slot. Nothing runs it here; the test compiles it and looks at what ptxas says of its registers.
#include "../../csrc/ring_schedule.h"

#include <cuda/atomic>

namespace {

using Counter = cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system>;

struct Link {
  std::uint64_t* posted;
  std::uint64_t* taken;
  float4* slots;
};

struct Port {
  Link left;   // in this rank's memory
  Link right;  // in the right neighbour's
  const float4* own;
  float4* out;
  int rank, world, depth;
  std::uint64_t segments_taken, segments_posted;

  // Pairs with post() in the left neighbour.
  __host__ __device__ void wait_posted() {
    while (Counter(*left.posted).load(cuda::memory_order_acquire) <= segments_taken) {
    }
  }

  // Pairs with take() in the right neighbour.
  __host__ __device__ void wait_taken() {
    while (segments_posted - Counter(*right.taken).load(cuda::memory_order_acquire) >= std::uint64_t(depth)) {
    }
  }

  __host__ __device__ void move(std::uint64_t segment, int k, bool receives, bool sends) {
    const int chunk = ring_reduce::chunk_of_move(k, rank, world);
    const std::uint64_t at = segment * std::uint64_t(world) + std::uint64_t(chunk);
    float4 value = own[at];
    if (receives) {
      const float4 received = left.slots[segments_taken % std::uint64_t(depth)];
      const bool copies = k >= world;
      value.x = received.x + (copies ? 0.0f : value.x);
      value.y = received.y + (copies ? 0.0f : value.y);
      value.z = received.z + (copies ? 0.0f : value.z);
      value.w = received.w + (copies ? 0.0f : value.w);
    }
    if (k >= world - 1) out[at] = value;
    if (sends) right.slots[segments_posted % std::uint64_t(depth)] = value;
  }

  __host__ __device__ void take() { Counter(*left.taken).store(++segments_taken, cuda::memory_order_release); }
  __host__ __device__ void post() { Counter(*right.posted).store(++segments_posted, cuda::memory_order_release); }
};

}  // namespace

extern "C" __global__ void schedule_all_reduce(Port port, std::uint64_t segments, std::uint64_t window) {
  ring_reduce::run_ring(port, ring_reduce::all_reduce_moves(port.world), segments, window);
}

extern "C" __global__ void schedule_reduce_scatter(Port port, std::uint64_t segments, std::uint64_t window) {
  ring_reduce::run_ring(port, ring_reduce::reduce_scatter_moves(port.world), segments, window);
}

extern "C" __global__ void schedule_all_gather(Port port, std::uint64_t segments, std::uint64_t window) {
  ring_reduce::run_ring(port, ring_reduce::all_gather_moves(port.world), segments, window);
}
