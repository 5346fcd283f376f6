#include "group.h"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <limits>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ring_reduce {

namespace {

constexpr long kSleepNanoseconds = 50'000'000;  // bounds the time until an abort, a death or a signal is seen

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

// The low half of a little-endian u64, which changes with every publish.
std::uint32_t* futex_word(SharedPlatform::U64& word) {
  static_assert(std::endian::native == std::endian::little);
  return reinterpret_cast<std::uint32_t*>(&word);
}

bool process_ended(int process_fd) {
  pollfd entry{process_fd, POLLIN, 0};  // a pidfd becomes readable when its process ends
  if (process_fd < 0 || poll(&entry, 1, 0) != 1 || (entry.revents & (POLLIN | POLLHUP)) == 0) return false;
  // The user's code may have closed all descriptors, as daemons do, and this one may be a file now: no death.
  return syscall(SYS_pidfd_send_signal, process_fd, 0, nullptr, 0) == 0 || errno != EBADF;
}

}  // namespace

// Not FUTEX_PRIVATE: waiter and waker are different processes.
void SharedPlatform::futex_wait(U64& word, std::uint64_t seen) {
  const timespec timeout{0, kSleepNanoseconds};
  syscall(SYS_futex, futex_word(word), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &timeout, nullptr, 0);
}

