// Calls of one ring follow one another, on whatever streams they are.
#pragma once

#include <cuda_runtime.h>

namespace ring_reduce {

// They share slots and counters: one begins when the one before it has ended. A call that is captured in a graph waits
// for those before it in that capture; what replays the graph orders it against others. Of one device.
class CallChain {
 public:
  CallChain();  // throws CudaError
  ~CallChain();
  CallChain(const CallChain&) = delete;
  CallChain& operator=(const CallChain&) = delete;

  // Makes `stream` wait for the last call.
  void before(cudaStream_t stream);

  // Marks what was enqueued on `stream` as the last call.
  void after(cudaStream_t stream);

 private:
  cudaEvent_t last_call_ = nullptr;
  bool called_ = false;
  unsigned long long capture_ = 0;  // that the last call was captured in; 0: none
};

}  // namespace ring_reduce
