// The GPU ring's own lines on the CPU: the kernel's code with blocks of std::threads, for tests without a GPU.
#include "../../csrc/cuda_plan.h"
#include "../../csrc/cuda_port.h"

#include <barrier>
#include <thread>
#include <vector>

namespace rr = ring_reduce;

namespace {

class HostBlock {
 public:
  HostBlock(unsigned thread, unsigned threads, std::barrier<>& barrier, rr::BlockShared& shared)
      : thread_(thread), threads_(threads), barrier_(barrier), shared_(shared) {}
  unsigned thread() const { return thread_; }
  unsigned threads() const { return threads_; }
  void barrier() const { barrier_.arrive_and_wait(); }
  rr::BlockShared& shared() const { return shared_; }

 private:
  unsigned thread_;
  unsigned threads_;
  std::barrier<>& barrier_;
  rr::BlockShared& shared_;
};

struct Ring {
  rr::StagingShape shape;
  int world, window;
  std::uint64_t timeout_ns;
  unsigned threads;  // of a block
  std::byte* staging;
  std::vector<rr::RankState> states;
  std::vector<rr::LaneCounters> counters;
  rr::DeviceFailure failure{};
};

void run_block(const rr::Launch& launch, rr::ElementType type, unsigned index, const HostBlock& block) {
  switch (type) {
    case rr::ElementType::float64: return rr::run_lane<double>(launch, index, block);
    case rr::ElementType::float32: return rr::run_lane<float>(launch, index, block);
    case rr::ElementType::float16: return rr::run_lane<rr::Half>(launch, index, block);
    case rr::ElementType::bfloat16: return rr::run_lane<rr::BFloat16>(launch, index, block);
    case rr::ElementType::int32: return rr::run_lane<std::uint32_t>(launch, index, block);
    case rr::ElementType::int64: return rr::run_lane<std::uint64_t>(launch, index, block);
  }
}

void run_launch(const rr::Launch& launch, unsigned threads) {
  const auto blocks = static_cast<std::size_t>(launch.ranks * launch.lanes);
  std::vector<rr::BlockShared> shared(blocks);
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::vector<std::thread> all;
  for (std::size_t block = 0; block < blocks; ++block) {
    barriers.push_back(std::make_unique<std::barrier<>>(threads));
    for (unsigned thread = 0; thread < threads; ++thread) {
      all.emplace_back([&, block, thread, barrier = barriers.back().get()] {
        run_block(launch, launch.fingerprint.type, static_cast<unsigned>(block),
                  HostBlock(thread, threads, *barrier, shared[block]));
      });
    }
  }
  for (std::thread& thread : all) thread.join();
}

}  // namespace

extern "C" {

Ring* ring_make(int world, int lanes, std::size_t segment_bytes, int depth, int window, std::uint64_t timeout_ns,
                unsigned threads, std::uint64_t first_segment) {
  auto* ring = new Ring{{lanes, depth, segment_bytes}, world, window, timeout_ns, threads, nullptr, {}, {}};
  const std::size_t bytes = static_cast<std::size_t>(world) * ring->shape.bytes();
  ring->staging = static_cast<std::byte*>(::operator new(bytes, std::align_val_t(rr::kLineBytes)));
  std::memset(ring->staging, 0xff, bytes);
  ring->states.resize(static_cast<std::size_t>(world));
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
  rr::Launch launch = rr::plan_all_reduce(ring->shape, ring->world, ring->window, static_cast<rr::ElementType>(type),
                                          static_cast<rr::Normalization>(normalization), divisor, elements);
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
                           &ring->failure,
                           inputs[r],
                           outputs[r],
                           counts != nullptr && read_counts != 0 ? counts + r : nullptr,
                           counts != nullptr ? counts[r] : 1.0};
  }
  run_launch(launch, ring->threads);
  return ring->failure.raised != 0 ? static_cast<int>(ring->failure.kind) : 0;
}

int ring_failed_rank(const Ring* ring) { return ring->failure.rank; }
double ring_total_count(const Ring* ring, int rank) { return ring->states[static_cast<std::size_t>(rank)].total_count; }
std::uint64_t ring_calls(const Ring* ring, int rank) { return ring->states[static_cast<std::size_t>(rank)].calls; }
}
