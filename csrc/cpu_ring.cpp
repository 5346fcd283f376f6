#include "cpu_ring.h"

#include "process.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace ring_reduce {

namespace {

// A lane is worth a thread's hand-over from this many bytes of a chunk on.
constexpr std::uint64_t kLaneBytes = 256 * 1024;

std::uint64_t ceil_divide(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }

}  // namespace

CpuRing::CpuRing(const RingSettings& settings, const std::vector<std::byte*>& regions, std::vector<int> process_fds)
    : group_(settings, regions, std::move(process_fds)),
      process_(current_process()),
      threads_(std::make_unique<LaneThreads>()),
      lanes_(static_cast<std::size_t>(settings.shape.lanes)) {
  const auto world = static_cast<std::size_t>(settings.world);
  for (LaneState& lane : lanes_) {
    lane.counts.resize(world);
    lane.addends.reserve(world);
    lane.scales.reserve(world);
  }
}

CpuRing::~CpuRing() {
  if (forked()) static_cast<void>(threads_.release());  // they run in the parent: nothing to join
  close();
}

// A fork has the memory but is not the rank.
bool CpuRing::forked() const { return current_process() != process_; }

double CpuRing::run(const CallArguments& arguments, const Interrupt* interrupt) {
  check_fork();  // before any lock: a thread of the parent may have held it at the fork
  const std::scoped_lock lock(calling_);
  check();
  ++calls_;
  const Call call = plan(arguments);
  group_.announce(call.fingerprint);
  if (call.lanes == 1) {
    run_lane(call, 0, interrupt);
  } else {
    run_lanes(call, interrupt);
  }
  group_.own_control().completed_calls.store(calls_, std::memory_order_release);
  keep_stats();
  return uses_count(arguments.normalization) ? lanes_[0].total_count : 0;
}

