#include "cuda_error.h"
#include "cuda_plan.h"
#include "cuda_ring.h"
#include "cuda_virtual.h"

#include <cuda_runtime.h>
#include <stdexcept>

namespace ring_reduce {

namespace {

std::string failure_text(const DeviceFailure& failure, int world, double timeout_s) {
  const int left = (failure.rank + world - 1) % world, right = (failure.rank + 1) % world;
  const std::string who = "rank " + std::to_string(failure.rank) + ": ";
  const std::string where = " (call " + std::to_string(failure.call) + ", " + describe(failure.mine) + ", lane " +
                            std::to_string(failure.lane) + ")";
  std::string seconds = std::to_string(timeout_s);
  seconds.resize(seconds.find('.') + 2);
  switch (failure.kind) {
    case DeviceFailureKind::none: break;
    case DeviceFailureKind::no_segment:
      return who + "no segment " + std::to_string(failure.number) + " from rank " + std::to_string(left) + " in " +
             seconds + " s" + where + "; did every rank start the call?";
    case DeviceFailureKind::no_slot:
      return who + "no free slot for segment " + std::to_string(failure.number) + " at rank " + std::to_string(right) +
             " in " + seconds + " s" + where + "; did every rank start the call?";
    case DeviceFailureKind::mismatch:
      return "ranks disagree in call " + std::to_string(failure.call) + ": " +
             describe_difference(failure.mine, failure.rank, failure.theirs, left) +
             "; every rank has to make the same calls in the same order";
    case DeviceFailureKind::corrupt: return who + "a corrupt segment header from rank " + std::to_string(left) + where;
    case DeviceFailureKind::bad_count:
      return who + "its count on the device is " + std::to_string(failure.count) +
             "; a count is 0 or a finite number from 2**-126 to 2**53" + where;
    case DeviceFailureKind::infinite_count: return "the counts of the ranks add up to infinity" + where;
  }
  return who + "an unknown failure" + where;
}

FailureKind failure_kind(DeviceFailureKind kind) {
  switch (kind) {
    case DeviceFailureKind::no_segment:
    case DeviceFailureKind::no_slot: return FailureKind::timeout;
    case DeviceFailureKind::mismatch:
    case DeviceFailureKind::corrupt: return FailureKind::mismatch;
    case DeviceFailureKind::none:
    case DeviceFailureKind::bad_count:
    case DeviceFailureKind::infinite_count: return FailureKind::aborted;
  }
  return FailureKind::aborted;
}

void check_settings(const VirtualSettings& s) {
  if (s.world < 1 || s.world > kMaxVirtualRanks) {
    throw std::invalid_argument("world=" + std::to_string(s.world) + ": a virtual ring has 1 to " +
                                std::to_string(kMaxVirtualRanks) + " ranks");
  }
  if (s.window < 1 || s.window >= s.shape.depth) {
    throw std::invalid_argument("window=" + std::to_string(s.window) + " and depth=" + std::to_string(s.shape.depth) +
                                ": 1 <= window < depth has to hold");
  }
  if (s.shape.segment_bytes == 0 || s.shape.segment_bytes % kLineBytes != 0 || s.shape.segment_bytes > (1u << 30)) {
    throw std::invalid_argument("segment_bytes=" + std::to_string(s.shape.segment_bytes) +
                                ": it has to be a multiple of " + std::to_string(kLineBytes) + " up to 2**30");
  }
}

}  // namespace

struct VirtualRing::Memory {
  int device = 0;
  std::byte* staging = nullptr;
  RankState* states = nullptr;
  LaneCounters* counters = nullptr;
  DeviceFailure* failure = nullptr;         // as the host sees it
  DeviceFailure* device_failure = nullptr;  // as the device does
  cudaEvent_t last_call = nullptr;
  bool called = false;
  unsigned long long capture = 0;  // that the last call was captured in; 0: none