void SharedPlatform::futex_wake(U64& word) {
  syscall(SYS_futex, futex_word(word), FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

Group::Group(const RingSettings& given, const std::vector<std::byte*>& regions, std::vector<int> process_fds)
    : settings(given), process_fds_(std::move(process_fds)) {
  if (settings.world < 1 || settings.rank < 0 || settings.rank >= settings.world ||
      regions.size() != static_cast<std::size_t>(settings.world) || process_fds_.size() != regions.size()) {
    throw std::invalid_argument("rank, world, regions and process descriptors do not fit together");
  }
  if (settings.window < 1 || settings.window >= settings.shape.depth || settings.shape.lanes < 1 ||
      settings.shape.segment_bytes == 0 || settings.shape.segment_bytes % kLineBytes != 0 ||
      settings.shape.part_bytes == 0 || settings.shape.part_bytes % kLineBytes != 0 ||
      settings.shape.world != settings.world) {
    throw std::invalid_argument("a ring needs 1 <= window < depth, lanes >= 1, and segments and parts of whole lines");
  }
  for (std::byte* base : regions) regions_.emplace_back(base, settings.shape);
}

void Group::wake(int rank) const {
  for (int lane = 0; lane < settings.shape.lanes; ++lane) {
    SharedPlatform::futex_wake(region(rank).posted(lane).value);
    SharedPlatform::futex_wake(region(rank).taken(lane).value);
    SharedPlatform::futex_wake(region(rank).inputs(lane).value);
    SharedPlatform::futex_wake(region(rank).results(lane).value);
  }
}

void Group::announce(const Fingerprint& call) {
  const auto words = std::bit_cast<std::array<std::uint64_t, kFingerprintWords>>(call);
  Control& own = own_control();
  for (std::size_t i = 0; i < words.size(); ++i) {
    own.announced[call.call % 2][i].store(words[i], std::memory_order_relaxed);
  }
  own.started_calls.store(call.call, std::memory_order_release);  // pairs with check_announced()
}

void Group::check_announced(const Fingerprint& call) {
  for (int rank = 0; rank < settings.world; ++rank) {
    if (control(rank).started_calls.load(std::memory_order_acquire) < call.call) continue;
    std::array<std::uint64_t, kFingerprintWords> words{};
    for (std::size_t i = 0; i < words.size(); ++i) {
      words[i] = control(rank).announced[call.call % 2][i].load(std::memory_order_relaxed);
    }
    const auto theirs = std::bit_cast<Fingerprint>(words);
    if (theirs.call == call.call && !(theirs == call)) {
      throw fail(FailureKind::mismatch, call.call, mismatch_text(call, settings.rank, theirs, rank));
    }
  }
}

bool Group::failed(std::uint64_t call) const {
  const std::uint32_t cause = own_control().failed_by.load(std::memory_order_acquire);
  if (cause == 0) return false;
  const bool known = cause <= static_cast<std::uint32_t>(settings.world);
  return !known || control(static_cast<int>(cause) - 1).failure_call <= call;
}

RingFailure Group::fail(FailureKind kind, std::uint64_t call, const std::string& text) {
  const std::scoped_lock lock(failing_);  // one lane at a time: the text is written once
  if (!failed()) {
    Control& own = own_control();
    const std::size_t length = std::min(text.size(), own.failure_text.size());
    own.failure_call = call;
    own.failure_kind.store(static_cast<std::uint32_t>(kind), std::memory_order_relaxed);
    own.failure_length.store(static_cast<std::uint32_t>(length), std::memory_order_relaxed);
    std::copy_n(text.begin(), length, own.failure_text.begin());
    std::uint32_t cause = 0;
    const auto me = static_cast<std::uint32_t>(settings.rank) + 1;
    // Rank 0's word decides between ranks that fail at once. Release: publishes the text; pairs with failed().
    if (control(0).failed_by.compare_exchange_strong(cause, me, std::memory_order_acq_rel)) cause = me;
    for (int rank = 0; rank < settings.world; ++rank) {
      control(rank).failed_by.store(cause, std::memory_order_release);
    }
    // Only then: in a direct all-reduce a rank sleeps on the counters of another.
    for (int rank = 0; rank < settings.world; ++rank) wake(rank);
  }
  return failure();
}

RingFailure Group::failure() const {
  const std::uint32_t cause = own_control().failed_by.load(std::memory_order_acquire);
  if (cause == 0 || cause > static_cast<std::uint32_t>(settings.world)) {
    return {FailureKind::aborted, "the ring failed, and its shared memory does not say why"};
  }
  const Control& from = control(static_cast<int>(cause) - 1);
  const std::uint32_t length = from.failure_length.load(std::memory_order_relaxed);
  const std::uint32_t kind = from.failure_kind.load(std::memory_order_relaxed);
  return {static_cast<FailureKind>(std::clamp<std::uint32_t>(kind, 1, 5)),
          std::string(from.failure_text.data(), std::min<std::size_t>(length, from.failure_text.size()))};
}

void Group::check_peers(std::uint64_t call) {
  for (int rank = 0; rank < settings.world; ++rank) {
    if (rank == settings.rank) continue;
    // Ended first, then what it completed: a rank that ended after completing this call is not lost.
    const bool ended = process_ended(process_fds_[static_cast<std::size_t>(rank)]);
    const bool closed = control(rank).closed.load(std::memory_order_acquire) != 0;
    const std::uint64_t completed = control(rank).completed_calls.load(std::memory_order_acquire);
    if (completed >= call) continue;
    const std::string state = " after " + std::to_string(completed) + " calls, while " + rank_text(settings.rank) +
                              " is in call " + std::to_string(call);
    if (closed) {
      throw fail(FailureKind::closed, completed + 1,
                 rank_text(rank) + " closed the ring" + state +
                     "; every rank has to make the same calls (under DDP: as many backwards, or join())");
    }
    if (ended) {
      throw fail(FailureKind::peer_lost, completed + 1,
                 rank_text(rank) + " ended (killed, crashed or exited)" + state +
                     "; look at its output, then start the job again");
    }
  }
}

std::uint64_t Group::waiting_at(int rank, int lane) const {
  const std::uint64_t taken = observed(region(left_of(rank)).taken(lane));
  return observed(region(rank).posted(lane)) - taken;
}

int Group::stalled_left(int lane) const {
  int rank = left();
  while (rank != settings.rank && waiting_at(rank, lane) == 0) rank = left_of(rank);
  return rank == settings.rank ? left() : rank;
}

int Group::stalled_right(int lane) const {
  const auto depth = static_cast<std::uint64_t>(settings.shape.depth);
  int rank = right();
  while (rank != settings.rank && waiting_at(right_of(rank), lane) == depth) rank = right_of(rank);
  return rank == settings.rank ? right() : rank;
}

std::string Group::late_ranks(std::uint64_t call) const {
  std::string text;
  for (int rank = 0; rank < settings.world; ++rank) {
    if (control(rank).started_calls.load(std::memory_order_acquire) >= call) continue;
    text += "; " + rank_text(rank) + " has not made call " + std::to_string(call) + " (it has completed " +
            std::to_string(control(rank).completed_calls.load(std::memory_order_acquire)) + ")";
  }
  return text;
}

}  // namespace ring_reduce
