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

rr::RankArguments arguments_of(Ring& ring, int rank, const std::byte* input, std::byte* output) {
  const auto staging = [&](int of) {
    return ring.staging + static_cast<std::size_t>((of + ring.world) % ring.world) * ring.shape.bytes();
  };
  const auto r = static_cast<std::size_t>(rank);
  return {{staging(rank), staging(rank - 1), staging(rank + 1)},
          &ring.states[r],
          &ring.counters[r * static_cast<std::size_t>(ring.shape.lanes)],
          &ring.progress[r],
          &ring.failure,
          &ring.failure.raised,
          input,
          output,
          nullptr,
          1.0};
}

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
  for (int rank = 0; rank < ring->world; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    launch.arguments[r] = arguments_of(*ring, rank, inputs[r], outputs[r]);
    if (counts == nullptr) continue;
    launch.arguments[r].device_count = read_counts != 0 ? counts + r : nullptr;
    launch.arguments[r].count = counts[r];
  }
  run_launch(launch, ring->threads);
  return ring->failure.raised != 0 ? static_cast<int>(ring->failure.kind) : 0;
}

// A sum of one rank alone, in place, whose lanes run one after the other, `stopped` of them while the ring is stopped.
// Returns how many lanes there are.
int ring_run_lanes(Ring* ring, std::uint64_t elements, float* values, int stopped) {
  rr::Launch launch = rr::plan_launch(ring->shape, 1, ring->window, rr::Operation::all_reduce, rr::ElementType::float32,
                                      rr::Normalization::sum, 1.0, elements);
  auto* bytes = reinterpret_cast<std::byte*>(values);
  launch.arguments[0] = arguments_of(*ring, 0, bytes, bytes);
  for (int lane = 0; lane < launch.lanes; ++lane) {
    ring->failure.raised = lane < stopped ? 1 : 0;
    std::barrier<> alone(1);
    rr::BlockShared shared;
    run_block(launch, static_cast<unsigned>(lane), HostBlock(0, 1, alone, shared));
  }
  return launch.lanes;
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
