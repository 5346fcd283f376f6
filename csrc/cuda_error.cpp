#include "cuda_error.h"

#include <cuda_runtime.h>

namespace ring_reduce {

void check_cuda(int code, const std::string& what) {
  const auto error = static_cast<cudaError_t>(code);
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw CudaError(what + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

}  // namespace ring_reduce
