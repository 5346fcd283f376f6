// The partition of csrc/partition.h under the moves of run_ring(), for every world up to 16: each element is in one
// segment of one lane of one chunk, and a rank pushes as much as the formula says.
// Prints what is wrong; exits with 1 then.
#include "partition.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

using namespace ring_reduce;

namespace {

constexpr std::uint64_t kSegmentElements = 8;

int failures = 0;

void expect(bool right, const std::string& what) {
  if (!right && ++failures <= 20) std::printf("wrong: %s\n", what.c_str());
}

// Calls move(k, sends, span) for each move of a rank in a lane, with segments cut as csrc/ring.cpp does.
template <class Move>
struct Port {
  const Partition& partition;
  int rank, lane, lanes;
  Move on_move;

  void wait_posted() {}
  void wait_taken() {}
  void take() {}
  void post() {}
  void move(std::uint64_t segment, int k, bool, bool sends) {
    const int chunk = chunk_of_move(k, rank, static_cast<int>(partition.world));
    const Span whole = partition.lane(chunk, lane, lanes);
    const std::uint64_t begin = std::min(segment * kSegmentElements, whole.elements);
    on_move(k, sends, Span{whole.begin + begin, std::min(kSegmentElements, whole.elements - begin)});
  }
};

void check_rank(const Partition& partition, int rank, int lanes, const std::string& where) {
  const int world = static_cast<int>(partition.world);
  std::uint64_t pushed = 0;
  std::vector<int> written(partition.elements);
  const auto on_move = [&](int k, bool sends, const Span& span) {
    if (sends) pushed += span.elements;
    if (k < world - 1) return;
    for (std::uint64_t i = 0; i < span.elements; ++i) ++written.at(span.begin + i);
  };
  for (int lane = 0; lane < lanes; ++lane) {
    Port<decltype(on_move)> port{partition, rank, lane, lanes, on_move};
    run_ring(port, all_reduce_moves(world), partition.longest() / kSegmentElements + 1, 1);
  }
  // Each chunk twice, but the own one and right's once: those arrive finished, or are finished there.
  const std::uint64_t own = partition.chunk(rank).elements, next = partition.chunk((rank + 1) % world).elements;
  expect(pushed == 2 * partition.elements - own - next, "payload" + where);
  expect(std::all_of(written.begin(), written.end(), [](int n) { return n == 1; }), "an element's writes" + where);
}

// Chunks follow one another without a gap or an overlap, whether equal or cut at packs; none is longer than chunk 0.
void check_chunks(const Partition& partition, const std::string& where) {
  std::uint64_t next = 0;
  for (int rank = 0; rank < static_cast<int>(partition.world); ++rank) {
    const Span chunk = partition.chunk(rank);
    expect(chunk.elements == 0 || chunk.begin == next, "begin of chunk " + std::to_string(rank) + where);
    expect(chunk.elements <= partition.longest(), "length of chunk " + std::to_string(rank) + where);
    next += chunk.elements;
  }
  expect(next == partition.elements, "sum of the chunks" + where);
}

void check(std::uint64_t elements, ElementType type, int world) {
  const std::string where = " of " + std::to_string(elements) + " elements of " + std::to_string(element_bytes(type)) +
                            " bytes, world " + std::to_string(world);
  const Partition partition = partition_of(Operation::all_reduce, elements, type, world);
  check_chunks(partition, where);
  for (int rank = 0; rank < world; ++rank) {
    for (int lanes = 1; lanes <= 3; ++lanes) {
      check_rank(partition, rank, lanes, where + ", rank " + std::to_string(rank) + ", lanes " + std::to_string(lanes));
    }
  }
  if (elements % static_cast<std::uint64_t>(world) != 0) return;
  check_chunks(partition_of(Operation::reduce_scatter, elements, type, world), where + ", equal chunks");
}

}  // namespace

int main() {
  for (const ElementType type : {ElementType::float64, ElementType::float32, ElementType::float16}) {
    for (int world = 1; world <= 16; ++world) {
      for (std::uint64_t elements = 0; elements <= 70; ++elements) check(elements, type, world);
      for (const std::uint64_t elements : {128, 240, 257, 1021, 4096}) check(elements, type, world);
    }
  }
  std::printf("%d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
