// One lane of a rank in a call: what the ports of the ring and of the direct all-reduce have in common.
#pragma once

#include "partition.h"
#include "passes.h"
#include "scaling.h"
#include "trace.h"
#include "wait.h"

#include <vector>

namespace ring_reduce {

// One call, as the lanes of this rank see it.
struct Call {
  Fingerprint fingerprint;
  const std::byte* input;
  std::byte* output;
  double count;  // of this rank; 1 where the normalization does not use it

  Partition partition;
  std::uint64_t input_begin;   // element of the whole tensor that input[0] is
  std::uint64_t output_begin;  // the same of output[0]
  int lanes;
  std::uint64_t segment_elements;  // of a chunk in a step of the direct all-reduce
  std::uint64_t segments;          // its steps
  bool stream;                     // write outputs past the caches
};

// What outlives a call. The counters start where the last call left them.
struct alignas(kLineBytes) LaneState {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  std::uint64_t inputs = 0;   // put into this rank's outboxes, and so into any other's
  std::uint64_t results = 0;  // the same
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t header_bytes_sent = 0;
  double seconds_waiting = 0;
  double total_count = 0;      // of the last call
  LaneTrace* trace = nullptr;  // while it is recorded
  // Of the direct all-reduce; here, so that a call allocates nothing.
  std::vector<double> counts = {};  // by rank
  // Of a chunk, in the order of the ring's sum; ranks without a count left out.
  std::vector<const std::byte*> addends = {};
  std::vector<double> scales = {};
};

// Where the ports of a lane read and write the caller's tensors, and how they tell one call from another.
class Lane {
 protected:
  Lane(Group& group, const Call& call, int number, LaneState& state, Wait& wait);

  int rank() const { return group_.settings.rank; }
  int world() const { return group_.settings.world; }
  const Region& region(int rank) const { return group_.region(rank); }

  // The part of the caller's tensors that `span` is.
  const std::byte* input(const Span& span) const;
  std::byte* output(const Span& span) const;
  void write_output(std::byte* out, const std::byte* in, std::size_t bytes) const;

  // Segment `segment` of this lane's part of a chunk.
  Span segment_span(int chunk, std::uint64_t segment) const;

  // A header that `from` has written, checked. Throws RingFailure where that rank makes another call.
  SegmentHeader read_header(const std::byte* slot, int from, std::uint64_t segment, std::uint64_t move,
                            std::uint64_t payload_bytes);
  // Throws RingFailure where `count` is not finite.
  void check_total(double count);

  // Tells a trace where the lane is.
  void trace_step(const TraceStep& step) const {
    if (state_.trace != nullptr) state_.trace->set_step(step);
  }

  // " (call 8, all_reduce of 1000 float32, MEAN)"
  std::string call_text() const;

  Group& group_;
  const Call& call_;
  int lane_;
  LaneState& state_;
  Wait& wait_;
  const Passes& passes_;
  std::size_t element_bytes_;
};

// What goes to two places goes piece by piece, so that the second copy reads the L1 cache.
inline constexpr std::size_t kPieceBytes = 16384;

}  // namespace ring_reduce
