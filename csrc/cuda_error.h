// Errors of the CUDA runtime as exceptions: what was tried, and what CUDA says.
#pragma once

#include <stdexcept>
#include <string>

namespace ring_reduce {

class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `code` is a cudaError_t. Takes it off the runtime's record, so that no later call of somebody else reports it.
void check_cuda(int code, const std::string& what);

}  // namespace ring_reduce