  ~Memory() {
    // Errors here have nobody to tell. The device finishes what it runs: every wait of a kernel ends.
    int current = 0;
    cudaGetDevice(&current);
    cudaSetDevice(device);
    cudaDeviceSynchronize();
    if (last_call != nullptr) cudaEventDestroy(last_call);
    cudaFree(counters);
    cudaFree(states);
    cudaFree(staging);
    cudaFreeHost(failure);
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
  check_cuda(cudaHostAlloc(&m.failure, sizeof(DeviceFailure), cudaHostAllocMapped), "allocating host memory");
  check_cuda(cudaHostGetDevicePointer(&m.device_failure, m.failure, 0), "mapping host memory");
  check_cuda(cudaEventCreateWithFlags(&m.last_call, cudaEventDisableTiming), "making an event");
  *m.failure = {};
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
  const DeviceFailure& failure = *memory_->failure;
  if (static_cast<const volatile std::uint64_t&>(failure.raised) == 0) return;
  throw RingFailure(failure_kind(failure.kind), failure_text(failure, settings_.world, settings_.timeout_s));
}

double VirtualRing::total_count() const {
  RankState state{};
  check_cuda(cudaMemcpy(&state, memory_->states, sizeof state, cudaMemcpyDeviceToHost), "reading the total count");
  return state.total_count;
}

Launch VirtualRing::plan(const VirtualCall& call, const Disturbance& disturbance) const {
  const Memory& m = *memory_;
  const StagingShape& shape = settings_.shape;
  Launch launch = plan_all_reduce(shape, settings_.world, settings_.window, call.type, call.normalization, call.divisor,
                                  call.elements);
  launch.timeout_ns = static_cast<std::uint64_t>(settings_.timeout_s * 1e9);
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
    mine.failure = m.device_failure;
    mine.input = reinterpret_cast<const std::byte*>(call.inputs[r]);
    mine.output = reinterpret_cast<std::byte*>(call.outputs[r]);
    mine.count = call.counts.empty() ? 1.0 : call.counts[r];
    mine.device_count = call.device_counts == 0 ? nullptr : reinterpret_cast<const double*>(call.device_counts) + r;
  }
  return launch;
}

// Calls share the counters: one begins when the one before it, on whatever stream, has ended. A call that is captured
// in a graph waits for those before it in that capture; what replays the graph orders it against others.
void VirtualRing::chain(void* stream) {
  Memory& m = *memory_;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  const auto on = static_cast<cudaStream_t>(stream);
  check_cuda(cudaStreamGetCaptureInfo(on, &status, &capture), "asking whether the stream is being captured");
  if (status == cudaStreamCaptureStatusNone) capture = 0;
  if (m.called && capture == m.capture)
    check_cuda(cudaStreamWaitEvent(on, m.last_call, 0), "waiting for the last call");
  m.capture = capture;
}

void VirtualRing::record(void* stream) {
  check_cuda(cudaEventRecord(memory_->last_call, static_cast<cudaStream_t>(stream)), "recording a call");
  memory_->called = true;
}

void VirtualRing::all_reduce(const VirtualCall& call, std::uintptr_t stream, const Disturbance& disturbance) {
  check();
  const auto world = static_cast<std::size_t>(settings_.world);
  if (call.inputs.size() != world || call.outputs.size() != world ||
      (!call.counts.empty() && call.counts.size() != world)) {
    throw std::invalid_argument("a virtual ring of " + std::to_string(world) +
                                " ranks takes as many tensors and counts");
  }
  void* on = reinterpret_cast<void*>(stream);
  chain(on);
  launch_ring(plan(call, disturbance), on);
  record(on);
}

std::string why_no_cuda() {
  int driver = 0, runtime = 0, devices = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  const cudaError_t error = cudaGetDeviceCount(&devices);
  static_cast<void>(cudaGetLastError());
  if (driver == 0) return "there is no NVIDIA driver on this machine";
  if (error == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver supports CUDA " + version(driver) + " and ring_reduce was built with CUDA " +
           version(runtime) + "; update the driver, or reinstall with an older nvcc";
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && devices == 0)) {
    return "the NVIDIA driver sees no GPU; is CUDA_VISIBLE_DEVICES set?";
  }
  if (error != cudaSuccess) return std::string("CUDA does not start: ") + cudaGetErrorString(error);
  int blocks = 0;
  try {
    blocks = resident_blocks();
  } catch (const CudaError& reason) {
    return std::string("ring_reduce was built without code for this GPU (") + reason.what() +
           "); reinstall with RING_REDUCE_CUDA_ARCH=native";
  }
  return blocks > 0 ? "" : "the ring's kernel does not fit this GPU";
}

}  // namespace ring_reduce
