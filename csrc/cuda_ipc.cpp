#include "cuda_ipc.h"

#include "cuda_chain.h"
#include "cuda_device.h"
#include "cuda_error.h"
#include "cuda_plan.h"
#include "cuda_ring.h"
#include "cuda_watchdog.h"
#include "process.h"

#include <cuda_runtime.h>
#include <optional>
#include <stdexcept>

namespace ring_reduce {

namespace {

constexpr double kLeaveSeconds = 5;  // that neighbours get to let go of this rank's memory

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

void check_settings(const IpcSettings& s) {
  if (s.world < 1 || s.rank < 0 || s.rank >= s.world || s.shape.lanes < 1) {
    throw std::invalid_argument("a ring needs world >= 1, 0 <= rank < world and lanes >= 1");
  }
  check_shape(s.shape, s.window);
}

}  // namespace

// In the order in which it is made; it goes in the other.
struct IpcRing::Resources {
  std::optional<Staging> staging;
  std::optional<Descriptors> processes;
  std::optional<IpcControl> control;  // to the end: abort() and check() may come at any time
  std::optional<PeerStaging> left;
  std::optional<PeerStaging> right;  // none in a world of 2: a handle is opened once
  std::uint64_t token = 0;
  std::optional<CallChain> chain;
  std::optional<Watchdog> watchdog;
};

IpcRing::IpcRing(const IpcSettings& settings)
    : settings_(settings), process_(current_process()), resources_(std::make_unique<Resources>()) {
  check_settings(settings);
  const DeviceGuard guard(settings.device);
  const int resident = resident_blocks();
  if (settings.shape.lanes > resident) {
    throw std::invalid_argument("lanes=" + std::to_string(settings.shape.lanes) + ": this GPU runs " +
                                std::to_string(resident) + " blocks at the same time; use at most as many");
  }
  resources_->staging.emplace(settings.shape, settings.device);
}

IpcRing::~IpcRing() {
  if (forked()) {
    static_cast<void>(resources_.release());  // the parent's: its thread does not run here, nor does CUDA
    return;
  }
  close();
}

bool IpcRing::forked() const { return current_process() != process_; }

void IpcRing::check_fork() const {
  if (forked()) {
    throw RingFailure(FailureKind::closed, rank_text(settings_.rank) +
                                               ": this process is a fork of the one that made the ring; CUDA does not "
                                               "survive a fork: start processes by spawn, and make a ring in each");
  }
}

// Ranks whose memory this one reaches, and that reach its memory.
std::vector<int> IpcRing::neighbours() const {
  if (settings_.world == 1) return {};
  if (settings_.world == 2) return {left()};
  return {left(), right()};
}

StagingPart IpcRing::part() const {
  check_fork();
  if (settings_.world == 1) return {"", 0, ""};
  const DeviceGuard guard(settings_.device);
  return resources_->staging->part();
}

void IpcRing::check_peer_access(int rank, const StagingPart& peer) const {
  const int other = device_number(peer.uuid);
  if (other < 0 || other == settings_.device) return;  // hidden from this process: opening its memory tells
  int can = 0;
  check_cuda(cudaDeviceCanAccessPeer(&can, settings_.device, other), "asking for peer access");
  if (can != 0) return;
  throw CudaError("the GPU of " + rank_text(settings_.rank) + " (" + device_uuid(settings_.device) +
                  ") has no peer access to that of " + rank_text(rank) + " (" + peer.uuid +
                  "); put them on GPUs that reach each other (nvidia-smi topo -p2p r), or use another transport");
}

void IpcRing::open(IpcPeers peers) {
  check_fork();
  Resources& r = *resources_;
  r.processes.emplace(std::move(peers.processes));
  if (r.processes->all().size() != static_cast<std::size_t>(settings_.world)) {
    throw std::invalid_argument("there has to be a process descriptor, or -1, for each rank");
  }
  r.control.emplace(settings_.rank, settings_.world, settings_.timeout_s, peers.control_fd, *r.processes);
  r.token = peers.token;
  const DeviceGuard guard(settings_.device);
  r.control->register_memory();
  if (settings_.world > 1) open_neighbours(peers);
  check_cuda(cudaDeviceSynchronize(), "writing to the neighbours");
}

void IpcRing::open_neighbours(const IpcPeers& peers) {
  Resources& r = *resources_;
  const auto opened = [&](std::optional<PeerStaging>& into, int rank, const StagingPart& part) {
    check_peer_access(rank, part);
    into.emplace(part, "the memory of " + rank_text(rank) + " (on " + part.uuid + ")");
  };
  opened(r.left, left(), peers.left);
  if (settings_.world > 2) opened(r.right, right(), peers.right);
  const Proof proof{r.token, settings_.rank};
  const auto write = [&](Side side, std::byte* slots, int rank) {
    write_proof(slots, settings_.shape, side, proof, "the memory of " + rank_text(rank));
  };
  write(Side::left, links().left, left());
  write(Side::right, links().right, right());
}

void IpcRing::prove() {
  check_fork();
  Resources& r = *resources_;
  const DeviceGuard guard(settings_.device);
  const std::string mine = "the memory of " + rank_text(settings_.rank);
  std::byte* slots = r.staging->slots();
  if (settings_.world > 1) {
    check_proof(slots, settings_.shape, Side::right, {r.token, left()}, mine);
    check_proof(slots, settings_.shape, Side::left, {r.token, right()}, mine);
  }
  r.staging->start(settings_.first_segment);
  r.chain.emplace();
  r.watchdog.emplace(*r.control, *r.processes);
}

Links IpcRing::links() const {
  const Resources& r = *resources_;
  std::byte* const own = r.staging->slots();
  std::byte* const to_left = r.left ? r.left->slots() : own;
  return {own, to_left, r.right ? r.right->slots() : to_left};
}

Launch IpcRing::plan(const IpcCall& call) const {
  const Resources& r = *resources_;
  Launch launch = plan_launch(settings_.shape, settings_.world, settings_.window, call.operation, call.type,
                              call.normalization, call.divisor, call.elements);
  launch.first_rank = settings_.rank;
  launch.ranks = 1;
  launch.timeout_ns = timeout_ns(settings_.timeout_s);
  RankArguments& mine = launch.arguments[0];
  mine.links = links();
  mine.state = r.staging->state();
  mine.counters = r.staging->counters();
  mine.progress = r.control->device_progress();
  mine.failure = r.control->device_failure();
  mine.stop = r.control->device_stop();
  mine.input = reinterpret_cast<const std::byte*>(call.input);
  mine.output = reinterpret_cast<std::byte*>(call.output);
  mine.count = call.count;
  mine.device_count = reinterpret_cast<const double*>(call.device_count);
  return launch;
}

void IpcRing::run(const IpcCall& call, std::uintptr_t stream) {
  check_fork();  // before any lock: a thread of the parent may have held it at the fork
  const std::scoped_lock lock(calling_);
  check();
  Resources& r = *resources_;
  if (!r.watchdog) throw std::logic_error("the ring is not made yet");
  r.control->check_peers_are_there();
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  const Launch launch = plan(call);
  try {
    const DeviceGuard guard(settings_.device);
    r.chain->before(on);
    launch_ring(launch, on);
    r.chain->after(on);
  } catch (const CudaError& error) {
    // The other ranks would wait for this call.
    r.control->fail(FailureKind::aborted, rank_text(settings_.rank) + " could not start a call: " + error.what());
    r.control->check();
  }
  count(launch);
}

void IpcRing::count(const Launch& launch) {
  const MoveRange moves = moves_of(launch.fingerprint.operation, settings_.world);
  const std::uint64_t element = element_bytes(launch.fingerprint.type);
  const std::scoped_lock lock(stats_mutex_);
  for (int k = moves.first; k <= moves.last; ++k) {
    const int chunk = chunk_of_move(k, settings_.rank, settings_.world);
    const std::uint64_t bytes = launch.partition.chunk(chunk).elements * element;
    if (k != moves.first) stats_.bytes_received += bytes;
    if (k == moves.last) continue;
    stats_.bytes_sent += bytes;
    stats_.header_bytes_sent += sizeof(SegmentHeader) * launch.segments * static_cast<std::uint64_t>(launch.lanes);
  }
}

void IpcRing::abort(const std::string& reason) {
  if (forked() || closed_ || !resources_->control) return;
  resources_->control->fail(FailureKind::aborted, reason);
}

void IpcRing::check() {
  check_fork();
  if (resources_->control) resources_->control->check();
  if (closed_) {
    throw RingFailure(FailureKind::closed,
                      rank_text(settings_.rank) + ": the ring is closed; make a new one for further calls");
  }
}

double IpcRing::total_count() const { return resources_->control->progress().total_count; }

IpcStats IpcRing::stats() const {
  check_fork();
  const std::scoped_lock lock(stats_mutex_);
  IpcStats stats = stats_;
  if (resources_->control) stats.calls = resources_->control->progress().completed;
  return stats;
}

void IpcRing::close() {
  if (forked() || closed_.exchange(true)) return;
  const std::scoped_lock lock(calling_);
  try {
    const DeviceGuard guard(settings_.device);
    leave();
  } catch (const CudaError&) {  // the device is lost, and its memory with it
    leave();
  }
}

// Errors here have nobody to tell.
void IpcRing::leave() {
  Resources& r = *resources_;
  cudaDeviceSynchronize();  // every wait of a kernel ends, if only because the watchdog sees that another rank has left
  if (r.control) r.control->close();
  r.watchdog.reset();
  r.chain.reset();
  r.right.reset();
  r.left.reset();
  if (r.control) {
    r.control->release();
    for (const int rank : neighbours()) r.control->wait_released(rank, kLeaveSeconds);
    r.control->unregister();
  }
  r.staging.reset();
  static_cast<void>(cudaGetLastError());
}

}  // namespace ring_reduce
