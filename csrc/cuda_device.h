// Which GPU is meant. Its UUID is the same in every process, its number is not: CUDA_VISIBLE_DEVICES orders and hides.
#pragma once

#include <string>

namespace ring_reduce {

// Makes a device the current one of this thread, and the one before it again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);  // throws CudaError
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

// "GPU-6f2a1c3e-...", as nvidia-smi -L prints it. Throws CudaError.
std::string device_uuid(int device);

// The number here of the device with that UUID; -1 where this process can't see it.
int device_number(const std::string& uuid);

// "" where a ring can run here, else why it can't.
std::string why_no_cuda();

}  // namespace ring_reduce
