// The port of one lane of a CPU rank in a direct all-reduce: what run_direct() waits for, computes and publishes.
#pragma once

#include "lane.h"

namespace ring_reduce {

class DirectPort : private Lane {
 public:
  DirectPort(Group& group, const Call& call, int lane, LaneState& state, Wait& wait);

  void post_inputs(std::uint64_t step);
  void wait_inputs(std::uint64_t step);
  void reduce(std::uint64_t step);
  void wait_results(std::uint64_t step);
  void gather(std::uint64_t step);

 private:
  bool gathers() const { return call_.fingerprint.algorithm == Algorithm::direct; }
  template <class Function>
  void for_each_other(const Function& function) const;

  // Where a rank puts its input of a chunk in the outbox of a step.
  std::byte* outbox(int rank, std::uint64_t step) const { return region(rank).input(lane_, first_input_ + step); }
  std::byte* part_in_outbox(int rank, std::uint64_t step, int chunk, const Span& span) const;
  std::uint64_t payload_bytes(std::uint64_t step, int of_rank) const;

  double total_count(int chunk) const;
  void reduce_chunk(std::uint64_t step, int chunk, std::byte* copy);

  std::uint64_t first_input_;   // number of the call's first
  std::uint64_t first_result_;  // the same
};

}  // namespace ring_reduce
