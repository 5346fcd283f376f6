// What a rank's shared memory holds: one control block, then for each lane its counters and slots.
// Every rank maps every region, so all that is read here may have been written by a broken peer: it is copied first
// and checked after.
#pragma once

#include "call.h"
#include "error.h"
#include "flag.h"

#include <array>

namespace ring_reduce {

// std::atomic on shared memory, and the futex that sleeps across processes (std::atomic::wait stays within one).
struct SharedPlatform {
  using U64 = std::atomic<std::uint64_t>;
  using U32 = std::atomic<std::uint32_t>;
  static_assert(U64::is_always_lock_free && U32::is_always_lock_free);
  static void futex_wait(U64& word, std::uint64_t seen);
  static void futex_wake(U64& word);
};

using SharedCounter = Counter<SharedPlatform>;

inline constexpr std::size_t kFingerprintWords = sizeof(Fingerprint) / sizeof(std::uint64_t);

// Written by its owner, read by all; `failed_by` is written by all.
struct Control {
  // Rank + 1 of the rank whose failure ends the ring. The one in rank 0's block decides, the others repeat it.
  alignas(kLineBytes) std::atomic<std::uint32_t> failed_by;
  alignas(kLineBytes) std::atomic<std::uint64_t> started_calls;
  std::atomic<std::uint64_t> completed_calls;
  std::atomic<std::uint32_t> closed;
  // The latest call and the one before. A rank is never two calls ahead of another, so what is read stays as it is.
  alignas(kLineBytes) std::array<std::array<std::atomic<std::uint64_t>, kFingerprintWords>, 2> announced;
  // Immutable once this rank stands in a failed_by.
  alignas(kLineBytes) std::uint64_t failure_call;  // the first call that can't be completed
  // Atomic, so that a copy is one load: what is checked is what is used.
  std::atomic<std::uint32_t> failure_kind;
  std::atomic<std::uint32_t> failure_length;
  std::array<char, 2048> failure_text;
};

// A slot is a header on a line of its own, then the payload.
struct RegionShape {
  int lanes;
  int depth;
  std::size_t segment_bytes;  // a multiple of kLineBytes
  int world;
  std::size_t part_bytes;  // of a chunk, in a step of the direct all-reduce; a multiple of kLineBytes

  std::size_t slot_bytes() const { return kLineBytes + segment_bytes; }
  std::size_t input_bytes() const { return static_cast<std::size_t>(world) * part_bytes; }
  std::size_t inputs_offset() const { return kCounters * sizeof(SharedCounter) + slots() * slot_bytes(); }
  std::size_t results_offset() const { return inputs_offset() + kOutboxes * (kLineBytes + input_bytes()); }
  std::size_t lane_bytes() const { return results_offset() + kOutboxes * part_bytes; }
  std::size_t lane_offset(int lane) const { return kControlBytes + static_cast<std::size_t>(lane) * lane_bytes(); }
  std::size_t bytes() const { return lane_offset(lanes); }

  static constexpr std::size_t kControlBytes = 4096;
  static constexpr std::size_t kCounters = 4;
  static constexpr std::size_t kOutboxes = 2;  // see direct_schedule.h

 private:
  std::size_t slots() const { return static_cast<std::size_t>(depth); }
};
static_assert(sizeof(Control) <= RegionShape::kControlBytes);

class Region {
 public:
  Region(std::byte* base, const RegionShape& shape) : base_(base), shape_(shape) {}

  Control& control() const { return *reinterpret_cast<Control*>(base_); }

  // Segments that left has written into this region; polled by the owner.
  SharedCounter& posted(int lane) const { return counters(lane)[0]; }

  // Segments of the owner that right has consumed; polled by the owner.
  SharedCounter& taken(int lane) const { return counters(lane)[1]; }

  // Inputs and results that the owner has written into its outboxes; polled by all others.
  SharedCounter& inputs(int lane) const { return counters(lane)[2]; }
  SharedCounter& results(int lane) const { return counters(lane)[3]; }

  std::byte* slot(int lane, std::uint64_t number) const {
    const std::uint64_t index = number % static_cast<std::uint64_t>(shape_.depth);
    return reinterpret_cast<std::byte*>(counters(lane) + RegionShape::kCounters) + index * shape_.slot_bytes();
  }
  static std::byte* payload(std::byte* slot) { return slot + kLineBytes; }

  // A slot, like those of the link.
  std::byte* input(int lane, std::uint64_t number) const {
    const std::uint64_t index = number % RegionShape::kOutboxes;
    return this->lane(lane) + shape_.inputs_offset() + index * (kLineBytes + shape_.input_bytes());
  }

  // A payload without a header: the inputs that it is made of had one.
  std::byte* result(int lane, std::uint64_t number) const {
    return this->lane(lane) + shape_.results_offset() + number % RegionShape::kOutboxes * shape_.part_bytes;
  }

 private:
  std::byte* lane(int lane) const { return base_ + shape_.lane_offset(lane); }
  SharedCounter* counters(int lane) const { return reinterpret_cast<SharedCounter*>(this->lane(lane)); }

  std::byte* base_;
  RegionShape shape_;
};

}  // namespace ring_reduce
