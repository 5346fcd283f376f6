// Memory of the fake CUDA runtime.
#include "fake_cuda.h"

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sstream>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace fake_cuda {

namespace {

constexpr std::size_t kPage = 4096;

// In front of an allocation, shared by all who map it: the processes that have opened it.
struct Holders {
  std::atomic<int> pids[8];
};

struct Memory {
  std::size_t bytes;
  std::string file;  // empty: of another process, opened here
  std::string device;
};

struct State {
  std::string directory;
  std::map<std::byte*, Memory> device_memory;                            // by base
  std::map<std::string, std::byte*> opened;                              // by handle
  std::map<std::byte*, std::pair<std::byte*, std::size_t>> host_memory;  // what the device sees, by the host's address
  int allocations = 0;
};

State& state() {
  static auto* current = new State;
  const std::string directory = environment("FAKE_CUDA_DIR");
  if (current->directory != directory) {
    *current = State{};
    current->directory = directory;
  }
  return *current;
}

std::byte* map_file(const std::string& file, std::size_t bytes, int flags, int sharing) {
  const int descriptor = open(file.c_str(), flags | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0) return nullptr;
  if ((flags & O_CREAT) != 0 && ftruncate(descriptor, static_cast<off_t>(kPage + bytes)) != 0) return nullptr;
  void* base = mmap(nullptr, kPage + bytes, PROT_READ | PROT_WRITE, sharing, descriptor, 0);
  close(descriptor);
  return base == MAP_FAILED ? nullptr : static_cast<std::byte*>(base) + kPage;
}

Holders& holders(std::byte* base) { return *reinterpret_cast<Holders*>(base - kPage); }

void unmap(std::byte* base, std::size_t bytes) { munmap(base - kPage, kPage + bytes); }

// Garbage, other in each allocation: what is not cleared shows.
void poison(std::byte* base, std::size_t bytes, std::uint64_t seed) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15 + 1;
  for (std::size_t i = 0; i + sizeof x <= bytes; i += sizeof x) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    std::memcpy(base + i, &x, sizeof x);
  }
}

// The allocation that holds these bytes, or null.
std::pair<std::byte* const, Memory>* memory_of(const void* address, std::size_t bytes) {
  auto& all = state().device_memory;
  auto* const at = static_cast<std::byte*>(const_cast<void*>(address));
  auto next = all.upper_bound(at);
  if (next == all.begin()) return nullptr;
  auto& found = *std::prev(next);
  return at + bytes <= found.first + found.second.bytes ? &found : nullptr;
}

bool is_device_memory(const void* address, std::size_t bytes, const char* name) {
  if (memory_of(address, bytes) != nullptr) return true;
  tell(std::string("violation: ") + name + " of memory that is not the device's");
  return false;
}

}  // namespace

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

int fake_cuda_held() {
  const std::scoped_lock lock(mutex);
  return static_cast<int>(state().device_memory.size() + state().host_memory.size() + held_events());
}

// ---- memory

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  FAKE_CUDA_BEGIN("cudaMalloc");
  State& s = state();
  const std::string name = "memory." + std::to_string(getpid()) + "." + std::to_string(++s.allocations);
  const std::string file = s.directory + "/" + name;
  std::byte* base = map_file(file, bytes, O_CREAT | O_EXCL, MAP_SHARED);
  if (base == nullptr) return failed(cudaErrorMemoryAllocation);
  poison(base, bytes, static_cast<std::uint64_t>(getpid()) * 1000 + static_cast<std::uint64_t>(s.allocations));
  s.device_memory[base] = {bytes, file, device_name()};
  *address = base;
  tell("cudaMalloc " + name);
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  FAKE_CUDA_BEGIN("cudaFree");
  auto& all = state().device_memory;
  auto* const base = static_cast<std::byte*>(address);
  const auto found = all.find(base);
  if (found == all.end() || found->second.file.empty()) {
    tell("violation: cudaFree of what is no allocation");
    return failed(cudaErrorInvalidValue);
  }
  for (const std::atomic<int>& pid : holders(base).pids) {
    if (pid != 0 && kill(pid, 0) == 0) tell("violation: cudaFree while " + std::to_string(pid) + " has it open");
  }
  unlink(found->second.file.c_str());
  unmap(base, found->second.bytes);
  all.erase(found);
  tell("cudaFree");
  return cudaSuccess;
}

