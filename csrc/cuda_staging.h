// A rank's memory on its GPU, which its neighbours reach by CUDA IPC: the rank's own, and a neighbour's.
#pragma once

#include "cuda_link.h"

#include <string>

namespace ring_reduce {

// Throws std::invalid_argument unless segments are whole lines and 1 <= window < depth.
void check_shape(const StagingShape& shape, int window);

// What a neighbour needs to know of a rank's memory.
struct StagingPart {
  std::string handle;    // the bytes of a cudaIpcMemHandle_t
  std::uint64_t offset;  // of the staging memory in the allocation that the handle names
  std::string uuid;      // of the GPU
};

// One allocation of our own, so that it does not matter how the caller's tensors were allocated: the state of the rank,
// the counters of its lanes, and the staging memory.
class Staging {
 public:
  // On the current device, `device`; holds anything until start(). Throws CudaError.
  Staging(const StagingShape& shape, int device);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  RankState* state() const { return reinterpret_cast<RankState*>(allocation_); }
  LaneCounters* counters() const { return reinterpret_cast<LaneCounters*>(allocation_ + kLineBytes); }
  std::byte* slots() const;

  StagingPart part() const;

  // As it is before the first call, whose segments are counted from `first_segment` on. Waits for the device.
  void start(std::uint64_t first_segment);

 private:
  std::size_t slots_offset() const;

  const StagingShape shape_;
  const int device_;
  std::byte* allocation_ = nullptr;
};

// A neighbour's staging memory, mapped here.
class PeerStaging {
 public:
  // On the current device. `what` names whose it is, for errors. Throws CudaError.
  PeerStaging(const StagingPart& part, const std::string& what);
  ~PeerStaging();
  PeerStaging(const PeerStaging&) = delete;
  PeerStaging& operator=(const PeerStaging&) = delete;

  std::byte* slots() const;

 private:
  std::byte* allocation_ = nullptr;
  const std::uint64_t offset_;
};

// That two ranks reach each other is proved, since cudaDeviceCanAccessPeer may say so wrongly: each writes a pattern
// where it will write in calls, into slots to its right and to the line of a counter on its left.
enum class Side { left, right };

struct Proof {
  std::uint64_t token;  // of the ring, so that a mapping of an earlier one proves nothing
  int writer;           // the rank
};

// Writes it into the staging memory of the neighbour on that side and reads it back. Throws CudaError.
void write_proof(std::byte* slots, const StagingShape& shape, Side side, const Proof& proof, const std::string& what);

// The writer's neighbour: whether it is there. `side` as in write_proof(). Throws CudaError.
void check_proof(std::byte* slots, const StagingShape& shape, Side side, const Proof& proof, const std::string& what);

}  // namespace ring_reduce
