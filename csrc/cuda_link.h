// What a rank's staging memory on a GPU holds, and what a launch of the ring's kernel is told.
#pragma once

#include "partition.h"

namespace ring_reduce {

// For each lane two counters, then `depth` slots; a slot is a header on a line of its own, then the payload.
struct StagingShape {
  int lanes;
  int depth;
  std::size_t segment_bytes;  // a multiple of kLineBytes

  RING_REDUCE_PORTABLE std::size_t slot_bytes() const { return kLineBytes + segment_bytes; }
  RING_REDUCE_PORTABLE std::size_t lane_bytes() const {
    return 2 * kLineBytes + static_cast<std::size_t>(depth) * slot_bytes();
  }
  RING_REDUCE_PORTABLE std::size_t bytes() const { return static_cast<std::size_t>(lanes) * lane_bytes(); }
};

// One lane's part of the staging memory of a rank.
class LaneLink {
 public:
  RING_REDUCE_PORTABLE LaneLink(std::byte* staging, const StagingShape& shape, int lane)
      : base_(staging + static_cast<std::size_t>(lane) * shape.lane_bytes()),
        slot_bytes_(shape.slot_bytes()),
        depth_(static_cast<unsigned>(shape.depth)) {}

  // Segments that left has written here; polled by the owner.
  RING_REDUCE_PORTABLE std::uint64_t* posted() const { return reinterpret_cast<std::uint64_t*>(base_); }

  // Segments of the owner that right has consumed; polled by the owner.
  RING_REDUCE_PORTABLE std::uint64_t* taken() const { return reinterpret_cast<std::uint64_t*>(base_ + kLineBytes); }

  RING_REDUCE_PORTABLE std::byte* slot(std::uint64_t number) const {
    return base_ + 2 * kLineBytes + number % depth_ * slot_bytes_;
  }
  RING_REDUCE_PORTABLE static std::byte* payload(std::byte* slot) { return slot + kLineBytes; }

 private:
  std::byte* base_;
  std::size_t slot_bytes_;
  unsigned depth_;
};

// The staging memory of three ranks, as this one reaches it: all that differs between virtual ranks and CUDA IPC.
struct Links {
  std::byte* own;
  std::byte* left;
  std::byte* right;
};

// What outlives a call, in device memory, so that a captured graph goes on where the last call stopped.
struct LaneCounters {
  std::uint64_t sent;
  std::uint64_t received;
};
struct RankState {
  std::uint64_t calls;           // completed
  std::uint64_t finished_lanes;  // of the call that runs
  std::uint64_t failed_lanes;    // of all calls: a ring that has failed completes none any more
};

// How far a rank has come, in host memory that the device writes: the host knows of no replay of a graph.
struct CallProgress {
  std::uint64_t started;    // number of the latest call
  std::uint64_t completed;  // of the latest that did not fail
  double total_count;       // of the latest that had counts
};

enum class DeviceFailureKind : std::uint32_t {
  none,
  no_segment,
  no_slot,
  mismatch,
  corrupt,
  bad_count,
  infinite_count
};

// How a call failed on the device; in host memory that the device writes. The first to claim it fills it in.
struct DeviceFailure {
  std::uint64_t raised;  // published last
  std::uint64_t claims;
  DeviceFailureKind kind;
  int rank;
  int lane;
  std::uint64_t call;
  std::uint64_t number;  // of the segment waited for
  double count;          // of bad_count
  Fingerprint mine;      // of mismatch
  Fingerprint theirs;
};

inline constexpr int kMaxVirtualRanks = 16;

struct RankArguments {
  Links links;
  RankState* state;
  LaneCounters* counters;  // by lane
  CallProgress* progress;
  DeviceFailure* failure;  // of this rank, or of all where they share a GPU's launch
  std::uint64_t* stop;     // in host memory: the first call that no rank may go on with, 1 after a failure; 0: none
  const std::byte* input;
  std::byte* output;
  const double* device_count;  // where the count is read; null: it is `count`
  double count;                // 1 where the normalization does not use it
};

// For tests: what a launch gets wrong on purpose.
struct Disturbance {
  std::uint32_t delay_seed;  // 0: none; else blocks sleep up to 2 us, by chance, before they wait
  int absent_rank;           // does not take part; -1: none
};

// One launch: `ranks` ranks from `first_rank` on, each of `lanes` blocks.
struct Launch {
  RankArguments arguments[kMaxVirtualRanks];
  Fingerprint fingerprint;  // `call` is filled in from the device's own count
  Partition partition;
  StagingShape shape;
  int first_rank;
  int ranks;
  int world;
  int lanes;
  std::uint64_t window;
  std::uint64_t segment_elements;
  std::uint64_t segments;
  std::uint64_t timeout_ns;  // of a wait without progress
  Disturbance disturbance;
};

}  // namespace ring_reduce
