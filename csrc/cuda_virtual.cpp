#include "cuda_virtual.h"

#include "cuda_chain.h"
#include "cuda_device.h"
#include "cuda_error.h"
#include "cuda_failure.h"
#include "cuda_flag.h"
#include "cuda_plan.h"
#include "cuda_ring.h"
#include "cuda_staging.h"

#include <optional>
#include <stdexcept>

namespace ring_reduce {

namespace {

void check_settings(const VirtualSettings& s) {
  if (s.world < 1 || s.world > kMaxVirtualRanks) {
    throw std::invalid_argument("world=" + std::to_string(s.world) + ": a virtual ring has 1 to " +
                                std::to_string(kMaxVirtualRanks) + " ranks");
  }
  check_shape(s.shape, s.window);
}

// In host memory that the device writes.
struct HostWords {
  DeviceFailure failure;
  CallProgress progress[kMaxVirtualRanks];
};

}  // namespace

struct VirtualRing::Memory {
  int device = 0;
  std::byte* staging = nullptr;
  RankState* states = nullptr;
  LaneCounters* counters = nullptr;
  HostWords* words = nullptr;         // as the host sees them
  HostWords* device_words = nullptr;  // as the device does
  std::optional<CallChain> chain;

  ~Memory() {
    // Errors here have nobody to tell. The device finishes what it runs: every wait of a kernel ends.
    int current = 0;
    cudaGetDevice(&current);
    cudaSetDevice(device);
    cudaDeviceSynchronize();
    chain.reset();
    cudaFree(counters);
    cudaFree(states);
    cudaFree(staging);
    cudaFreeHost(words);
    cudaSetDevice(current);
    static_cast<void>(cudaGetLastError());
  }
};

VirtualRing::VirtualRing(const VirtualSettings& settings) : settings_(settings) {
  check_settings(settings);
  const int resident = resident_blocks(), blocks = settings.world * settings.shape.lanes;
  if (settings.shape.lanes < 1 || blocks > resident) {
    throw std::invalid_argument(std::to_string(settings.world) + " ranks of " + std::to_string(settings.shape.lanes) +
                                " lanes are " + std::to_string(blocks) + " blocks, and this GPU runs " +
                                std::to_string(resident) + " at the same time; use at least 1 and at most " +
                                std::to_string(resident / settings.world) + " lanes");
  }
  memory_ = std::make_unique<Memory>();
  Memory& m = *memory_;
  const auto world = static_cast<std::size_t>(settings.world), lanes = static_cast<std::size_t>(settings.shape.lanes);
  const std::size_t staging_bytes = world * settings.shape.bytes();
  check_cuda(cudaGetDevice(&m.device), "asking for the current device");
  check_cuda(cudaMalloc(&m.staging, staging_bytes),
             "allocating " + std::to_string(staging_bytes) + " bytes for the slots of a virtual ring");
  check_cuda(cudaMalloc(&m.states, world * sizeof(RankState)), "allocating a virtual ring's state");
  check_cuda(cudaMalloc(&m.counters, world * lanes * sizeof(LaneCounters)), "allocating a virtual ring's counters");
  check_cuda(cudaHostAlloc(&m.words, sizeof(HostWords), cudaHostAllocMapped), "allocating host memory");
  check_cuda(cudaHostGetDevicePointer(&m.device_words, m.words, 0), "mapping host memory");
  m.chain.emplace();
  *m.words = {};
  check_cuda(cudaMemset(m.staging, 0xff, staging_bytes), "clearing the slots");  // a header of ones fits no call
  check_cuda(cudaMemset(m.states, 0, world * sizeof(RankState)), "clearing the state");
  const std::vector<LaneCounters> start(world * lanes, {settings.first_segment, settings.first_segment});
  check_cuda(cudaMemcpy(m.counters, start.data(), start.size() * sizeof(LaneCounters), cudaMemcpyHostToDevice),
             "starting the counters");
  for (std::size_t lane = 0; lane < world * lanes; ++lane) {
    const LaneLink link(m.staging, settings.shape, static_cast<int>(lane));
    for (std::uint64_t* counter : {link.posted(), link.taken()}) {
      check_cuda(cudaMemcpy(counter, &settings.first_segment, sizeof *counter, cudaMemcpyHostToDevice),
                 "starting the counters");
    }
  }
  check_cuda(cudaDeviceSynchronize(), "starting a virtual ring");
}

VirtualRing::~VirtualRing() = default;

void VirtualRing::check() const {
  const HostWords& words = *memory_->words;
  if (observed(&words.failure.raised) == 0) return;
  const std::vector<CallProgress> progress(words.progress, words.progress + settings_.world);
  throw RingFailure(failure_kind(words.failure.kind), failure_text(words.failure, progress, settings_.timeout_s));
}

double VirtualRing::total_count() const {
  check_cuda(cudaDeviceSynchronize(), "waiting for the last call");
  return memory_->words->progress[0].total_count;
}

Launch VirtualRing::plan(const VirtualCall& call, const Disturbance& disturbance) const {
  const Memory& m = *memory_;
  const StagingShape& shape = settings_.shape;
  Launch launch = plan_launch(shape, settings_.world, settings_.window, Operation::all_reduce, call.type,
                              call.normalization, call.divisor, call.elements);
  launch.timeout_ns = timeout_ns(settings_.timeout_s);
  launch.disturbance = disturbance;
  const auto staging = [&](int rank) {
    return m.staging + static_cast<std::size_t>((rank + settings_.world) % settings_.world) * shape.bytes();
  };
  for (int rank = 0; rank < settings_.world; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    RankArguments& mine = launch.arguments[r];
    mine.links = {staging(rank), staging(rank - 1), staging(rank + 1)};
    mine.state = m.states + r;
    mine.counters = m.counters + r * static_cast<std::size_t>(shape.lanes);
    mine.progress = m.device_words->progress + r;
    mine.failure = &m.device_words->failure;
    mine.stop = &m.device_words->failure.raised;
    mine.input = reinterpret_cast<const std::byte*>(call.inputs[r]);
    mine.output = reinterpret_cast<std::byte*>(call.outputs[r]);
    mine.count = call.counts.empty() ? 1.0 : call.counts[r];
    mine.device_count = call.device_counts == 0 ? nullptr : reinterpret_cast<const double*>(call.device_counts) + r;
  }
  return launch;
}

void VirtualRing::all_reduce(const VirtualCall& call, std::uintptr_t stream, const Disturbance& disturbance) {
  check();
  const auto world = static_cast<std::size_t>(settings_.world);
  if (call.inputs.size() != world || call.outputs.size() != world ||
      (!call.counts.empty() && call.counts.size() != world)) {
    throw std::invalid_argument("a virtual ring of " + std::to_string(world) +
                                " ranks takes as many tensors and counts");
  }
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  memory_->chain->before(on);
  launch_ring(plan(call, disturbance), on);
  memory_->chain->after(on);
}

}  // namespace ring_reduce
