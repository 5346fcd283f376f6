// The GPU ring's own lines on the CPU: the kernel's code with blocks of std::threads, for tests without a GPU.
#include "cuda_host_launch.h"

namespace rr = ring_reduce;

namespace {

struct Ring {
  rr::StagingShape shape;
  int world, window;
  std::uint64_t timeout_ns;
  unsigned threads;  // of a block
  std::byte* staging;
  std::vector<rr::RankState> states;
  std::vector<rr::LaneCounters> counters;
  std::vector<rr::CallProgress> progress;
  rr::DeviceFailure failure{};
};

}  // namespace

extern "C" {

Ring* ring_make(int world, int lanes, std::size_t segment_bytes, int depth, int window, std::uint64_t timeout_ns,
                unsigned threads, std::uint64_t first_segment) {
  auto* ring = new Ring{{lanes, depth, segment_bytes}, world, window, timeout_ns, threads, nullptr, {}, {}, {}};
  const std::size_t bytes = static_cast<std::size_t>(world) * ring->shape.bytes();
  ring->staging = static_cast<std::byte*>(::operator new(bytes, std::align_val_t(rr::kLineBytes)));
  std::memset(ring->staging, 0xff, bytes);
  ring->states.resize(static_cast<std::size_t>(world));
  ring->progress.resize(static_cast<std::size_t>(world));
  ring->counters.assign(static_cast<std::size_t>(world * lanes), {first_segment, first_segment});
  for (int lane = 0; lane < world * lanes; ++lane) {
    const rr::LaneLink link(ring->staging, ring->shape, lane);
    *link.posted() = *link.taken() = first_segment;
  }
  return ring;
}

void ring_free(Ring* ring) {
  ::operator delete(ring->staging, std::align_val_t(rr::kLineBytes));
  delete ring;
}

// The kind of failure, 0 for none. Counts null: 1 each; `read_counts`: as a kernel reads those on the device.
int ring_all_reduce(Ring* ring, int type, int normalization, double divisor, std::uint64_t elements,
                    const std::byte* const* inputs, std::byte* const* outputs, const double* counts, int read_counts,
                    std::uint32_t delay_seed, int absent_rank) {
  rr::Launch launch = rr::plan_launch(ring->shape, ring->world, ring->window, rr::Operation::all_reduce,
                                      static_cast<rr::ElementType>(type), static_cast<rr::Normalization>(normalization),
                                      divisor, elements);
  launch.timeout_ns = ring->timeout_ns;
  launch.disturbance = {delay_seed, absent_rank};
  const auto staging = [&](int rank) {
    return ring->staging + static_cast<std::size_t>((rank + ring->world) % ring->world) * ring->shape.bytes();
  };
  for (int rank = 0; rank < ring->world; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    launch.arguments[r] = {{staging(rank), staging(rank - 1), staging(rank + 1)},
                           &ring->states[r],
                           &ring->counters[r * static_cast<std::size_t>(ring->shape.lanes)],
                           &ring->progress[r],
                           &ring->failure,
                           &ring->failure.raised,
                           inputs[r],
                           outputs[r],
                           counts != nullptr && read_counts != 0 ? counts + r : nullptr,
                           counts != nullptr ? counts[r] : 1.0};
  }
  run_launch(launch, ring->threads);
  return ring->failure.raised != 0 ? static_cast<int>(ring->failure.kind) : 0;
}

int ring_failed_rank(const Ring* ring) { return ring->failure.rank; }
double ring_total_count(const Ring* ring, int rank) {
  return ring->progress[static_cast<std::size_t>(rank)].total_count;
}
std::uint64_t ring_calls(const Ring* ring, int rank) { return ring->states[static_cast<std::size_t>(rank)].calls; }
std::uint64_t ring_completed(const Ring* ring, int rank) {
  return ring->progress[static_cast<std::size_t>(rank)].completed;
}
}
