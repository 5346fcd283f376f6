// Which elements are whose: chunks of a rank, ranges of a lane, spans of a segment.
// The chunks depend on the element count, the dtype and the world alone, and so do the bits of the result.
#pragma once

#include "call.h"

namespace ring_reduce {

struct Span {
  std::uint64_t begin;
  std::uint64_t elements;
};

struct Partition {
  std::uint64_t elements;
  std::uint64_t pack;  // elements a pack
  std::uint64_t world;
  std::uint64_t equal;  // elements a chunk where all are equal (reduce_scatter, all_gather); 0: cut at packs

  RING_REDUCE_PORTABLE Span chunk(int rank) const {
    const auto r = static_cast<std::uint64_t>(rank);
    if (equal != 0) return {r * equal, equal};
    const std::uint64_t packs = (elements + pack - 1) / pack;
    const std::uint64_t base = packs / world, longer = packs % world;  // the first `longer` chunks have one pack more
    const std::uint64_t first = r * base + (r < longer ? r : longer);
    return clip(first * pack, (base + (r < longer ? 1 : 0)) * pack, elements);
  }

  // The part of chunk `rank` that `lane` of `lanes` takes: whole packs, counted from the start of the chunk.
  RING_REDUCE_PORTABLE Span lane(int rank, int lane, int lanes) const {
    const Span c = chunk(rank);
    const std::uint64_t packs = (c.elements + pack - 1) / pack;
    const std::uint64_t from = packs * static_cast<std::uint64_t>(lane) / static_cast<std::uint64_t>(lanes);
    const std::uint64_t to = packs * static_cast<std::uint64_t>(lane + 1) / static_cast<std::uint64_t>(lanes);
    const Span within = clip(from * pack, (to - from) * pack, c.elements);
    return {c.begin + within.begin, within.elements};
  }

  // Elements of the longest chunk: chunk 0 is never shorter than another.
  RING_REDUCE_PORTABLE std::uint64_t longest() const { return chunk(0).elements; }

 private:
  RING_REDUCE_PORTABLE static Span clip(std::uint64_t begin, std::uint64_t length, std::uint64_t end) {
    if (begin >= end) return {end, 0};
    return {begin, length < end - begin ? length : end - begin};
  }
};

// `elements` counts the whole tensor: the input of a reduce_scatter, the output of an all_gather.
RING_REDUCE_PORTABLE constexpr Partition partition_of(Operation operation, std::uint64_t elements, ElementType type,
                                                      int world) {
  const auto n = static_cast<std::uint64_t>(world);
  const std::uint64_t equal = operation == Operation::all_reduce ? 0 : elements / n;
  return {elements, kPackBytes / element_bytes(type), n, equal};
}

}  // namespace ring_reduce
