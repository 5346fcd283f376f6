// A CUDA runtime without a GPU, linked in place of libcudart: device memory is files that processes map, streams are
// threads, and a kernel is any function. It is stricter than CUDA where CUDA leaves things undefined.
//
// The environment, read at each call:
//   FAKE_CUDA_DIR      a directory of the test's, the same for all ranks; memory lies there, and `ledger`, see below
//   FAKE_CUDA_DEVICES  the devices that this process sees, in its order, as two hex digits of their UUIDs: "00,01"
//   FAKE_CUDA_NO_PEER  pairs that have no peer access: "00-01,..."
//   FAKE_CUDA_FAULTS   "cudaIpcOpenMemHandle:2:101,...": the second call of it in this process returns error 101;
//                      "lostWrites:1:0": what is written into the first memory that is opened does not arrive
//
// A line of the ledger is "<pid> <what happened>"; what must not happen begins with "violation".
#pragma once

#include <cuda_runtime.h>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace fake_cuda {

// Runs `work` on the stream, after what was enqueued there before.
void enqueue(cudaStream_t stream, std::function<void()> work);

// The error to return from this call of `name`, or cudaSuccess.
cudaError_t fault(const std::string& name);

void tell(const std::string& what);

// The rest is for the fake's own sources.
extern std::recursive_mutex mutex;
std::string environment(const char* name, const char* otherwise = "");
std::vector<std::string> split(const std::string& text, char separator);
std::string device_name();  // of the current device
bool are_peers(const std::string& a, const std::string& b);
cudaError_t failed(cudaError_t error);  // keeps it for cudaGetLastError()
std::size_t held_events();

}  // namespace fake_cuda

// Begins a function of the runtime that may be told to fail.
#define FAKE_CUDA_BEGIN(name)               \
  const std::scoped_lock lock(mutex);       \
  const cudaError_t injected = fault(name); \
  if (injected != cudaSuccess) return injected

extern "C" {

// Allocations, mappings, registrations and events of this process that were not given back.
int fake_cuda_held();

// The stream is captured from now on, in the capture `id`; 0: no more. What is captured runs when it is replayed.
void fake_cuda_capture(cudaStream_t stream, unsigned long long id);
void fake_cuda_replay(cudaStream_t stream, unsigned long long id);
}
