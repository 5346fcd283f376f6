// A collective call as all ranks must make it, and the header that carries it along with each segment.
#pragma once

#include "element.h"
#include "ring_schedule.h"

#include <cstring>
#include <string>

namespace ring_reduce {

enum class Operation : std::uint8_t { all_reduce, reduce_scatter, all_gather };

RING_REDUCE_PORTABLE constexpr MoveRange moves_of(Operation operation, int world) {
  switch (operation) {
    case Operation::all_reduce: return all_reduce_moves(world);
    case Operation::reduce_scatter: return reduce_scatter_moves(world);
    case Operation::all_gather: return all_gather_moves(world);
  }
  return {0, 0};
}

// Numbered as ring_reduce.normalization.Kind.
enum class Normalization : std::uint8_t { sum, mean, divide_by, divide_by_count, weighted_mean };

// How the ranks exchange what they reduce. Float32 and float64 come out alike (a weighted mean where nothing
// underflows); 16-bit floats are rounded at every hop of the ring, and once by the others.
enum class Algorithm : std::uint8_t {
  ring,
  direct,    // every rank reduces its chunk from all others' memory, and all copy the results
  one_shot,  // every rank reduces the whole tensor from all others' memory
};

inline constexpr std::uint32_t kWireVersion = 2;

// What all ranks must agree on. Compared byte by byte, so it has no padding.
struct Fingerprint {
  std::uint64_t call;  // how many calls this ring has made, this one included
  std::uint64_t elements;
  double divisor;  // of divide_by; 1 otherwise
  std::uint32_t wire_version;
  Operation operation;
  ElementType type;
  Normalization normalization;
  Algorithm algorithm;

  bool operator==(const Fingerprint& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
};
static_assert(sizeof(Fingerprint) == 32);

struct SegmentHeader {
  Fingerprint fingerprint;
  double partial_count;  // sum of the counts of the ranks whose data is in the segment (reduce-scatter moves)
  std::uint64_t segment;
  std::uint64_t payload_bytes;
  std::uint64_t move;  // of the sender
};
static_assert(sizeof(SegmentHeader) == 64);

RING_REDUCE_PORTABLE constexpr bool uses_count(Normalization normalization) {
  return normalization == Normalization::divide_by_count || normalization == Normalization::weighted_mean;
}

// "all_reduce of 1000 float32, MEAN"
std::string describe(const Fingerprint& call);

// Names the first difference: "element count is 1000 on rank 2 and 1001 on rank 1"
std::string describe_difference(const Fingerprint& mine, int my_rank, const Fingerprint& theirs, int their_rank);

// The whole text of a RingMismatch.
std::string mismatch_text(const Fingerprint& mine, int my_rank, const Fingerprint& theirs, int their_rank);

}  // namespace ring_reduce
