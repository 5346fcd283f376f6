#include "ring.h"

#include <algorithm>

namespace ring_reduce {

void LanePort::wait_posted() {
  const TraceScope scope(state_.trace, Activity::wait_posted, group_.left(), state_.received);
  wait_.until(region(rank()).posted(lane_), state_.received + 1, [this] {
    return Awaited{
        "segment " + std::to_string(state_.received) + " from rank " + std::to_string(group_.left()) + call_text(),
        group_.left(), group_.stalled_left(lane_)};
  });
}

void LanePort::wait_taken() {
  const auto depth = static_cast<std::uint64_t>(group_.settings.shape.depth);
  const TraceScope scope(state_.trace, Activity::wait_taken, group_.right(), state_.sent - depth);
  if (state_.sent < depth) return;
  wait_.until(region(rank()).taken(lane_), state_.sent + 1 - depth, [this] {
    return Awaited{"free slot for segment " + std::to_string(state_.sent) + " at rank " +
                       std::to_string(group_.right()) + call_text(),
                   group_.right(), group_.stalled_right(lane_)};
  });
}

void LanePort::take() {
  const TraceScope scope(state_.trace, Activity::take, group_.left(), state_.received);
  publish(region(group_.left()).taken(lane_), ++state_.received);
}

void LanePort::post() {
  const TraceScope scope(state_.trace, Activity::post, group_.right(), state_.sent);
  publish(region(group_.right()).posted(lane_), ++state_.sent);
}

void LanePort::move(std::uint64_t segment, int k, bool receives, bool sends) {
  Span span = segment_span(chunk_of_move(k, rank(), world()), segment);
  if (handshake_) span.elements = 0;
  const std::uint64_t payload_bytes = span.elements * element_bytes_;
  trace_step({k, chunk_of_move(k, rank(), world()), segment, payload_bytes});
  std::byte* in = receives ? region(rank()).slot(lane_, state_.received) : nullptr;
  std::byte* out = sends ? region(group_.right()).slot(lane_, state_.sent) : nullptr;

  const auto sent_as = static_cast<std::uint64_t>(k) - 1;  // left's move
  received_count_ = receives ? read_header(in, group_.left(), segment, sent_as, payload_bytes).partial_count : 0;
  partial_count_ = received_count_ + (k < world() ? call_.count : 0);  // a finished chunk carries the total
  check_total(partial_count_);
  if (!handshake_) {
    const Slots slots{receives ? Region::payload(in) : nullptr, sends ? Region::payload(out) : nullptr};
    if (k < world() - 1) reduce(span, k, slots);
    if (k == world() - 1) finish(span, k, slots);
    if (k > world() - 1) gather(span, slots);
  }
  // Fractional counts round by the order in which they are added, which differs from chunk to chunk: one for all.
  const bool finished = k >= world() - 1 && !handshake_;
  if (finished && (k == world() - 1 || chunk_of_move(k, rank(), world()) == 0)) {
    state_.total_count = partial_count_;
  }
  if (receives) state_.bytes_received += payload_bytes;
  if (sends) {
    write_header(out, segment, k, payload_bytes);
    state_.bytes_sent += payload_bytes;
    state_.header_bytes_sent += sizeof(SegmentHeader);
  }
}

// Moves before the finish: own part, added to what came from left, into the slot to right.
void LanePort::reduce(const Span& span, int k, const Slots& slots) {
  const TraceScope scope(state_.trace, Activity::reduce);
  combine_into(slots.sent, combination(mix(k, slots), slots.received, input(span), span.elements));
}

// The last receive of the reduce-scatter: the one place where the divisor enters. An all_gather starts here, with its
// own chunk as it is.
void LanePort::finish(const Span& span, int k, const Slots& slots) {
  const TraceScope scope(state_.trace, Activity::finish);
  const Mix mixed = mix(k, slots);
  Combine rest = combination(mixed, slots.received, input(span), span.elements);
  rest.divisor = divisor_of(call_.fingerprint, world(), partial_count_) * power_of_two(-mixed.exponent);

  alignas(kLineBytes) std::byte piece[kPieceBytes];
  std::byte* sent = slots.sent;
  std::byte* out = output(span);
  while (rest.elements != 0) {
    Combine part = rest;
    part.elements = std::min<std::size_t>(rest.elements, kPieceBytes / element_bytes_);
    const std::size_t bytes = part.elements * element_bytes_;
    // Not straight into the slot: its lines are in the right neighbour's cache, and loads would wait behind the stores.
    std::byte* result = call_.stream ? piece : out;
    combine_into(result, part);
    if (sent != nullptr) std::memcpy(sent, result, bytes);
    if (call_.stream) passes_.stream_copy(out, piece, bytes);
    if (rest.x != nullptr) rest.x += bytes;
    if (rest.y != nullptr) rest.y += bytes;
    if (sent != nullptr) sent += bytes;
    out += bytes;
    rest.elements -= part.elements;
  }
}

// Finished chunks travel as bits, so that every rank ends with the same ones.
void LanePort::gather(const Span& span, const Slots& slots) {
  const TraceScope scope(state_.trace, Activity::gather);
  std::byte* out = output(span);
  const std::size_t bytes = span.elements * element_bytes_;
  for (std::size_t at = 0; at < bytes; at += kPieceBytes) {
    const std::size_t piece = std::min(bytes - at, kPieceBytes);
    if (slots.sent != nullptr) std::memcpy(slots.sent + at, slots.received + at, piece);
    write_output(out + at, slots.received + at, piece);
  }
}

Mix LanePort::mix(int k, const Slots& slots) const {
  return mix_of(call_.fingerprint, k, slots.received != nullptr, received_count_, call_.count);
}

Combine LanePort::combination(const Mix& mix, const std::byte* received, const std::byte* own,
                              std::uint64_t elements) const {
  Combine what{.out = nullptr, .x = nullptr, .y = nullptr, .elements = elements};
  if (mix.with_own) {
    what.x = own;
    what.x_scale = mix.own_scale;
  }
  if (mix.with_received) {
    what.y = what.x;
    what.y_scale = what.x_scale;
    what.x = received;
    what.x_scale = mix.received_scale;
  }
  return what;
}

void LanePort::combine_into(std::byte* out, Combine what) const {
  if (what.elements == 0) return;
  if (what.x == nullptr) {  // nothing was counted
    std::memset(out, 0, what.elements * element_bytes_);
    return;
  }
  what.out = out;
  passes_.combine[static_cast<std::size_t>(call_.fingerprint.type)](what);
}

void LanePort::write_header(std::byte* slot, std::uint64_t segment, int k, std::uint64_t payload_bytes) const {
  const SegmentHeader header{call_.fingerprint, partial_count_, segment, payload_bytes, static_cast<std::uint64_t>(k)};
  std::memcpy(slot, &header, sizeof header);
}

}  // namespace ring_reduce
