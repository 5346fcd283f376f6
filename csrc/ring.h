// The port of one lane of a CPU rank: what run_ring() waits for, moves and publishes.
#pragma once

#include "partition.h"
#include "passes.h"
#include "wait.h"

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
  std::uint64_t segment_elements;
  std::uint64_t segments;
  bool stream;  // write outputs past the caches
};

// What outlives a call. The counters start where the last call left them.
struct alignas(kLineBytes) LaneState {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t header_bytes_sent = 0;
  double seconds_waiting = 0;
  double total_count = 0;  // of the last call
};

class LanePort {
 public:
  LanePort(Group& group, const Call& call, int lane, LaneState& state, Wait& wait);

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

  Span segment_span(int chunk, std::uint64_t segment) const;
  // The part of chunk `span` in the caller's tensors.
  const std::byte* input(const Span& span) const;
  std::byte* output(const Span& span) const;

  // received + own of move k, as the wire carries it, times 2^-exponent.
  struct Mix {
    Combine combine;
    int exponent;
  };
  Mix mix(int k, const std::byte* received, const std::byte* own, std::uint64_t elements) const;
  double divisor() const;
  std::string call_text() const;
  void combine_into(std::byte* out, Combine what) const;
  void write_output(std::byte* out, const std::byte* in, std::size_t bytes) const;
  double read_header(const std::byte* slot, std::uint64_t segment, int k, std::uint64_t payload_bytes);
  void write_header(std::byte* slot, std::uint64_t segment, int k, std::uint64_t payload_bytes) const;

  Group& group_;
  const Call& call_;
  int lane_;
  LaneState& state_;
  Wait& wait_;
  const Passes& passes_;
  std::size_t element_bytes_;
  bool handshake_ = false;
  double partial_count_ = 0;   // of the segment in hand, this rank included
  double received_count_ = 0;  // the same without this rank
};

}  // namespace ring_reduce