cudaError_t cudaMemset(void* address, int value, std::size_t bytes) {
  FAKE_CUDA_BEGIN("cudaMemset");
  if (!is_device_memory(address, bytes, "cudaMemset")) return failed(cudaErrorInvalidValue);
  std::memset(address, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  FAKE_CUDA_BEGIN("cudaMemcpy");
  const void* device = kind == cudaMemcpyHostToDevice ? to : from;
  if (!is_device_memory(device, bytes, "cudaMemcpy")) return failed(cudaErrorInvalidValue);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

// ---- memory of other processes. A handle is "<pid> <file> <bytes> <device>", and names a whole allocation.

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  FAKE_CUDA_BEGIN("cudaIpcGetMemHandle");
  const auto* found = memory_of(address, 1);
  if (found == nullptr || found->second.file.empty()) return failed(cudaErrorInvalidValue);
  const std::string file = found->second.file.substr(found->second.file.rfind('/') + 1);
  std::snprintf(handle->reserved, sizeof handle->reserved, "%d %s %zu %s", getpid(), file.c_str(), found->second.bytes,
                found->second.device.c_str());
  tell("cudaIpcGetMemHandle " + file);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  FAKE_CUDA_BEGIN("cudaIpcOpenMemHandle");
  State& s = state();
  const std::string text = handle.reserved;
  const auto parts = split(text, ' ');
  if (parts.size() != 4) return failed(cudaErrorInvalidValue);
  if (std::stoi(parts[0]) == getpid()) {
    tell("violation: a process opens its own handle");
    return failed(cudaErrorDeviceUninitialized);
  }
  if (s.opened.contains(text)) {
    tell("violation: a handle is opened twice");
    return failed(cudaErrorAlreadyMapped);
  }
  if (!are_peers(parts[3], device_name())) return failed(cudaErrorPeerAccessUnsupported);
  const std::size_t bytes = std::stoull(parts[2]);
  const int sharing =
      environment("FAKE_CUDA_FAULTS").find("lostWrites") != std::string::npos ? MAP_PRIVATE : MAP_SHARED;
  std::byte* base = map_file(s.directory + "/" + parts[1], bytes, 0, sharing);
  if (base == nullptr) return failed(cudaErrorInvalidResourceHandle);
  for (std::atomic<int>& pid : holders(base).pids) {
    int nobody = 0;
    if (pid.compare_exchange_strong(nobody, getpid())) break;
  }
  s.device_memory[base] = {bytes, "", parts[3]};
  s.opened[text] = base;
  *address = base;
  tell("cudaIpcOpenMemHandle " + parts[1]);
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* address) {
  FAKE_CUDA_BEGIN("cudaIpcCloseMemHandle");
  State& s = state();
  for (const auto& [text, base] : s.opened) {
    if (base != address) continue;
    for (std::atomic<int>& pid : holders(base).pids) {
      int mine = getpid();
      if (pid.compare_exchange_strong(mine, 0)) break;
    }
    tell("cudaIpcCloseMemHandle " + split(text, ' ')[1]);
    unmap(base, s.device_memory[base].bytes);
    s.device_memory.erase(base);
    s.opened.erase(text);
    return cudaSuccess;
  }
  tell("violation: cudaIpcCloseMemHandle of what is not open");
  return failed(cudaErrorInvalidValue);
}

// ---- host memory. The device sees it at another address, so that the two are not mixed up.

cudaError_t cudaHostRegister(void* address, std::size_t bytes, unsigned) {
  FAKE_CUDA_BEGIN("cudaHostRegister");
  void* alias = mremap(address, 0, bytes, MREMAP_MAYMOVE);  // of a shared mapping this makes a second one
  if (alias == MAP_FAILED) return failed(cudaErrorInvalidValue);
  state().host_memory[static_cast<std::byte*>(address)] = {static_cast<std::byte*>(alias), bytes};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  FAKE_CUDA_BEGIN("cudaHostUnregister");
  auto& all = state().host_memory;
  const auto found = all.find(static_cast<std::byte*>(address));
  if (found == all.end()) return failed(cudaErrorHostMemoryNotRegistered);
  munmap(found->second.first, found->second.second);
  all.erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* address, unsigned) {
  FAKE_CUDA_BEGIN("cudaHostGetDevicePointer");
  const auto found = state().host_memory.find(static_cast<std::byte*>(address));
  if (found == state().host_memory.end()) return failed(cudaErrorInvalidValue);
  *device = found->second.first;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned flags) {
  *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return cudaHostRegister(*address, bytes, flags);
}

cudaError_t cudaFreeHost(void* address) { return address == nullptr ? cudaSuccess : cudaHostUnregister(address); }
}
