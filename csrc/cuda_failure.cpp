#include "cuda_failure.h"

#include <array>
#include <cstdio>

namespace ring_reduce {

namespace {

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

// "; rank 3 has not made call 8 (it has completed 7)" for each rank that is late, or ""
std::string late_ranks(std::uint64_t call, const std::vector<CallProgress>& progress) {
  std::string text;
  for (std::size_t rank = 0; rank < progress.size(); ++rank) {
    if (progress[rank].started >= call) continue;
    text += "; " + rank_text(static_cast<int>(rank)) + " has not made call " + std::to_string(call) +
            " (it has completed " + std::to_string(progress[rank].completed) + ")";
  }
  return text;
}

std::string timeout_text(const DeviceFailure& failure, const std::string& what,
                         const std::vector<CallProgress>& progress, double timeout_s) {
  std::array<char, 32> time{};
  std::snprintf(time.data(), time.size(), "%.1f s", timeout_s);
  return rank_text(failure.rank) + ": no " + what + " in " + time.data() + " (call " + std::to_string(failure.call) +
         ", " + describe(failure.mine) + ")" + late_ranks(failure.call, progress) +
         "; is that process alive, and does it make the same calls?";
}

}  // namespace

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

std::string failure_text(const DeviceFailure& failure, const std::vector<CallProgress>& progress, double timeout_s) {
  const int world = static_cast<int>(progress.size());
  const int left = (failure.rank + world - 1) % world, right = (failure.rank + 1) % world;
  const std::string who = rank_text(failure.rank) + ": ", number = std::to_string(failure.number);
  const std::string where = " (call " + std::to_string(failure.call) + ", " + describe(failure.mine) + ", lane " +
                            std::to_string(failure.lane) + ")";
  switch (failure.kind) {
    case DeviceFailureKind::none: break;
    case DeviceFailureKind::no_segment:
      return timeout_text(failure, "segment " + number + " from " + rank_text(left), progress, timeout_s);
    case DeviceFailureKind::no_slot:
      return timeout_text(failure, "free slot for segment " + number + " at " + rank_text(right), progress, timeout_s);
    case DeviceFailureKind::mismatch:
      return "ranks disagree in call " + std::to_string(failure.call) + ": " +
             describe_difference(failure.mine, failure.rank, failure.theirs, left) +
             "; every rank has to make the same calls in the same order. Floating outputs are NaN";
    case DeviceFailureKind::corrupt: return who + "a corrupt segment header from " + rank_text(left) + where;
    case DeviceFailureKind::bad_count:
      return who + "its count on the device is " + std::to_string(failure.count) +
             "; a count is 0 or a finite number from 2**-126 to 2**53" + where;
    case DeviceFailureKind::infinite_count: return "the counts of the ranks add up to infinity" + where;
  }
  return who + "an unknown failure" + where;
}

}  // namespace ring_reduce
