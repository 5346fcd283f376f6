// The port of one lane of a CPU rank: what run_ring() waits for, moves and publishes.
#pragma once

#include "lane.h"

namespace ring_reduce {

class LanePort : private Lane {
 public:
  LanePort(Group& group, const Call& call, int lane, LaneState& state, Wait& wait)
      : Lane(group, call, lane, state, wait) {}

  void wait_posted();
  void wait_taken();
  void move(std::uint64_t segment, int k, bool receives, bool sends);
  void take();
  void post();

  // Headers only: lets a rank hear of all others before its output is written.
  void set_handshake(bool on) { handshake_ = on; }

 private:
  struct Slots {
    const std::byte* received;  // payload from left, or null
    std::byte* sent;            // payload for right, or null
  };

  void reduce(const Span& span, int k, const Slots& slots);
  void finish(const Span& span, int k, const Slots& slots);
  void gather(const Span& span, const Slots& slots);

  // received + own of move k, as the wire carries it.
  Combine combination(const Mix& mix, const std::byte* received, const std::byte* own, std::uint64_t elements) const;
  Mix mix(int k, const Slots& slots) const;
  void combine_into(std::byte* out, Combine what) const;
  void write_header(std::byte* slot, std::uint64_t segment, int k, std::uint64_t payload_bytes) const;

  bool handshake_ = false;
  double partial_count_ = 0;   // of the segment in hand, this rank included
  double received_count_ = 0;  // the same without this rank
};

}  // namespace ring_reduce