void CpuRing::run_lanes(const Call& call, const Interrupt* interrupt) {
  start_lanes(call.lanes);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(call.lanes));
  threads_->run(call.lanes, [&](int lane) {
    try {
      run_lane(call, lane, lane == 0 ? interrupt : nullptr);
    } catch (...) {
      errors[static_cast<std::size_t>(lane)] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

void CpuRing::keep_stats() {
  Stats stats{.calls = calls_};
  for (const LaneState& lane : lanes_) {
    stats.bytes_sent += lane.bytes_sent;
    stats.bytes_received += lane.bytes_received;
    stats.header_bytes_sent += lane.header_bytes_sent;
    stats.seconds_waiting += lane.seconds_waiting;
  }
  const std::scoped_lock lock(stats_mutex_);
  stats_ = stats;
}

// A lane that can't run must not leave the other ranks waiting for it.
void CpuRing::start_lanes(int lanes) {
  try {
    threads_->start(lanes);
  } catch (const std::system_error& error) {
    throw group_.fail(FailureKind::aborted, calls_,
                      "rank " + std::to_string(group_.settings.rank) + " could not start " + std::to_string(lanes - 1) +
                          " threads for its lanes (" + error.what() +
                          "); raise the limit on processes (ulimit -u), or use lanes=1");
  }
}

// A function of the arguments and of what the ranks agreed on.
Algorithm CpuRing::algorithm_of(const CallArguments& arguments) const {
  const RingSettings& s = group_.settings;
  if (arguments.operation != Operation::all_reduce || s.world == 1) return Algorithm::ring;
  const std::uint64_t bytes = arguments.elements * element_bytes(arguments.type);
  const bool shoots = s.one_shot_bytes != 0 && bytes <= std::min(s.one_shot_bytes, s.shape.input_bytes());
  if (shoots) return Algorithm::one_shot;
  return s.direct ? Algorithm::direct : Algorithm::ring;
}

Call CpuRing::plan(const CallArguments& arguments) const {
  const RingSettings& s = group_.settings;
  Call call{};
  call.fingerprint = {
      calls_,         arguments.elements,      arguments.divisor,      kWireVersion, arguments.operation,
      arguments.type, arguments.normalization, algorithm_of(arguments)};
  call.input = arguments.input;
  call.output = arguments.output;
  call.count = uses_count(arguments.normalization) ? arguments.count : 1.0;
  call.partition = partition_of(arguments.operation, arguments.elements, arguments.type, s.world);
  const std::uint64_t own_begin = call.partition.chunk(s.rank).begin;
  call.input_begin = arguments.operation == Operation::all_gather ? own_begin : 0;
  call.output_begin = arguments.operation == Operation::reduce_scatter ? own_begin : 0;

  // All of this follows from the arguments and the agreed settings, so it is the same on every rank.
  const std::uint64_t element = element_bytes(arguments.type);
  const std::uint64_t chunk_bytes = call.partition.longest() * element;
  call.lanes = static_cast<int>(
      std::clamp<std::uint64_t>(chunk_bytes / kLaneBytes, 1, static_cast<std::uint64_t>(s.shape.lanes)));
  std::uint64_t lane_elements = 0;
  for (int lane = 0; lane < call.lanes; ++lane) {
    lane_elements = std::max(lane_elements, call.partition.lane(0, lane, call.lanes).elements);
  }
  const bool by_segments = call.fingerprint.algorithm == Algorithm::ring;
  call.segment_elements = (by_segments ? s.shape.segment_bytes : s.shape.part_bytes) / element;
  call.segments = std::max<std::uint64_t>(1, ceil_divide(lane_elements, call.segment_elements));
  // In place the lines of the output are in a cache already: they were read a moment ago.
  call.stream = arguments.input != arguments.output && arguments.elements * element >= s.stream_bytes;
  return call;
}

void CpuRing::run_lane(const Call& call, int lane, const Interrupt* interrupt) {
  const RingSettings& s = group_.settings;
  LaneState& state = lanes_[static_cast<std::size_t>(lane)];
  if (state.trace != nullptr) state.trace->begin_call(call.fingerprint.call);
  Wait wait(group_, call.fingerprint, interrupt);
  if (call.fingerprint.algorithm != Algorithm::ring) {
    DirectPort port(group_, call, lane, state, wait);
    run_direct(port, call.segments, call.fingerprint.algorithm == Algorithm::direct);
    state.seconds_waiting += wait.seconds();
    return;
  }
  LanePort port(group_, call, lane, state, wait);
  const auto window = static_cast<std::uint64_t>(s.window);
  if (call.fingerprint.operation == Operation::all_gather) {
    // Its first receive writes the output, so headers go round before: no tensor changes where ranks disagree.
    port.set_handshake(true);
    run_ring(port, reduce_scatter_moves(s.world), 1, window);
    port.set_handshake(false);
  }
  run_ring(port, moves_of(call.fingerprint.operation, s.world), call.segments, window);
  state.seconds_waiting += wait.seconds();
}

void CpuRing::abort(const std::string& reason) {
  if (closed_ || forked()) return;
  const std::uint64_t completed = group_.own_control().completed_calls.load(std::memory_order_acquire);
  group_.fail(FailureKind::aborted, completed + 1, reason);
}

void CpuRing::close() {
  if (forked() || closed_.exchange(true)) return;
  group_.own_control().closed.store(1, std::memory_order_release);
}

void CpuRing::check_fork() const {
  if (forked()) {
    throw RingFailure(FailureKind::closed, "rank " + std::to_string(group_.settings.rank) +
                                               ": this process is a fork of the one that made the ring; make a ring "
                                               "of its own here");
  }
}

void CpuRing::check() const {
  check_fork();
  if (group_.failed()) throw group_.failure();
  if (closed_) {
    throw RingFailure(FailureKind::closed, "rank " + std::to_string(group_.settings.rank) +
                                               ": the ring is closed; make a new one for further calls");
  }
}

Stats CpuRing::stats() const {
  check_fork();
  const std::scoped_lock lock(stats_mutex_);
  return stats_;
}

bool CpuRing::start_trace(std::size_t limit) {
  check_fork();
  const std::scoped_lock lock(calling_);
  if (!traces_.empty()) return false;
  traces_.assign(lanes_.size(), LaneTrace(limit));
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) lanes_[lane].trace = &traces_[lane];
  return true;
}

std::vector<LaneTrace> CpuRing::take_trace() {
  check_fork();
  const std::scoped_lock lock(calling_);
  for (LaneState& lane : lanes_) lane.trace = nullptr;
  return std::exchange(traces_, {});
}

}  // namespace ring_reduce
