#include "ring.h"

#include <algorithm>
#include <cmath>

namespace ring_reduce {

namespace {

// What goes to two places goes piece by piece, so that the second copy reads the L1 cache.
constexpr std::size_t kPieceBytes = 16384;

// ceil(log2 x), exactly; 0 for 0.
int exponent_above(double x) {
  if (!(x > 0)) return 0;
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);  // in [0.5, 1)
  return mantissa == 0.5 ? exponent - 1 : exponent;
}

// Whether the wire carries partial * 2^-exponent_above(K), so that it overflows only where the result does.
bool wire_is_scaled(const Fingerprint& call) {
  if (call.normalization == Normalization::weighted_mean) return true;
  return call.type == ElementType::float16 && call.normalization != Normalization::sum;
}

}  // namespace

LanePort::LanePort(Group& group, const Call& call, int lane, LaneState& state, Wait& wait)
    : group_(group),
      call_(call),
      lane_(lane),
      state_(state),
      wait_(wait),
      passes_(passes()),
      element_bytes_(element_bytes(call.fingerprint.type)) {}

void LanePort::wait_posted() {
  wait_.until(group_.region(group_.settings.rank).posted(lane_), state_.received + 1, [this] {
    return Awaited{
        "segment " + std::to_string(state_.received) + " from rank " + std::to_string(group_.left()) + call_text(),
        group_.left(), group_.stalled_left(lane_)};
  });
}

void LanePort::wait_taken() {
  const auto depth = static_cast<std::uint64_t>(group_.settings.shape.depth);
  if (state_.sent < depth) return;
  wait_.until(group_.region(group_.settings.rank).taken(lane_), state_.sent + 1 - depth, [this] {
    return Awaited{"free slot for segment " + std::to_string(state_.sent) + " at rank " +
                       std::to_string(group_.right()) + call_text(),
                   group_.right(), group_.stalled_right(lane_)};
  });
}

std::string LanePort::call_text() const {
  return " (call " + std::to_string(call_.fingerprint.call) + ", " + describe(call_.fingerprint) + ")";
}

void LanePort::take() { publish(group_.region(group_.left()).taken(lane_), ++state_.received); }

void LanePort::post() { publish(group_.region(group_.right()).posted(lane_), ++state_.sent); }

