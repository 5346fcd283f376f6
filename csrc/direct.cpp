#include "direct.h"

#include <algorithm>

namespace ring_reduce {

DirectPort::DirectPort(Group& group, const Call& call, int lane, LaneState& state, Wait& wait)
    : Lane(group, call, lane, state, wait), first_input_(state.inputs), first_result_(state.results) {
  state_.counts.resize(static_cast<std::size_t>(world()));
}

// From the right neighbour on, so that not all ranks read the same memory at once.
template <class Function>
void DirectPort::for_each_other(const Function& function) const {
  for (int step = 1; step < world(); ++step) function((rank() + step) % world());
}

// In one shot the tensor lies as it is; else each chunk has a part of its own, and the rank's own chunk stays at home.
std::byte* DirectPort::part_in_outbox(int rank, std::uint64_t step, int chunk, const Span& span) const {
  const std::size_t at =
      gathers() ? static_cast<std::size_t>(chunk) * group_.settings.shape.part_bytes : span.begin * element_bytes_;
  return Region::payload(outbox(rank, step)) + at;
}

std::uint64_t DirectPort::payload_bytes(std::uint64_t step, int of_rank) const {
  std::uint64_t elements = 0;
  for (int chunk = 0; chunk < world(); ++chunk) {
    if (!gathers() || chunk != of_rank) elements += segment_span(chunk, step).elements;
  }
  return elements * element_bytes_;
}

void DirectPort::post_inputs(std::uint64_t step) {
  const std::uint64_t bytes = payload_bytes(step, rank());
  trace_step({static_cast<int>(step), -1, step, bytes});
  const TraceScope scope(state_.trace, Activity::post_inputs, -1, state_.inputs);
  std::byte* box = outbox(rank(), step);
  for (int chunk = 0; chunk < world(); ++chunk) {
    const Span span = segment_span(chunk, step);
    if ((gathers() && chunk == rank()) || span.elements == 0) continue;  // no elements may have no address
    std::memcpy(part_in_outbox(rank(), step, chunk, span), input(span), span.elements * element_bytes_);
  }
  const SegmentHeader header{call_.fingerprint, call_.count, step, bytes, /*move=*/0};
  std::memcpy(box, &header, sizeof header);
  publish(region(rank()).inputs(lane_), ++state_.inputs);
  // Each part goes to the rank whose chunk it is, or, in one shot, the whole to all.
  const auto readers = static_cast<std::uint64_t>(gathers() ? 1 : world() - 1);
  state_.bytes_sent += readers * bytes;
  state_.header_bytes_sent += static_cast<std::uint64_t>(world() - 1) * sizeof header;
}

void DirectPort::wait_inputs(std::uint64_t step) {
  state_.counts[static_cast<std::size_t>(rank())] = call_.count;
  for_each_other([&](int peer) {
    const TraceScope scope(state_.trace, Activity::wait_inputs, peer, first_input_ + step);
    wait_.until(region(peer).inputs(lane_), first_input_ + step + 1, [&] {
      return Awaited{"input of step " + std::to_string(step) + " from rank " + std::to_string(peer) + call_text(), peer,
                     peer};
    });
    const std::uint64_t bytes = payload_bytes(step, peer);
    trace_step({static_cast<int>(step), -1, step, bytes});
    const SegmentHeader header = read_header(outbox(peer, step), peer, step, /*move=*/0, bytes);
    state_.counts[static_cast<std::size_t>(peer)] = header.partial_count;
    state_.bytes_received += gathers() ? segment_span(rank(), step).elements * element_bytes_ : bytes;
  });
  // Fractional counts round by the order in which they are added, which differs from chunk to chunk: one for all.
  state_.total_count = total_count(0);
  check_total(state_.total_count);
}

void DirectPort::reduce(std::uint64_t step) {
  if (!gathers()) {
    for (int chunk = 0; chunk < world(); ++chunk) reduce_chunk(step, chunk, nullptr);
    return;
  }
  reduce_chunk(step, rank(), region(rank()).result(lane_, first_result_ + step));
  const TraceScope scope(state_.trace, Activity::post_results, -1, state_.results);
  publish(region(rank()).results(lane_), ++state_.results);
  const std::uint64_t bytes = segment_span(rank(), step).elements * element_bytes_;
  state_.bytes_sent += static_cast<std::uint64_t>(world() - 1) * bytes;
}

// In the order in which the ring adds, and so to the same bits.
double DirectPort::total_count(int chunk) const {
  double total = 0;
  for (int k = 1; k <= world(); ++k) total += state_.counts[static_cast<std::size_t>((chunk + k) % world())];
  return total;
}

// The one place where the divisor enters. `copy`, unless null, gets the result too.
void DirectPort::reduce_chunk(std::uint64_t step, int chunk, std::byte* copy) {
  const Span span = segment_span(chunk, step);
  trace_step({static_cast<int>(step), chunk, step, span.elements * element_bytes_});
  const TraceScope scope(state_.trace, Activity::reduce);
  const bool counted = uses_count(call_.fingerprint.normalization);
  const bool weighted = call_.fingerprint.normalization == Normalization::weighted_mean;
  const double total = total_count(chunk);
  // Weights of at most 1, by a power of two that the divisor takes back: c * x may leave the range that the mean is in.
  const int exponent = weighted ? exponent_above(total) : 0;
  state_.addends.clear();
  state_.scales.clear();
  for (int k = 1; k <= world(); ++k) {
    const int from = (chunk + k) % world();
    const double count = state_.counts[static_cast<std::size_t>(from)];
    if (counted && count == 0) continue;  // left out, by choice and not by a product: 0 * NaN is NaN
    state_.addends.push_back(from == rank() ? input(span) : part_in_outbox(from, step, chunk, span));
    state_.scales.push_back(weighted ? count * power_of_two(-exponent) : 1.0);
  }
  AddAll sum{nullptr,
             state_.addends.data(),
             state_.scales.data(),
             state_.addends.size(),
             0,
             divisor_of(call_.fingerprint, world(), total) * power_of_two(-exponent)};
  const auto type = static_cast<std::size_t>(call_.fingerprint.type);
  const std::uint64_t bytes = span.elements * element_bytes_;
  alignas(kLineBytes) std::byte piece[kPieceBytes];
  for (std::uint64_t at = 0; at < bytes; at += kPieceBytes) {
    const std::uint64_t length = std::min<std::uint64_t>(bytes - at, kPieceBytes);
    std::byte* out = output(span) + at;
    sum.out = call_.stream ? piece : out;
    sum.elements = length / element_bytes_;
    if (sum.count == 0) {  // nothing was counted
      std::memset(sum.out, 0, length);
    } else {
      passes_.add_all[type](sum);
    }
    if (copy != nullptr) std::memcpy(copy + at, sum.out, length);
    if (call_.stream) passes_.stream_copy(out, piece, length);
    for (const std::byte*& x : state_.addends) x += length;
  }
}

void DirectPort::wait_results(std::uint64_t step) {
  for_each_other([&](int peer) {
    const TraceScope scope(state_.trace, Activity::wait_results, peer, first_result_ + step);
    trace_step({static_cast<int>(step), peer, step, segment_span(peer, step).elements * element_bytes_});
    wait_.until(region(peer).results(lane_), first_result_ + step + 1, [&] {
      return Awaited{"result of step " + std::to_string(step) + " from rank " + std::to_string(peer) + call_text(),
                     peer, peer};
    });
  });
}

// Finished chunks travel as bits, so that every rank ends with the same ones.
void DirectPort::gather(std::uint64_t step) {
  for_each_other([&](int peer) {
    const Span span = segment_span(peer, step);
    const std::uint64_t bytes = span.elements * element_bytes_;
    trace_step({static_cast<int>(step), peer, step, bytes});
    const TraceScope scope(state_.trace, Activity::gather);
    write_output(output(span), region(peer).result(lane_, first_result_ + step), bytes);
    state_.bytes_received += bytes;
  });
}

}  // namespace ring_reduce
