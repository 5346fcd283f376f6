#include "cuda_chain.h"

#include "cuda_error.h"

namespace ring_reduce {

CallChain::CallChain() { check_cuda(cudaEventCreateWithFlags(&last_call_, cudaEventDisableTiming), "making an event"); }

CallChain::~CallChain() {
  cudaEventDestroy(last_call_);
  static_cast<void>(cudaGetLastError());
}

void CallChain::before(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture), "asking whether the stream is being captured");
  if (status == cudaStreamCaptureStatusNone) capture = 0;
  if (called_ && capture == capture_) {
    check_cuda(cudaStreamWaitEvent(stream, last_call_, 0), "waiting for the last call");
  }
  capture_ = capture;
}

void CallChain::after(cudaStream_t stream) {
  check_cuda(cudaEventRecord(last_call_, stream), "recording a call");
  called_ = true;
}

}  // namespace ring_reduce