void LanePort::move(std::uint64_t segment, int k, bool receives, bool sends) {
  const int world = group_.settings.world;
  const Span span = segment_span(chunk_of_move(k, group_.settings.rank, world), segment);
  const std::uint64_t payload_bytes = span.elements * element_bytes_;
  std::byte* in = receives ? group_.region(group_.settings.rank).slot(lane_, state_.received) : nullptr;
  std::byte* out = sends ? group_.region(group_.right()).slot(lane_, state_.sent) : nullptr;

  received_count_ = receives ? read_header(in, segment, k, payload_bytes) : 0;
  partial_count_ = received_count_ + (k < world ? call_.count : 0);  // a finished chunk carries the total
  if (!std::isfinite(partial_count_)) {
    throw group_.fail(FailureKind::aborted, call_.fingerprint.call, "the counts of the ranks add up to infinity");
  }
  if (!handshake_) {
    const Slots slots{receives ? Region::payload(in) : nullptr, sends ? Region::payload(out) : nullptr};
    if (k < world - 1) reduce(span, k, slots);
    if (k == world - 1) finish(span, k, slots);
    if (k > world - 1) gather(span, slots);
  }
  // Fractional counts round by the order in which they are added, which differs from chunk to chunk: one for all.
  const bool finished = k >= world - 1 && !handshake_;
  if (finished && (k == world - 1 || chunk_of_move(k, group_.settings.rank, world) == 0)) {
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
  combine_into(slots.sent, mix(k, slots.received, input(span), span.elements).combine);
}

// The last receive of the reduce-scatter: the one place where the divisor enters. An all_gather starts here, with its
// own chunk as it is.
void LanePort::finish(const Span& span, int k, const Slots& slots) {
  const Mix mixed = mix(k, slots.received, input(span), span.elements);
  Combine rest = mixed.combine;
  rest.divisor = std::ldexp(divisor(), -mixed.exponent);

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
  std::byte* out = output(span);
  const std::size_t bytes = span.elements * element_bytes_;
  for (std::size_t at = 0; at < bytes; at += kPieceBytes) {
    const std::size_t piece = std::min(bytes - at, kPieceBytes);
    if (slots.sent != nullptr) std::memcpy(slots.sent + at, slots.received + at, piece);
    write_output(out + at, slots.received + at, piece);
  }
}

Span LanePort::segment_span(int chunk, std::uint64_t segment) const {
  const Span whole = call_.partition.lane(chunk, lane_, call_.lanes);
  const std::uint64_t begin = std::min(segment * call_.segment_elements, whole.elements);
  const std::uint64_t elements = std::min(call_.segment_elements, whole.elements - begin);
  return {whole.begin + begin, handshake_ ? 0 : elements};
}

const std::byte* LanePort::input(const Span& span) const {
  return call_.input + (span.begin - call_.input_begin) * element_bytes_;
}

std::byte* LanePort::output(const Span& span) const {
  return call_.output + (span.begin - call_.output_begin) * element_bytes_;
}

LanePort::Mix LanePort::mix(int k, const std::byte* received, const std::byte* own, std::uint64_t elements) const {
  const Fingerprint& call = call_.fingerprint;
  Combine what{.out = nullptr, .x = received, .y = own, .elements = elements};
  int exponent = 0;
  if (wire_is_scaled(call)) {
    const bool weighted = call.normalization == Normalization::weighted_mean;
    exponent = exponent_above(weighted ? partial_count_ : k + 1);
    what.x_scale = std::ldexp(1.0, exponent_above(weighted ? received_count_ : k) - exponent);
    what.y_scale = std::ldexp(weighted ? call_.count : 1.0, -exponent);
  }
  // A count of 0 leaves the data out, by choice and not by a product: 0 * NaN is NaN.
  const bool counted = uses_count(call.normalization);
  if (counted && received_count_ == 0) what.x = nullptr;
  if (counted && call_.count == 0) what.y = nullptr;
  if (what.x == nullptr) {
    what.x = what.y;
    what.x_scale = what.y_scale;
    what.y = nullptr;
  }
  return {what, exponent};
}

double LanePort::divisor() const {
  switch (call_.fingerprint.normalization) {
    case Normalization::sum: return 1.0;
    case Normalization::mean: return group_.settings.world;
    case Normalization::divide_by: return call_.fingerprint.divisor;
    case Normalization::divide_by_count:
    case Normalization::weighted_mean: return partial_count_;
  }
  return 1.0;
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

void LanePort::write_output(std::byte* out, const std::byte* in, std::size_t bytes) const {
  if (call_.stream) {
    passes_.stream_copy(out, in, bytes);
  } else {
    std::memcpy(out, in, bytes);
  }
}

// Returns the count that the segment carries. Copied before it is checked: the other end may be broken.
double LanePort::read_header(const std::byte* slot, std::uint64_t segment, int k, std::uint64_t payload_bytes) {
  SegmentHeader header;
  std::memcpy(&header, slot, sizeof header);
  const int rank = group_.settings.rank;
  const auto where = [this] { return " in call " + std::to_string(call_.fingerprint.call); };
  if (!(header.fingerprint == call_.fingerprint)) {
    throw group_.fail(FailureKind::mismatch, call_.fingerprint.call,
                      "ranks disagree" + where() + ": " +
                          describe_difference(call_.fingerprint, rank, header.fingerprint, group_.left()) + " (rank " +
                          std::to_string(rank) + ": " + describe(call_.fingerprint) + "; rank " +
                          std::to_string(group_.left()) + ": " + describe(header.fingerprint) +
                          "); every rank has to make the same calls in the same order. No tensor was changed");
  }
  const bool in_step = header.segment == segment && header.move + 1 == static_cast<std::uint64_t>(k) &&
                       header.payload_bytes == payload_bytes;
  if (!in_step || !(header.partial_count >= 0 && std::isfinite(header.partial_count))) {
    throw group_.fail(FailureKind::mismatch, call_.fingerprint.call,
                      "rank " + std::to_string(rank) + " got a corrupt segment header from rank " +
                          std::to_string(group_.left()) + where());
  }
  return header.partial_count;
}

void LanePort::write_header(std::byte* slot, std::uint64_t segment, int k, std::uint64_t payload_bytes) const {
  const SegmentHeader header{call_.fingerprint, partial_count_, segment, payload_bytes, static_cast<std::uint64_t>(k)};
  std::memcpy(slot, &header, sizeof header);
}

}  // namespace ring_reduce
