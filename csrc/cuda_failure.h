// What a failure on a device means, in the words of the CPU ring.
#pragma once

#include "cuda_link.h"
#include "error.h"

#include <string>
#include <vector>

namespace ring_reduce {

FailureKind failure_kind(DeviceFailureKind kind);

// `progress` by rank, for who is late.
std::string failure_text(const DeviceFailure& failure, const std::vector<CallProgress>& progress, double timeout_s);

}  // namespace ring_reduce
