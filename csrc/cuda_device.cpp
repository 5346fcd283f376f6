#include "cuda_device.h"

#include "cuda_error.h"
#include "cuda_ring.h"

#include <cstdio>
#include <cuda_runtime.h>

namespace ring_reduce {

DeviceGuard::DeviceGuard(int device) {
  check_cuda(cudaGetDevice(&before_), "asking for the current device");
  check_cuda(cudaSetDevice(device), "making device " + std::to_string(device) + " the current one");
}

// An error has nobody to tell, and must not be taken for one of the caller's.
DeviceGuard::~DeviceGuard() {
  cudaSetDevice(before_);
  static_cast<void>(cudaGetLastError());
}

std::string device_uuid(int device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device),
             "asking for the properties of device " + std::to_string(device));
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(properties.uuid.bytes[i]));
    text += digits;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

int device_number(const std::string& uuid) {
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices), "asking for the number of devices");
  for (int device = 0; device < devices; ++device) {
    if (device_uuid(device) == uuid) return device;
  }
  return -1;
}

std::string why_no_cuda() {
  int driver = 0, runtime = 0, devices = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  const cudaError_t error = cudaGetDeviceCount(&devices);
  static_cast<void>(cudaGetLastError());
  if (driver == 0) return "there is no NVIDIA driver on this machine";
  if (error == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver supports CUDA " + version(driver) + " and ring_reduce was built with CUDA " +
           version(runtime) + "; update the driver, or reinstall with an older nvcc";
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && devices == 0)) {
    return "the NVIDIA driver sees no GPU; is CUDA_VISIBLE_DEVICES set?";
  }
  if (error != cudaSuccess) return std::string("CUDA does not start: ") + cudaGetErrorString(error);
  int blocks = 0;
  try {
    blocks = resident_blocks();
  } catch (const CudaError& reason) {
    return std::string("ring_reduce was built without code for this GPU (") + reason.what() +
           "); reinstall with RING_REDUCE_CUDA_ARCH=native";
  }
  return blocks > 0 ? "" : "the ring's kernel does not fit this GPU";
}

}  // namespace ring_reduce
