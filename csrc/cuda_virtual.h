// A ring of virtual ranks: all of them in one process, on one GPU, in one cooperative launch of the very kernel that
// ranks with a GPU each run. For tests and for measuring on a single card.
#pragma once

#include "cuda_link.h"
#include "error.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace ring_reduce {

struct VirtualSettings {
  int world;
  StagingShape shape;
  int window;
  double timeout_s;
  std::uint64_t first_segment;  // where the counters start
};

struct VirtualCall {
  ElementType type;
  Normalization normalization;
  double divisor;
  std::uint64_t elements;
  std::vector<std::uintptr_t> inputs;   // device memory, by rank
  std::vector<std::uintptr_t> outputs;  // the same
  std::vector<double> counts;           // by rank; empty where the normalization uses none or they are on the device
  std::uintptr_t device_counts;         // float64 on the device, by rank; 0: `counts` holds
};

class VirtualRing {
 public:
  // On the current device. Throws CudaError, std::invalid_argument where the blocks can't all be resident.
  explicit VirtualRing(const VirtualSettings& settings);
  ~VirtualRing();
  VirtualRing(const VirtualRing&) = delete;
  VirtualRing& operator=(const VirtualRing&) = delete;

  // Enqueues the call on `stream`, a cudaStream_t, behind the last one; does not wait. Throws what check() throws.
  void all_reduce(const VirtualCall& call, std::uintptr_t stream, const Disturbance& disturbance);

  // Throws RingFailure once a call has failed on the device. A call that still runs has not.
  void check() const;

  // Of the last call on rank 0; waits for the device.
  double total_count() const;

 private:
  struct Memory;
  Launch plan(const VirtualCall& call, const Disturbance& disturbance) const;

  const VirtualSettings settings_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace ring_reduce
