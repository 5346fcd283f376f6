// Devices, errors and faults of the fake CUDA runtime.
#include "fake_cuda.h"

#include <cstdlib>
#include <fcntl.h>
#include <map>
#include <sstream>
#include <unistd.h>

namespace fake_cuda {

namespace {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

// How often each function was called since the faults were set.
std::map<std::string, int>& calls() {
  static auto* counted = new std::map<std::string, int>;
  static auto* of = new std::string;
  const std::string now = environment("FAKE_CUDA_DIR") + environment("FAKE_CUDA_FAULTS");
  if (*of != now) counted->clear();
  *of = now;
  return *counted;
}

std::vector<std::string> devices() { return split(environment("FAKE_CUDA_DEVICES", "00"), ','); }

}  // namespace

std::recursive_mutex mutex;

std::string environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::string device_name() {
  const auto all = devices();
  return static_cast<std::size_t>(current_device) < all.size() ? all[static_cast<std::size_t>(current_device)] : "";
}

bool are_peers(const std::string& a, const std::string& b) {
  for (const std::string& pair : split(environment("FAKE_CUDA_NO_PEER"), ',')) {
    if (pair == a + "-" + b || pair == b + "-" + a) return false;
  }
  return true;
}

cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

void tell(const std::string& what) {
  const std::string line = std::to_string(getpid()) + " " + what + "\n";
  const int ledger = open((environment("FAKE_CUDA_DIR") + "/ledger").c_str(), O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (ledger < 0 || write(ledger, line.data(), line.size()) < 0) std::abort();
  close(ledger);
}

cudaError_t fault(const std::string& name) {
  const std::scoped_lock lock(mutex);
  const int call = ++calls()[name];
  for (const std::string& each : split(environment("FAKE_CUDA_FAULTS"), ',')) {
    const auto parts = split(each, ':');
    if (parts.size() != 3 || parts[0] != name || std::stoi(parts[1]) != call) continue;
    tell("fault " + each);
    return failed(static_cast<cudaError_t>(std::stoi(parts[2])));
  }
  return cudaSuccess;
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  *version = devices().empty() ? 0 : CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  FAKE_CUDA_BEGIN("cudaGetDeviceCount");
  *count = static_cast<int>(devices().size());
  return *count != 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  FAKE_CUDA_BEGIN("cudaSetDevice");
  if (device < 0 || static_cast<std::size_t>(device) >= devices().size()) return failed(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  FAKE_CUDA_BEGIN("cudaGetDeviceProperties");
  const auto all = devices();
  if (device < 0 || static_cast<std::size_t>(device) >= all.size()) return failed(cudaErrorInvalidDevice);
  *properties = {};
  const std::string& name = all[static_cast<std::size_t>(device)];
  properties->uuid.bytes[15] = static_cast<char>(std::stoi(name, nullptr, 16));
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  FAKE_CUDA_BEGIN("cudaDeviceCanAccessPeer");
  const auto all = devices();
  *can = are_peers(all.at(static_cast<std::size_t>(device)), all.at(static_cast<std::size_t>(peer))) ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return "a fault of the fake runtime"; }
const char* cudaGetErrorName(cudaError_t error) {
  thread_local std::string name;
  name = "error " + std::to_string(static_cast<int>(error));
  return name.c_str();
}
}
