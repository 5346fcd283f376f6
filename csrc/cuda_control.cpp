#include "cuda_control.h"

#include "cuda_error.h"
#include "cuda_flag.h"

#include <algorithm>
#include <chrono>
#include <cuda_runtime.h>
#include <poll.h>
#include <thread>

namespace ring_reduce {

// Each part has lines of its own, since a GPU writes some and hosts the others.
struct ControlRank {
  alignas(kLineBytes) CallProgress progress;  // its GPU writes
  alignas(kLineBytes) DeviceFailure failure;  // its GPU writes
  alignas(kLineBytes) std::atomic<std::uint32_t> closed;
  std::atomic<std::uint32_t> released;
  std::uint32_t cause_kind;  // written once, before `cause` names this rank
  std::uint32_t cause_length;
  std::array<char, 1024> cause_text;
};

struct ControlWords {
  alignas(kLineBytes) std::uint64_t stop;                // GPUs and hosts write; see RankArguments
  alignas(kLineBytes) std::atomic<std::uint32_t> cause;  // 1 + the rank whose host said why; 0: nobody yet
  alignas(kLineBytes) ControlRank ranks[1];              // as many as there are
};

namespace {

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

std::size_t IpcControl::bytes(int world) {
  return sizeof(ControlWords) + static_cast<std::size_t>(world - 1) * sizeof(ControlRank);
}

IpcControl::IpcControl(int rank, int world, double timeout_s, int memory_fd, const Descriptors& processes)
    : rank_(rank),
      world_(world),
      timeout_s_(timeout_s),
      processes_(processes.all()),
      mapping_(memory_fd, bytes(world)),
      words_(reinterpret_cast<ControlWords*>(mapping_.base())) {}

void IpcControl::register_memory() {
  check_cuda(cudaHostRegister(mapping_.base(), bytes(world_), cudaHostRegisterMapped),
             "registering " + std::to_string(bytes(world_)) + " bytes of shared host memory with CUDA");
  registered_ = true;
  void* device_base = nullptr;
  check_cuda(cudaHostGetDevicePointer(&device_base, mapping_.base(), 0), "mapping shared host memory into the GPU");
  device_base_ = static_cast<std::byte*>(device_base);
}

IpcControl::~IpcControl() { unregister(); }

void IpcControl::unregister() {
  if (!std::exchange(registered_, false)) return;
  cudaHostUnregister(mapping_.base());
  static_cast<void>(cudaGetLastError());
}

template <class T>
T* IpcControl::on_device(T* word) const {
  return reinterpret_cast<T*>(device_base_ + (reinterpret_cast<std::byte*>(word) - mapping_.base()));
}

CallProgress* IpcControl::device_progress() const { return on_device(&of(rank_).progress); }
DeviceFailure* IpcControl::device_failure() const { return on_device(&of(rank_).failure); }
std::uint64_t* IpcControl::device_stop() const { return on_device(&words_->stop); }

ControlRank& IpcControl::of(int rank) const { return words_->ranks[rank]; }

CallProgress IpcControl::progress_of(int rank) const {
  const CallProgress& progress = of(rank).progress;
  const std::uint64_t completed = observed(&progress.completed);  // first: what it counts was started
  return {observed(&progress.started), completed, progress.total_count};
}

bool IpcControl::ended(int rank) const {
  pollfd entry{processes_[static_cast<std::size_t>(rank)], POLLIN, 0};  // a pidfd is readable once its process ended
  return entry.fd >= 0 && poll(&entry, 1, 0) == 1 && (entry.revents & (POLLIN | POLLHUP)) != 0;
}

void IpcControl::fail(FailureKind kind, const std::string& text) {
  const std::scoped_lock lock(failing_);  // the text of this rank is written once
  if (words_->cause.load(std::memory_order_acquire) == 0) {
    ControlRank& own = of(rank_);
    own.cause_kind = static_cast<std::uint32_t>(kind);
    own.cause_length = static_cast<std::uint32_t>(std::min(text.size(), own.cause_text.size()));
    std::copy_n(text.begin(), own.cause_length, own.cause_text.begin());
    std::uint32_t nobody = 0;
    // Decides between ranks that fail at once. Release: publishes the text; pairs with raise().
    words_->cause.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank_) + 1, std::memory_order_acq_rel);
  }
  publish(&words_->stop, 1);  // pairs with stopped() of cuda_port.h
}

