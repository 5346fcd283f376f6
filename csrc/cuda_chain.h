// Calls of one ring follow one another, on whatever streams they are.
#pragma once

#include <cuda_runtime.h>

namespace ring_reduce {

// They share slots and counters: one begins when the one before it has ended. A call that is captured in a graph waits
// for those before it in that capture; what replays the graph orders it against others. Of one device.
class CallChain {
 public:
  CallChain() = default;  // throws CudaError

  // Makes `stream` wait for the last call.
  void before(cudaStream_t stream);

  // Marks what was enqueued on `stream` as the last call.
  void after(cudaStream_t stream);

 private:
  class Event {
   public:
    Event();
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void record(cudaStream_t stream);
    void wait_on(cudaStream_t stream) const;

   private:
    cudaEvent_t event_ = nullptr;
  };

  // Two, since one that a capture records no longer stands for the call that runs.
  Event last_call_;      // outside of captures
  Event last_captured_;  // in `capture_`
  bool called_ = false;
  unsigned long long capture_ = 0;  // the last one that had a call; 0: none
};

}  // namespace ring_reduce
