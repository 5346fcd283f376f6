#include "lane.h"

#include <algorithm>
#include <cmath>

namespace ring_reduce {

Lane::Lane(Group& group, const Call& call, int number, LaneState& state, Wait& wait)
    : group_(group),
      call_(call),
      lane_(number),
      state_(state),
      wait_(wait),
      passes_(passes()),
      element_bytes_(element_bytes(call.fingerprint.type)) {}

const std::byte* Lane::input(const Span& span) const {
  return call_.input + (span.begin - call_.input_begin) * element_bytes_;
}

std::byte* Lane::output(const Span& span) const {
  return call_.output + (span.begin - call_.output_begin) * element_bytes_;
}

void Lane::write_output(std::byte* out, const std::byte* in, std::size_t bytes) const {
  if (bytes == 0) return;  // no elements may have no address
  if (call_.stream) {
    passes_.stream_copy(out, in, bytes);
  } else {
    std::memcpy(out, in, bytes);
  }
}

Span Lane::segment_span(int chunk, std::uint64_t segment) const {
  const Span whole = call_.partition.lane(chunk, lane_, call_.lanes);
  const std::uint64_t begin = std::min(segment * call_.segment_elements, whole.elements);
  const std::uint64_t elements = std::min(call_.segment_elements, whole.elements - begin);
  return {whole.begin + begin, elements};
}

// Copied before it is checked: the other end may be broken.
SegmentHeader Lane::read_header(const std::byte* slot, int from, std::uint64_t segment, std::uint64_t move,
                                std::uint64_t payload_bytes) {
  SegmentHeader header;
  std::memcpy(&header, slot, sizeof header);
  const Fingerprint& mine = call_.fingerprint;
  if (!(header.fingerprint == mine)) {
    throw group_.fail(FailureKind::mismatch, mine.call, mismatch_text(mine, rank(), header.fingerprint, from));
  }
  const bool in_step = header.segment == segment && header.move == move && header.payload_bytes == payload_bytes;
  if (!in_step || !(header.partial_count >= 0 && std::isfinite(header.partial_count))) {
    throw group_.fail(FailureKind::mismatch, mine.call,
                      "rank " + std::to_string(rank()) + " got a corrupt segment header from rank " +
                          std::to_string(from) + " in call " + std::to_string(mine.call));
  }
  return header;
}

void Lane::check_total(double count) {
  if (std::isfinite(count)) return;
  throw group_.fail(FailureKind::aborted, call_.fingerprint.call, "the counts of the ranks add up to infinity");
}

std::string Lane::call_text() const {
  return " (call " + std::to_string(call_.fingerprint.call) + ", " + describe(call_.fingerprint) + ")";
}

}  // namespace ring_reduce