void IpcControl::raise() const {
  const std::uint32_t cause = words_->cause.load(std::memory_order_acquire);
  if (cause > static_cast<std::uint32_t>(world_)) {
    throw RingFailure(FailureKind::aborted, "the ring failed, and its shared memory does not say why");
  }
  const ControlRank& from = of(static_cast<int>(cause) - 1);
  const std::size_t length = std::min<std::size_t>(from.cause_length, from.cause_text.size());
  const std::uint32_t kind = std::clamp<std::uint32_t>(from.cause_kind, 1, 5);
  throw RingFailure(static_cast<FailureKind>(kind), std::string(from.cause_text.data(), length));
}

// A device can't write the text; the host that first sees its failure does.
void IpcControl::adopt_device_failures() {
  if (words_->cause.load(std::memory_order_acquire) != 0) return;
  for (int rank = 0; rank < world_; ++rank) {
    const DeviceFailure& failure = of(rank).failure;
    if (observed(&failure.raised) == 0) continue;
    std::vector<CallProgress> progress;
    for (int each = 0; each < world_; ++each) progress.push_back(progress_of(each));
    return fail(failure_kind(failure.kind), failure_text(failure, progress, timeout_s_));
  }
}

void IpcControl::check() {
  if (observed(&words_->stop) != 0) look();  // a kernel that another rank's leaving has ended tells nobody
  if (words_->cause.load(std::memory_order_acquire) != 0) raise();
}

void IpcControl::fail_for_missing(int rank, bool closed, std::uint64_t completed, std::uint64_t call) {
  const std::string state = " after " + std::to_string(completed) + " calls, while " + rank_text(rank_) +
                            " is in call " + std::to_string(call);
  if (closed) {
    return fail(FailureKind::closed,
                rank_text(rank) + " closed the ring" + state +
                    "; every rank has to make the same calls (under DDP: as many backwards, or join())");
  }
  fail(FailureKind::peer_lost, rank_text(rank) + " ended (killed, crashed or exited)" + state +
                                   "; look at its output, then start the job again");
}

void IpcControl::check_peers_are_there() {
  check();
  for (int rank = 0; rank < world_; ++rank) {
    if (rank == rank_) continue;
    const bool closed = of(rank).closed.load(std::memory_order_acquire) != 0;
    if (!closed && !ended(rank)) continue;
    fail_for_missing(rank, closed, progress_of(rank).completed, progress().completed + 1);
    raise();
  }
}

void IpcControl::look() {
  adopt_device_failures();
  if (words_->cause.load(std::memory_order_acquire) != 0) return;
  for (int rank = 0; rank < world_; ++rank) {
    if (rank == rank_) continue;
    // Gone first, then what it completed: a rank that is gone after completing this call is not lost.
    const bool gone = ended(rank), closed = of(rank).closed.load(std::memory_order_acquire) != 0;
    const std::uint64_t completed = progress_of(rank).completed, started = progress().started;
    if ((gone || closed) && started > completed) fail_for_missing(rank, closed, completed, started);
  }
}

void IpcControl::close() {
  of(rank_).closed.store(1, std::memory_order_release);  // first: whoever finds itself stopped asks who has closed
  std::uint64_t nothing = 0;                             // a failure, or a rank that left before, stops as much
  std::atomic_ref(words_->stop).compare_exchange_strong(nothing, progress().completed + 1, std::memory_order_acq_rel);
}

void IpcControl::release() { of(rank_).released.store(1, std::memory_order_release); }

void IpcControl::wait_released(int rank, double seconds) const {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  while (of(rank).released.load(std::memory_order_acquire) == 0 && !ended(rank) && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace ring_reduce
