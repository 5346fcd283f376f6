// How a call is cut for a launch. All of it follows from the arguments and agreed settings, so it is the same on all ranks.
#pragma once

#include "cuda_link.h"

#include <algorithm>

namespace ring_reduce {

// A lane is worth a block from this many bytes of a chunk on.
inline constexpr std::uint64_t kCudaLaneBytes = 16 * 1024;

// Of a wait on the device; any number of seconds is one, and the longest is some 300 years.
inline std::uint64_t timeout_ns(double seconds) {
  return static_cast<std::uint64_t>(std::min(1e10, std::max(0.0, seconds)) * 1e9);  // NaN becomes 0
}

// The launch of a call but for `arguments`, `timeout_ns` and `disturbance`; of all ranks, as virtual ones have it.
// `elements` counts the whole tensor: the input of a reduce_scatter, the output of an all_gather.
inline Launch plan_launch(const StagingShape& shape, int world, int window, Operation operation, ElementType type,
                          Normalization normalization, double divisor, std::uint64_t elements) {
  const std::uint64_t element = element_bytes(type);
  Launch launch{};
  launch.fingerprint = {0, elements, divisor, kWireVersion, operation, type, normalization, Algorithm::ring};
  launch.partition = partition_of(operation, elements, type, world);
  launch.shape = shape;
  launch.ranks = launch.world = world;
  launch.window = static_cast<std::uint64_t>(window);
  launch.lanes = static_cast<int>(std::clamp<std::uint64_t>(launch.partition.longest() * element / kCudaLaneBytes, 1,
                                                            static_cast<std::uint64_t>(shape.lanes)));
  std::uint64_t lane_elements = 0;
  for (int lane = 0; lane < launch.lanes; ++lane) {
    lane_elements = std::max(lane_elements, launch.partition.lane(0, lane, launch.lanes).elements);
  }
  launch.segment_elements = shape.segment_bytes / element;
  launch.segments = std::max<std::uint64_t>(1, (lane_elements + launch.segment_elements - 1) / launch.segment_elements);
  launch.disturbance = {0, -1};
  return launch;
}

}  // namespace ring_reduce
