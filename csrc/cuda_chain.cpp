#include "cuda_chain.h"

#include "cuda_error.h"

namespace ring_reduce {

namespace {

// The capture that the stream is in; 0: none.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture), "asking whether the stream is being captured");
  return status == cudaStreamCaptureStatusNone ? 0 : capture;
}

}  // namespace

CallChain::Event::Event() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "making an event"); }

CallChain::Event::~Event() {
  cudaEventDestroy(event_);
  static_cast<void>(cudaGetLastError());
}

void CallChain::Event::record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "recording a call"); }

void CallChain::Event::wait_on(cudaStream_t stream) const {
  check_cuda(cudaStreamWaitEvent(stream, event_, 0), "waiting for the last call");
}

void CallChain::before(cudaStream_t stream) {
  const unsigned long long capture = capture_of(stream);
  if (capture == 0 && called_) last_call_.wait_on(stream);
  if (capture != 0 && capture == capture_) last_captured_.wait_on(stream);
}

void CallChain::after(cudaStream_t stream) {
  const unsigned long long capture = capture_of(stream);
  if (capture == 0) {
    last_call_.record(stream);
    called_ = true;
  } else {
    last_captured_.record(stream);
    capture_ = capture;
  }
}

}  // namespace ring_reduce
